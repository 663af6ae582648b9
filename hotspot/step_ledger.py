"""A step's ledger against the whole-model floor: where its time beyond the least goes.

The floor is what one kernel for the whole step would need: every byte of weights and KV cache once
at the rate that a copy reaches, or the arithmetic where that takes longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from patcher.bench import UsageError
from patcher.hotspot.gap_reasons import Answers
from patcher.hotspot.profile import Gpu, KernelStat, Profile
from patcher.hotspot.roofline import (
    REACHABLE,
    CopyRate,
    Places,
    ServedModel,
    completed,
    copy_rate,
    tensor_flops,
)
from patcher.hotspot.rules import rules
from patcher.hotspot.step_bytes import RoleBytes, StepBytes
from patcher.hotspot.step_record import LEAST_PCT, GapStatus, LedgerRole, StepLedger
from patcher.hotspot.step_roles import operation_of, role_of_operation, roles_of_step

NOISE = 0.95
"""A role that takes less than this share of its floor reads less than is counted."""


def step_ledger(
    profile: Profile,
    counted: StepBytes,
    *,
    gpu: str | None = None,
    places: Places | None = None,
) -> StepLedger:
    """Make the ledger of a profile's decode step.

    Args:
        profile: a ranked profile with known steps, of one device.
        counted: what a step of the model reads.
        gpu: the GPU's name, where the source does not say it.
        places: asked where an op can be put in the model.

    Raises:
        UsageError: the profile is not of decode steps of one device, or their number is unknown.
    """
    steps = _steps(profile)
    device = completed(Gpu(name=gpu)) if gpu else profile.gpu
    rate = copy_rate(device)
    times = _Times.of(profile, steps, counted)
    answers = Answers(profile, steps, ServedModel(places=places, name=profile.model), counted)
    step_ns = (profile.wall_ns or profile.total_kernel_ns) / steps
    rows = _rows(times, device, rate, answers)
    by_name = {row.role: row for row in rows}
    kernels = [
        answers.kernel(kernel, [by_name[role] for role in _by_time(share)], step_ns)
        for kernel, share in zip(profile.kernels, times.shares, strict=True)
    ]
    shown = [one for one in kernels if one.share_pct >= LEAST_PCT]
    rows += _without_kernels(profile, steps, answers)
    floor = sum(row.floor_ns or 0.0 for row in rows) if rate else None
    return StepLedger(
        gpu=device.name if device else None,
        batch=counted.batch,
        context=counted.context,
        weight_format=counted.weight_format,
        distinct_experts=counted.distinct_experts,
        experts=counted.experts,
        rate_bytes_per_s=rate.bytes_per_s if rate else None,
        rate_source=rate.source if rate else "the GPU is not known",
        roles=tuple(rows),
        kernels=tuple(sorted(shown, key=lambda one: -one.step_ns)),
        bytes=sum(row.bytes for row in rows),
        floor_ns=floor,
        step_ns=step_ns,
        sol_pct=100 * floor / step_ns if floor and step_ns else None,
        launches=sum(kernel.instances for kernel in profile.kernels) / steps,
        host_pct=_idle_pct(profile),
        notes=(*counted.missing, *_notes(profile, rate, by_name, times)),
    )


@dataclass
class _Times:
    """Time, launches and bytes of each role in a step."""

    spent: dict[str, float]
    launches: dict[str, float]
    shares: list[dict[str, float]]
    """Of each kernel of the profile, the fraction of its time in each role."""
    kernels: tuple[KernelStat, ...]
    counted: dict[str, RoleBytes]

    @classmethod
    def of(cls, profile: Profile, steps: int, counted: StepBytes) -> _Times:
        shares = _shares(profile, counted)
        _merge_parts(shares)
        spent: dict[str, float] = {}
        launches: dict[str, float] = {}
        for kernel, share in zip(profile.kernels, shares, strict=True):
            own = kernel.total_ns if kernel.exposed_ns is None else kernel.exposed_ns
            for role, part in share.items():
                spent[role] = spent.get(role, 0.0) + own * part / steps
                launches[role] = launches.get(role, 0.0) + kernel.instances * part / steps
        found = cls(spent, launches, shares, profile.kernels, dict(counted.roles))
        for merged, parts in _merged().items():
            if merged in spent:
                found._move(parts, merged)
        whole = sum(role.weights + role.kv for role in found.counted.values())
        silent = [
            name
            for name, role in found.counted.items()
            if name not in spent and role.weights + role.kv < LEAST_PCT / 100 * whole
        ]
        found._move(silent, "other")
        return found

    def _move(self, parts: list[str], to: str) -> None:
        for part in parts:
            if (moved := self.counted.pop(part, None)) is not None:
                self.counted[to] = self.counted.get(to, RoleBytes()) + moved

    def of_role(self, role: str) -> list[tuple[KernelStat, float]]:
        """The kernels of a role, each with its time in it, over all steps."""
        return [
            (kernel, share[role] * (kernel.exposed_ns or kernel.total_ns))
            for kernel, share in zip(self.kernels, self.shares, strict=True)
            if share.get(role)
        ]


def _shares(profile: Profile, counted: StepBytes) -> list[dict[str, float]]:
    """The fraction of each kernel's time in each role, by the launches of the usual step."""
    names = [kernel.name for kernel in profile.kernels]
    order = [names[launch.kernel] for launch in profile.step]
    has_shared = "shared" in counted.roles
    roles = roles_of_step(order, bool(counted.experts), has_shared)
    times: list[Counter[str]] = [Counter() for _ in names]
    for launch, role in zip(profile.step, roles, strict=True):
        times[launch.kernel][role] += max(launch.duration_ns, 1)
    found = []
    for kernel, own in zip(profile.kernels, times, strict=True):
        if not own:
            role = role_of_kernel(kernel)
            own[role if not order or role not in _merged() else "other"] = 1
        whole = sum(own.values())
        found.append({role: spent / whole for role, spent in own.most_common()})
    return found


