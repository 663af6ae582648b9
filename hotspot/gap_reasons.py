"""What is known of a gap to the floor: of each kernel, whether it could be faster, and fused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from patcher.bench import Op
from patcher.hotspot.chains import small_operation
from patcher.hotspot.coverage import (
    beside,
    by_role,
    by_symbols,
    does_chain,
    parts_of,
    takes_weights,
    weights_of,
)
from patcher.hotspot.profile import Hotspot, KernelStat, Profile
from patcher.hotspot.roofline import REACHABLE, ServedModel
from patcher.hotspot.shipped import op_of_kernel, ships
from patcher.hotspot.step_bytes import StepBytes
from patcher.hotspot.step_record import Answer, GapStatus, KernelAnswer, LedgerRole

TOLD_PCT = 5.0
"""A kernel that is less than this near to its floor is not bound by memory, so it is not said."""
_ANSWERS: Mapping[GapStatus, Answer] = {
    "closed": "yes",
    "infeasible": "no",
    "untried": "untried",
    "unexplained": "unknown",
}
"""Whether a kernel could be faster, by what is known of its gap."""
_OF_HEADS = ("head_dim", "group")
"""Axes that are of attention's heads if the op has key heads."""
_AS_SHORT = 2.0
"""A kernel of up to this many times the shortest launch is all launch."""


class Answers:
    """What a profile and the library know of the kernels of a step."""

    def __init__(
        self, profile: Profile, steps: int, served: ServedModel, counted: StepBytes
    ) -> None:
        self._profile, self._steps, self._served = profile, steps, served
        self._counted = counted
        self._short_ns = _AS_SHORT * (profile.launch_floor_ns or 0)

    def status(self, kernel: KernelStat, role: str) -> tuple[GapStatus, str]:
        """What is known of the gap of a kernel that has a role, and why."""
        if own := op_of_kernel(kernel.name):
            return "closed", f"the library's kernel of {own.name} runs here"
        named = by_symbols(kernel.name, role)
        ops = dict.fromkeys((*named, *by_role(kernel.name, role)))
        fitting = [op for op in ops if self._takes(op, kernel.name, role)]
        placed, refusals = [], {}
        for op in fitting:
            points, refusal = self._served.places_of(op)
            if refusal:
                refusals[op] = f"{op.name}: {refusal}"
            elif points:
                placed.append(op)
        if shipped := next((op for op in placed if ships(op)), None):
            return "closed", _shipped(shipped.name) + _beside(shipped.name, kernel.name)
        if not placed and (told := [refusals[op] for op in named if op in refusals]):
            return "untried", _refused(told)
        if kernel.operation == "communication":
            return "infeasible", "topology and message size determine communication"
        if "closed" in kernel.origin:
            return "infeasible", "closed source: only another call can replace it"
        if kernel.origin == "unknown":
            return "unexplained", "whose kernel it is, is not known"
        if placed:
            plain, more = placed[0].name, _beside(placed[0].name, kernel.name)
            return "untried", f"{kernel.origin}, and no kernel of op {plain} was timed{more}"
        if refusals:
            return "untried", _refused(refusals.values())
        return "untried", f"{kernel.origin}, and {self._none(kernel.name, role, ops)}"

    def _takes(self, op: Op, kernel: str, role: str) -> bool:
        """Whether an op takes the weights and the sizes of a kernel."""
        return self._outside(op) is None and takes_weights(op.name, kernel, self._formats(role))

    def _outside(self, op: Op) -> str | None:
        """The sizes of the step that a kernel of an op need not take; None if it takes them."""
        for axis, guard in op.contract.guards.axes.items():
            size = self._counted.axes.get(axis)
            if axis in _OF_HEADS and "kv_heads" not in op.contract.working_axes():
                continue  # another thing of the same name
            if size is not None and not guard.takes(size):
                return f"{axis} of {size:,}"
        return None

    def _formats(self, role: str) -> frozenset[str]:
        """Formats of the weights of a role, or of those that its module multiplies by."""
        known = self._counted.formats
        among = [role, *weights_of(role)]
        return frozenset().union(*(known.get(name, ()) for name in among))

    def _none(self, kernel: str, role: str, ops: Iterable[Op]) -> str:
        """Why no op covers a kernel, where none is refused."""
        outside = {op.name: self._outside(op) for op in ops}
        formats = self._formats(role)
        for name, size in outside.items():
            if size is not None and takes_weights(name, kernel, formats):
                return f"op {name} is not for {size}"
        if outside:
            told = " or ".join(sorted(formats))
            return f"no op of the library computes it for weights that are {told}"
        if len(parts := parts_of(kernel)) > 1:
            return f"no op of the library does all of it: {', '.join(sorted(parts))}"
        return "no op of the library covers it"

    def without_kernels(self, kind: str) -> tuple[GapStatus, str]:
        """What is known of idle time or of copies, which are rows of the ranking."""
        spot = next((spot for spot in self._profile.hotspots if spot.kind == kind), None)
        if spot is None:
            return "closed", "there is none"
        return ("closed" if spot.triage == "leave" else "untried"), spot.reason

    def kernel(
        self, kernel: KernelStat, roles: Sequence[LedgerRole], step_ns: float
    ) -> KernelAnswer:
        """Answer for one kernel.

        Args:
            kernel: the kernel.
            roles: those that it has, the one of most time first.
            step_ns: wall time of a step.
        """
        spent = _spent(kernel) / self._steps
        faster, why = self._faster(kernel, roles)
        fusible, reason, beside = self._fusible(kernel)
        return KernelAnswer(
            name=kernel.name,
            roles=tuple(role.title for role in roles),
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

    def _faster(self, kernel: KernelStat, roles: Sequence[LedgerRole]) -> tuple[Answer, str]:
        """The answer in the first role that is not near its floor, and the reasons in all where
        they differ."""
        spot = self._rows.get(kernel.name)
        counted = spot.sol_pct if spot is not None and spot.cost_source == "ncu" else None
        told: dict[tuple[Answer, str], str] = {}
        for role in roles:
            near = role.sol_pct if counted is None else counted
            if near is not None and near >= 100 * REACHABLE:
                told.setdefault(("no", ""), f"{role.title}: at {near:.0f} % of the floor")
            elif kernel.mean_ns <= self._short_ns:
                return "no", "as short as a launch: only fewer launches help"
            else:
                status, reason = self.status(kernel, role.role)
                known = near is not None and near >= TOLD_PCT
                said = f"at {near:.0f} % of the floor: {reason}" if known else reason
                told.setdefault((_ANSWERS[status], reason), f"{role.title}: {said}")
        answers: list[Answer] = [answer for answer, reason in told if reason]
        answer: Answer = answers[0] if answers else "no"
        if answer == "yes" and op_of_kernel(kernel.name):
            answer = "untried"
        if len(told) == 1:
            return answer, next(iter(told.values())).removeprefix(f"{roles[0].title}: ")
        return answer, "; ".join(told.values())

    def _fusible(self, kernel: KernelStat) -> tuple[Answer, str, tuple[str, ...]]:
        """Whether, why, and with which kernels."""
        chain = self._chain_of.get(kernel.name)
        if chain is not None:
            others = tuple(each.name for each in chain.variants if each.name != kernel.name)
            members = [each.name for each in chain.variants]
            if chain.as_one is not None and does_chain(chain.as_one, members):
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


def _beside(op: str, kernel: str) -> str:
    other = beside(op, kernel)
    return f"; it takes scales column by column only beside op {other}" if other else ""


def _refused(refusals: Iterable[str]) -> str:
    return f"no patch point takes it in this model: {'; '.join(refusals)}"
