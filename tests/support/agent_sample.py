"""What test_agent and others share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from tried_sample import timed

from patcher.bench import (
    Candidate,
    Check,
    Evaluation,
    Outcome,
)
from patcher.models import Reply, Role, Usage
from patcher.models.replay import RecordedReply, ReplayModel

OP = "fused_add_rms_norm"

DEVICE = "a CPU with 2 threads"


def code(marker: str) -> str:
    return f"Some thoughts.\n```cpp\nvoid {OP}() {{}} // {marker}\n```\n"


def advice(change: str, expected: float = 2.0) -> str:
    return json.dumps({"bottleneck": "latency", "change": change, "expected_speedup": expected})


def diagnosis(issue: str) -> str:
    return json.dumps({"critical_issue": issue, "why_it_matters": "so", "minimal_fix": "do not"})


Line = tuple[str, str] | tuple[str, str, str]


def recording(folder: Path, lines: list[Line], op: str = OP) -> ReplayModel:
    """A recording `recording.jsonl` of (`<iteration>/<role>`, text[, stop reason]) lines."""
    file = folder / "recording.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for step, text, *stop in lines:
            iteration, role = step.split("/")
            kind = cast(Role, role)
            reply = Reply(
                text=text,
                model="recorded-model",
                usage=Usage(input_tokens=100, output_tokens=50),
                stop_reason=stop[0] if stop else "end_turn",
                source="api",
                prompt_digest="0" * 64,
            )
            line = RecordedReply(
                step=f"{op}/{iteration}/ask-{role}",
                role=kind,
                prompt_digest="0" * 64,
                system="",
                prompt="",
                reply=reply,
            )
            out.write(line.model_dump_json() + "\n")
    return ReplayModel(file)


class Judge:
    """Verdicts by the marker in the source: a speedup or an outcome. Remembers what it saw."""

    def __init__(self, verdicts: dict[str, float | Outcome]) -> None:
        self.verdicts = verdicts
        self.seen: list[str] = []

    def __call__(self, candidate: Candidate) -> Evaluation:
        marker = candidate.source.rsplit("// ", 1)[-1].strip()
        self.seen.append(marker)
        return verdict(candidate, self.verdicts[marker])


def verdict(candidate: Candidate, said: float | Outcome) -> Evaluation:
    common = Evaluation(
        op=candidate.op,
        language=candidate.language,
        digest=candidate.digest,
        outcome=Outcome.COMPILATION_FAILURE,
    ).model_dump(exclude_unset=True, exclude={"outcome"})
    if isinstance(said, Outcome):
        check = Check(name="build", passed=False, detail="detail of the failed check")
        log = "unit.cpp:7:1: error: expected ';' before '}' token ```"
        return Evaluation(**common, outcome=said, checks=(check,), log=log)
    return Evaluation(
        **common,
        outcome=Outcome.CORRECT if said > 1 else Outcome.TOO_SLOW,
        checks=(Check(name="values", passed=True, detail="fine"),),
        baseline="eager",
        baselines={"eager": "10 us", "torch.compile": "no compiler"},
        timings=(timed(said),),
        geomean_speedup=said,
    )
