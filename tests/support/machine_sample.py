"""What test_machine and others share."""

from __future__ import annotations

from pathlib import Path

from killing_stories import OP, ScriptedModel, verdict

from patcher import pipeline
from patcher.agent import run_loop
from patcher.attempts import LoopResult
from patcher.bench import Candidate, Evaluation, Language, load_op
from patcher.runs.run import Run
from patcher.settings import resolve


def begin(folder: Path) -> Run:
    plan = pipeline.RunPlan(op=OP, language=Language.CPP, whole=False)
    settings = resolve({"model": "exchange:letters", "iterations": 3, "runs_dir": folder})
    return pipeline.start(settings, "optimize", None, None, plan)


class Bench:
    """The loop with a scripted model and a judge whose verdicts are the machine's."""

    def __init__(self, speedups: list[float]) -> None:
        self.speedups = speedups
        self.asked: list[str] = []
        self.judged: list[str] = []

    def work(self, run: Run, iterations: int = 3) -> LoopResult:
        return run_loop(
            run, load_op(OP), Language.CPP, ScriptedModel(self), self.judge, iterations, "a CPU"
        )

    def __call__(self, step: str) -> Bench:
        self.asked.append(step)
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...

    def judge(self, candidate: Candidate) -> Evaluation:
        marker = candidate.source.rsplit("// ", 1)[-1].strip()
        self.judged.append(marker)
        return verdict(candidate, self.speedups[int(marker)])
