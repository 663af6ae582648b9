"""What is known of a gap to the floor: of each kernel, whether it could be faster, and fused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise

from patcher.bench import load_ops
from patcher.hotspot.chains import small_operation
from patcher.hotspot.profile import Hotspot, KernelStat, Profile
from patcher.hotspot.roofline import REACHABLE, ServedModel
from patcher.hotspot.rules import rules
from patcher.hotspot.shipped import op_of_kernel, ships
from patcher.hotspot.step_record import Answer, GapStatus, KernelAnswer

TOLD_PCT = 5.0
"""A kernel that is less than this near to its floor is not bound by memory, so it is not said."""
_AS_SHORT = 2.0
"""A kernel of up to this many times the shortest launch is all launch."""


class Answers:
    """What a profile and the library know of the kernels of a step."""

    def __init__(self, profile: Profile, steps: int, served: ServedModel) -> None:
        self._profile, self._steps, self._served = profile, steps, served
        self._short_ns = _AS_SHORT * (profile.launch_floor_ns or 0)

    def status(self, kernel: KernelStat, role: str) -> tuple[GapStatus, str]:
        """What is known of the gap of a kernel that has a role, and why."""
        if own := op_of_kernel(kernel.name):
            return "closed", f"the library's kernel of {own.name} runs here"
        spot = self._rows.get(kernel.name)
        if spot is not None and spot.op is not None and ships(load_ops()[spot.op]):
            return "closed", _shipped(spot.op)
        if spot is not None and spot.refusal:
            return "untried", f"no patch point takes it in this model: {spot.refusal}"
        plain = spot.op if spot is not None else None
        for name in _role_ops(role, kernel.name):
            points, refusal = self._served.places_of(load_ops()[name])
            if points and not refusal:
                if ships(load_ops()[name]):
                    return "closed", _shipped(name)
                plain = plain or name
        if kernel.operation == "communication":
            return "infeasible", "topology and message size determine communication"
        if "closed" in kernel.origin:
            return "infeasible", "closed source: only another call can replace it"
        if kernel.origin == "unknown":
            return "unexplained", "whose kernel it is, is not known"
        if plain is not None:
            return "untried", f"{kernel.origin}, and no kernel of op {plain} was timed"
        return "untried", f"{kernel.origin}, and no op of the library covers it"

    def without_kernels(self, kind: str) -> tuple[GapStatus, str]:
        """What is known of idle time or of copies, which are rows of the ranking."""
        spot = next((spot for spot in self._profile.hotspots if spot.kind == kind), None)
        if spot is None:
            return "closed", "there is none"
        return ("closed" if spot.triage == "leave" else "untried"), spot.reason

    def kernel(
        self, kernel: KernelStat, roles: Mapping[str, str], sol_pct: float | None, step_ns: float
    ) -> KernelAnswer:
        """Answer for one kernel.

        Args:
            kernel: the kernel.
            roles: title by name of the roles that it has, the one of most time first.
            sol_pct: how near the first role is to its floor, in percent.
            step_ns: wall time of a step.
        """
        spent = _spent(kernel) / self._steps
        faster, why = self._faster(kernel, next(iter(roles)), sol_pct)
        fusible, reason, beside = self._fusible(kernel)
        return KernelAnswer(
            name=kernel.name,
            roles=tuple(roles.values()),
            share_pct=100 * spent / step_ns if step_ns else 0.0,
            step_ns=spent,
            launches=kernel.instances / self._steps,
            faster=faster,
            faster_reason=why,
            fusible=fusible,
            fusible_reason=reason,
            neighbours=beside,
            in_chain=kernel.name in self._chain_of,
        )

    def _faster(self, kernel: KernelStat, role: str, sol_pct: float | None) -> tuple[Answer, str]:
        spot = self._rows.get(kernel.name)
        near = sol_pct
        if spot is not None and spot.cost_source == "ncu" and spot.sol_pct is not None:
            near = spot.sol_pct
        if near is not None and near >= 100 * REACHABLE:
            return "no", f"at {near:.0f} % of the floor"
        if kernel.mean_ns <= self._short_ns:
            return "no", "as short as a launch: only fewer launches help"
        status, reason = self.status(kernel, role)
        if near is not None and near >= TOLD_PCT:
            reason = f"at {near:.0f} % of the floor: {reason}"
        match status:
            case "closed":
                return ("untried" if op_of_kernel(kernel.name) else "yes"), reason
            case "infeasible":
                return "no", reason
            case "untried":
                return "untried", reason
            case _:
                return "unknown", reason

    def _fusible(self, kernel: KernelStat) -> tuple[Answer, str, tuple[str, ...]]:
        """Whether, why, and with which kernels."""
        chain = self._chain_of.get(kernel.name)
        if chain is not None:
            others = tuple(each.name for each in chain.variants if each.name != kernel.name)
            if chain.as_one is not None:
                return "yes", f"{chain.name}: op {chain.as_one} does the chain in one", others
            return "untried", f"{chain.name}: a chain, of which no op does all", others
        if not self._profile.step:
            return "unknown", "the source does not say the order of launches", ()
        beside = self._beside.get(kernel.name, ())
        small = [name for name in beside if self._is_small(name)]
        if not beside:
            return "no", "it does not run in the usual step", ()
        if not small:
            return "no", "what runs beside it is as heavy", beside
        return "untried", "what runs beside it is small, and could be part of it", tuple(small)

    def _is_small(self, name: str) -> bool:
        kernel = self._kernels[name]
        return small_operation(kernel.mean_ns, name) is not None

    @cached_property
    def _kernels(self) -> dict[str, KernelStat]:
        return {kernel.name: kernel for kernel in self._profile.kernels}

    @cached_property
    def _rows(self) -> dict[str, Hotspot]:
        """The row of the ranking that each kernel is in."""
        found: dict[str, Hotspot] = {}
        for spot in self._profile.hotspots:
            if spot.kind == "kernel":
                names = [variant.name for variant in spot.variants] or [spot.name]
                found |= dict.fromkeys(names, spot)
        return found

    @cached_property
    def _chain_of(self) -> dict[str, Hotspot]:
        """The chain that most launches of each kernel are in, if most of its launches are."""
        counts: dict[str, Counter[int | None]] = {}
        for launch in self._profile.step:
            name = self._profile.kernels[launch.kernel].name
            counts.setdefault(name, Counter())[launch.chain] += 1
        usual = {name: count.most_common(1)[0][0] for name, count in counts.items()}
        spots = self._profile.hotspots
        return {name: spots[chain] for name, chain in usual.items() if chain is not None}

    @cached_property
    def _beside(self) -> dict[str, tuple[str, ...]]:
        """The kernels that usually run before and after each one."""
        names = [self._profile.kernels[launch.kernel].name for launch in self._profile.step]
        sides: dict[str, tuple[Counter[str], Counter[str]]] = {}
        for before, after in pairwise(names):
            sides.setdefault(before, (Counter(), Counter()))[1][after] += 1
            sides.setdefault(after, (Counter(), Counter()))[0][before] += 1
        return {
            name: tuple(dict.fromkeys(side.most_common(1)[0][0] for side in both if side))
            for name, both in sides.items()
        }


def _spent(kernel: KernelStat) -> int:
    return kernel.total_ns if kernel.exposed_ns is None else kernel.exposed_ns


def _shipped(op: str) -> str:
    return f"a kernel of op {op} ships for it, and does not run here"


def _role_ops(role: str, kernel: str) -> list[str]:
    """Ops of the library that compute what this kernel does in that role."""
    for row in rules("roles")["role"]:
        if row["name"] == role and not ("but" in row and re.search(row["but"], kernel)):
            return [name for name in row.get("ops", []) if name in load_ops()]
    return []
