"""What the receipts of a patched run claim, held against a profile of that run.

Receipts are counted by patcher's own code in the engine; a profiler sees what the device ran. A
patch is accepted on both: the new kernel's name is there, as often as claimed, and the old one's
is not.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

from patcher.bench import SCHEMA_VERSION, Language, Record
from patcher.bench.toolchains.ptx_source import kernel_names as ptx_kernels
from patcher.hotspot import KernelStat, Profile
from patcher.integrate import Patch, Receipt

_ANONYMOUS = {"(anonymous namespace)", "(anonymous)", "<unnamed>", "_NV_ANON_NAMESPACE"}
_SPACE = r"(?:\(anonymous namespace\)|\(anonymous\)|<unnamed>|\w+)::"
_NESTED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_BOUNDS = re.compile(rf"__(?:launch_bounds|cluster_dims|maxnreg|block_size)__\s*{_NESTED}")
_GLOBAL = re.compile(r"__global__\s+[^()]*?(\w+)\s*\(")
_MARKS = {Language.TRITON: r"\bjit\b", Language.CUTEDSL: r"\bkernel\b"}
"""How a Python source marks its kernels."""
_NAMESPACE = re.compile(r"\bnamespace\s+([\w:]+)\s*\{")


class ProofRow(Record):
    """One kernel of the profile that does the op's work."""

    kernel: str
    role: Literal["new", "old"]
    launches: int
    """In the profile."""
    per_step: float | None
    claimed: int
    """By the receipts: calls of the new kernel, or calls that went to the original."""
    passed: bool
    said: str


class Proof(Record):
    """Receipts and a profile of one patched run, row by row."""

    schema_version: int = SCHEMA_VERSION
    patch_id: str
    digest: str
    profile: str
    """What it was read from."""
    steps: int | None
    expected_per_step: int | None
    """Calls by the contract: those of a layer times the model's layers, where both are known."""
    rows: tuple[ProofRow, ...]
    problems: tuple[str, ...]
    """What the rows do not say."""

    @property
    def failures(self) -> list[str]:
        """What keeps the patch from being accepted."""
        return [
            *self.problems,
            *(f"{row.kernel}: {row.said}" for row in self.rows if not row.passed),
        ]

    @property
    def passed(self) -> bool:
        return not self.failures


def prove(
    receipts: Sequence[Receipt],
    profile: Profile,
    patch: Patch,
    *,
    before: Profile | None = None,
    whole: bool = False,
    together: Sequence[Patch] = (),
) -> Proof:
    """Hold the receipts of one run against its profile.

    A profile mostly shows a part of the run: then launches may be fewer than the receipts claim,
    never more, and in each step as many as the contract says.

    Args:
        before: a profile of the unpatched engine, for old names that do other work, too (a first
            norm without an addition, say): they must run less often by what the new one does.
        whole: the profile covers all that the receipts count, so both must be equal.
        together: all patches that were in, some of which take calls from others.
    """
    own = [one for one in receipts if one.patch_id == patch.manifest.id]
    claimed = sum(one.total_calls for one in own)
    fallbacks = sum(sum(one.fallbacks.values()) for one in own)
    names = kernel_names(patch)
    ours = {kernel.name: _whose(kernel.name, names, patch) for kernel in profile.kernels}
    # one kernel of a source may show as several: instances of a template, one a shape
    new = Counter[str]()
    for kernel in profile.kernels:
        if name := ours[kernel.name]:
            new[name] += kernel.instances
    old = [one for one in profile.kernels if not ours[one.name] and _engines_own(patch, one.name)]
    expected = _expected(patch, profile, together, own)
    workers = sum(bool(one.calls) for one in own)
    together_as = _shared(new, profile.steps, expected, max(1, workers))
    rows = [
        _new_row(name, launches, together_as, profile.steps, claimed, expected, workers, whole)
        for name, launches in new.items()
    ]
    rows += _old_rows(old, profile, fallbacks, _fewer(before, profile, patch, new, old))
    problems = [
        f"process {one.pid} has another patch of that id"
        for one in own
        if one.digest != patch.digest
    ]
    problems += [f"process {one.pid}: {one.failure}" for one in own if one.failure]
    if not claimed:
        problems.append("the receipts claim no call of the patched kernel")
    if not new:
        problems.append(f"the profile has no kernel called {' or '.join(sorted(names))}")
    return Proof(
        patch_id=patch.manifest.id,
        digest=patch.digest,
        profile=profile.source,
        steps=profile.steps,
        expected_per_step=expected,
        rows=tuple(rows),
        problems=tuple(problems),
    )


def is_of(patch: Patch) -> Callable[[str], bool]:
    """Whether a profile's kernel of that name is the patch's, or did its work before."""
    names = cache(lambda: kernel_names(patch))
    return lambda shown: bool(_whose(shown, names(), patch)) or _engines_own(patch, shown)


def kernel_names(patch: Patch) -> set[str]:
    """How profilers name what the patch runs: its GPU kernels, and its torch operator."""
    candidate, manifest = patch.candidate(), patch.manifest
    names = {f"patcher::{manifest.entry}_{patch.digest[:12]}"}
    if candidate.language is Language.CUDA:
        return names | set(_GLOBAL.findall(_BOUNDS.sub("", candidate.source)))
    if candidate.language is Language.PTX:
        return names | set(ptx_kernels(candidate.source))
    if candidate.language in _MARKS:
        mark = _MARKS[candidate.language]
        return names | {
            node.name
            for node in ast.walk(ast.parse(candidate.source))
            if isinstance(node, ast.FunctionDef)
            and any(re.search(mark, ast.unparse(each)) for each in node.decorator_list)
        }
    return names


