"""The ranges by which engines and profilers name a step, and the phase that each one tells."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Phase = Literal["decode", "prefill", "mixed"]
"""What a step computes: new tokens of running sequences, prompts, or both."""

STEP_WORDS = ("%context%generation%", "execute_new_%cached%", "%step%")
"""SQL patterns that hold every range of `mark_of`; `LIKE` ignores case."""

_VLLM = re.compile(r"execute(?:_\d+)?_context_(\d{1,9})(?:\([^()]*\))?_generation_(\d{1,9})(?!\d)")
"""`execute_context_1(512)_generation_8(8)`; newer versions add a count of tokens and sums."""
_VLLM_CACHED = re.compile(r"execute_new_(\d{1,9})_cached_(\d{1,9})(?!\d)")
"""`execute_new_0_cached_8`, as versions before wrote it: requests that are new, and that are not.
The rest of a prompt that was cut is not new either; it counts as decode."""
_SGLANG = re.compile(r"step\[([A-Z_0-9]+)[ \]]")
"""`step[DECODE bs=32]`, `step[EXTEND bs=1 toks=512]`."""
_SGLANG_PHASES: dict[str, Phase] = {
    "DECODE": "decode",
    "VERIFY": "decode",
    "TARGET_VERIFY": "decode",
    "EXTEND": "prefill",
    "PREFILL": "prefill",
    "SPLIT_PREFILL": "prefill",
    "DLLM_EXTEND": "prefill",
    "MIXED": "mixed",
}
"""Draft and idle ranges are no steps: a draft belongs to the verification before it."""
_TENSORRT = re.compile(
    r"\[Executor\] _forward_step(?: \d{1,18})?: (\d{1,9}) ctx reqs(?:, \d{1,18} ctx tokens)?, "
    r"(\d{1,9}) gen reqs"
)
"""`[Executor] _forward_step 7: 0 ctx reqs, 8 gen reqs`; newer versions count prompt tokens."""
_PROGRAM = re.compile(r"(?:(decode|prefill)[ _.:-]?)?step(?:[ _#:-]*\d{1,18})?", re.IGNORECASE)
_PROFILER = re.compile(r"ProfilerStep ?#(\d{1,18})")


class Mark(NamedTuple):
    """What the name of a range says about a step."""

    level: int
    """0 for an engine's own steps, 1 for a program's, 2 for torch.profiler's. The least level
    counts, since a profiler's step may hold several of an engine's."""
    phase: Phase | None


def mark_of(text: str) -> Mark | None:
    """The step that a range names; None for any other range."""
    text = text[:500].strip().removeprefix(":")
    if (match := _VLLM.match(text) or _VLLM_CACHED.match(text)) is not None:
        return Mark(0, _phase(int(match[1]), int(match[2])))
    if (match := _TENSORRT.match(text)) is not None:
        return Mark(0, _phase(int(match[1]), int(match[2])))
    if (match := _SGLANG.match(text)) is not None:
        phase = _SGLANG_PHASES.get(match[1])
        return None if phase is None else Mark(0, phase)
    if (match := _PROGRAM.fullmatch(text)) is not None:
        word = (match[1] or "").lower()
        return Mark(1, "decode" if word == "decode" else "prefill" if word else None)
    return Mark(2, None) if _PROFILER.fullmatch(text) else None


def _phase(prompts: int, running: int) -> Phase | None:
    if prompts and running:
        return "mixed"
    if prompts:
        return "prefill"
    return "decode" if running else None
