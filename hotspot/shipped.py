"""Which kernels of a profile are ours: those that the sources of the library's solutions define."""

from __future__ import annotations

import re
from functools import cache

from patcher.bench import Language, Op, SolutionInfo, comment_mark, load_ops, read_header
from patcher.bench.toolchains.ptx_source import kernel_names
from patcher.hotspot.names import normalise

_CUDA = re.compile(
    r"^[ \t]*namespace\s*(?P<space>\w*)\s*\{"
    r"|__global__\s+(?:void\s+)?(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?"
    r"(?:void\s+)?(?P<kernel>\w+)\s*\(",
    re.MULTILINE,
)
_TRITON = re.compile(r"^@triton\.jit[^\n]*\n(?:@[^\n]*\n)*def (?P<kernel>\w+)", re.MULTILINE)
_ANONYMOUS = r"\(anonymous\)"
_UNTIMED = "not measured."
"""What the header of a kernel says of its figures where there are none."""


@cache
def op_of_kernel(name: str) -> Op | None:
    """The op of the library whose own kernel this is; None for a kernel of anybody else."""
    spelled = normalise(name)[:4000]
    return next((op for form, op in _forms() if form.search(spelled)), None)


def ships(op: Op) -> bool:
    """Whether the library has a GPU kernel of an op that was timed: a plain one without figures
    closes no gap."""
    return any(info.device == "cuda" and _was_timed(op, info) for info, _ in op.solutions())


def _was_timed(op: Op, info: SolutionInfo) -> bool:
    folder = op.folder / "solutions" / info.name
    source = (folder / f"{op.name}{info.language.traits.suffix}").read_text(encoding="utf-8")
    return read_header(source, comment_mark(info.language.in_python)).get("Figures") != _UNTIMED


@cache
def _forms() -> tuple[tuple[re.Pattern[str], Op], ...]:
    """What the normalised names of our kernels match."""
    found = []
    for op in load_ops().values():
        for info, candidate in op.solutions():
            if info.language is Language.CUDA:
                found += [(form, op) for form in _of_cuda(candidate.source)]
            elif info.language in (Language.TRITON, Language.PTX):
                is_ptx = info.language is Language.PTX
                source = candidate.source
                names = kernel_names(source) if is_ptx else _TRITON.findall(source)
                found += [(re.compile(rf"^{name}$"), op) for name in names]
    return tuple(found)


def _of_cuda(source: str) -> list[re.Pattern[str]]:
    """Kernels with the namespace that was opened last before them."""
    forms, space = [], ""
    for match in _CUDA.finditer(source):
        if match["kernel"] is None:
            space = f"{match['space'] or _ANONYMOUS}::"
        else:
            forms.append(re.compile(rf"(?:^|[ :]){space}{match['kernel']}(?=[<(]|$)"))
    return forms