def role_of_kernel(kernel: KernelStat) -> str:
    """The role of a kernel whose place in the step is not known."""
    return role_of_operation(operation_of(kernel.name))


def _merged() -> dict[str, list[str]]:
    """The roles that stand for several, with these."""
    return {row["name"]: row["parts"] for row in rules("roles")["role"] if "parts" in row}


def _merge_parts(shares: list[dict[str, float]]) -> None:
    """Where some kernel has a role that stands for several, all kernels of these have it."""
    for merged, parts in _merged().items():
        if any(merged in share for share in shares):
            for share in shares:
                for part in parts:
                    if part in share:
                        share[merged] = share.get(merged, 0.0) + share.pop(part)


def _rows(
    times: _Times, gpu: Gpu | None, rate: CopyRate | None, answers: Answers
) -> list[LedgerRole]:
    """A row for each role that has bytes or kernels, in the order of `roles.toml`."""
    rows = []
    for row in rules("roles")["role"]:
        name = row["name"]
        if name not in times.spent and name not in times.counted:
            continue
        need, spent = times.counted.get(name, RoleBytes()), times.spent.get(name, 0.0)
        floor = None if rate is None else _floor_ns(need, gpu, rate)
        status, reason = _status(times.of_role(name), name, floor, spent, answers)
        rows.append(
            LedgerRole(
                role=name,
                title=row["title"],
                weight_bytes=need.weights,
                kv_bytes=need.kv,
                activation_bytes=need.activations,
                floor_ns=floor,
                measured_ns=spent,
                launches=times.launches.get(name, 0.0),
                status=status,
                reason=reason,
            )
        )
    return rows


def _floor_ns(need: RoleBytes, gpu: Gpu | None, rate: CopyRate) -> float:
    moved = 1e9 * (need.weights + need.kv) / rate.bytes_per_s
    peak = tensor_flops(gpu) if gpu else None
    return max(moved, 1e9 * need.flops / peak if peak else 0.0)


def _status(
    kernels: list[tuple[KernelStat, float]],
    role: str,
    floor: float | None,
    spent: float,
    answers: Answers,
) -> tuple[GapStatus, str]:
    """What is known of a role's gap: what is known of the kernels that take most of its time."""
    if not kernels:
        return "unexplained", "no kernel of the profile was recognised as it"
    near = f"at {100 * (floor or 0.0) / spent:.0f} % of the floor" if spent else ""
    if floor and spent < NOISE * floor:
        return "unexplained", f"{near}: it reads less than is counted"
    if floor and floor >= REACHABLE * spent:
        return "closed", near
    known = [(*answers.status(kernel, role), own) for kernel, own in kernels]
    weights: Counter[GapStatus] = Counter()
    for status, _, own in known:
        weights[status] += round(own)
    most = weights.most_common(1)[0][0]
    reason = max((own, why) for status, why, own in known if status == most)[1]
    return most, reason


def _by_time(shares: Mapping[str, float]) -> list[str]:
    """Roles of a kernel, most time first."""
    return sorted(shares, key=lambda role: -shares[role])


def _without_kernels(profile: Profile, steps: int, answers: Answers) -> list[LedgerRole]:
    """The rows of idle time and of copies; a summary has neither."""
    if profile.wall_ns is None or profile.busy_ns is None:
        return []
    copies = profile.memory_ns or 0
    idle = profile.wall_ns - profile.busy_ns - copies
    rows = []
    for kind, title, spent in (("idle", "GPU idle", idle), ("memory", "copies, fills", copies)):
        if spent > 0:
            status, reason = answers.without_kernels(kind)
            rows.append(
                LedgerRole(
                    role="copies" if kind == "memory" else kind,
                    title=title,
                    floor_ns=0.0,
                    measured_ns=spent / steps,
                    status=status,
                    reason=reason,
                )
            )
    return rows


def _idle_pct(profile: Profile) -> float | None:
    if not profile.wall_ns or profile.busy_ns is None:
        return None
    return 100 * (1 - (profile.busy_ns + (profile.memory_ns or 0)) / profile.wall_ns)


def _steps(profile: Profile) -> int:
    if profile.devices:
        raise UsageError(
            "a ledger is of one GPU, and this profile has several",
            "profile one rank alone, or without tensor parallelism",
        )
    if profile.phase is not None and profile.phase != "decode":
        raise UsageError(
            f"a ledger is of decode steps, and these are of {profile.phase}",
            "choose decode steps with --window",
        )
    if not profile.steps:
        raise UsageError("the number of steps is not known", "give it with --steps")
    return profile.steps


def _notes(
    profile: Profile,
    rate: CopyRate | None,
    rows: Mapping[str, LedgerRole],
    times: _Times,
) -> list[str]:
    notes = []
    if rate is None:
        notes.append("no floor: the source does not name the GPU; give it with --gpu")
    if merged := [rows[name].title for name in _merged() if name in rows and name in times.spent]:
        notes.append(f"not told apart here: the parts of {' and '.join(merged)}")
    if profile.wall_ns is None:
        notes.append("a summary has no wall time: the step is the time of its kernels")
    return notes