def _whose(shown: str, names: set[str], patch: Patch) -> str | None:
    """Which of the patch's names it is: an engine's namespace before one makes it another's."""
    spaces = {
        part for found in _NAMESPACE.findall(patch.candidate().source) for part in found.split("::")
    }
    cute = patch.candidate().language is Language.CUTEDSL
    for name in sorted(names, key=len, reverse=True):
        form = re.escape(name)
        if cute:  # with the types of its arguments
            form = rf"(?:{form}|kernel_cutlass_{form}_\w+)"
        for match in re.finditer(rf"(?<![\w:])((?:{_SPACE})*){form}(?!\w)", shown):
            if set(match[1].split("::")[:-1]) <= spaces | _ANONYMOUS:
                return name
    return None


def _expected(
    patch: Patch, profile: Profile, together: Sequence[Patch], receipts: Sequence[Receipt]
) -> int | None:
    """Launches in one step of one worker, by its receipt's layers or else by the contract."""
    if patch.point is not None and patch.point.once_per_layer_taken:
        taken = {one.layers_taken for one in receipts if one.calls}
        if len(taken) == 1 and (layers := taken.pop()) is not None:
            return layers
        if patch.point.calls_per_layer == 0:
            return None
    calls = patch.calls_per_layer(together)
    return calls * profile.layers if calls is not None and profile.layers else None


def _engines_own(patch: Patch, kernel: str) -> bool:
    """Whether it did the work before, by its name."""
    pattern = patch.point.replaces if patch.point else ""
    return patch.contract.matches(kernel) or bool(pattern and re.search(pattern, kernel))


def _fits(launches: int, steps: int, expected: int, workers: int) -> bool:
    """One profile may show one worker's device, or all of them."""
    return round(launches / steps) in {expected * count for count in range(1, workers + 1)}


def _shared(new: Counter[str], steps: int | None, expected: int | None, workers: int) -> int | None:
    """Launches of all where a call runs one of several kernels, by its shape; None: each call runs
    each of them."""
    if not steps or expected is None or len(new) < 2:
        return None
    if any(_fits(launches, steps, expected, workers) for launches in new.values()):
        return None
    return new.total() if _fits(new.total(), steps, expected, workers) else None


def _new_row(
    name: str,
    launches: int,
    shared: int | None,
    steps: int | None,
    claimed: int,
    expected: int | None,
    workers: int,
    whole: bool,
) -> ProofRow:
    per_step = launches / steps if steps else None
    counted = launches if shared is None else shared
    passed, said = True, f"{launches:,} of the {claimed:,} calls that the receipts claim"
    if whole and counted != claimed:
        passed, said = False, f"{counted:,} launches, but the receipts claim {claimed:,} calls"
    elif counted > claimed:
        passed, said = False, f"{counted:,} launches, but the receipts claim {claimed:,} calls only"
    elif per_step is not None and steps and expected is not None:
        passed = _fits(counted, steps, expected, max(1, workers))
        said += f"; {per_step:.4g} a step, by the contract {expected}"
        if shared is not None:
            said += f", which its kernels share ({shared / steps:.4g} in all)"
    return ProofRow(
        kernel=name,
        role="new",
        launches=launches,
        per_step=per_step,
        claimed=claimed,
        passed=passed,
        said=said,
    )


def _old_rows(
    old: list[KernelStat], profile: Profile, fallbacks: int, fewer: str | None
) -> list[ProofRow]:
    total = sum(kernel.instances for kernel in old)
    if fewer is not None:
        passed, said = True, fewer
    elif total <= fallbacks:
        passed, said = True, f"at most {fallbacks:,} calls fell back, as the receipts count"
    else:
        passed = False
        said = f"still runs, and only {fallbacks:,} calls fell back; does it do other work, too?"
    return [
        ProofRow(
            kernel=kernel.name,
            role="old",
            launches=kernel.instances,
            per_step=kernel.instances / profile.steps if profile.steps else None,
            claimed=fallbacks,
            passed=passed,
            said=said,
        )
        for kernel in old
    ]


def _fewer(
    before: Profile | None,
    after: Profile,
    patch: Patch,
    new: Counter[str],
    old: list[KernelStat],
) -> str | None:
    """In words, that the old kernels run less often by what the new one does; None if not so."""
    if before is None or not before.steps or not after.steps or not new:
        return None
    known = sum(one.instances for one in before.kernels if _engines_own(patch, one.name))
    was = known / before.steps
    left = sum(one.instances for one in old) / after.steps
    ours = max(new.values()) / after.steps
    if was - left < ours - 0.5:
        return None
    return f"{was:.4g} a step before, {left:.4g} now; the new one {ours:.4g}"


def seen_per_step(
    patch: Patch,
    receipt: Receipt,
    after: Profile,
    before: Profile | None = None,
    together: Sequence[Patch] = (),
) -> float | None:
    """Launches of the patched kernel in a step of the profile: of all its parts where a call runs
    one of them, else of the most frequent."""
    proof = prove([receipt], after, patch, before=before, together=together)
    new = Counter({row.kernel: row.launches for row in proof.rows if row.role == "new"})
    expected = proof.expected_per_step
    shared = _shared(new, after.steps, expected, max(1, bool(receipt.calls)))
    if not new or not after.steps:
        return None
    return (shared or max(new.values())) / after.steps
