"""What a person asks of the judge: one source file, how it is judged, and where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from patcher.bench import (
    Candidate,
    Evaluation,
    Language,
    Threads,
    Timeout,
    UsageError,
    check_arguments,
    load_op,
    pick_device,
)
from patcher.bench.judge import JudgeSettings, Progress
from patcher.judges import LOCAL, open_judges
from patcher.settings import resolve

REQUEST_ID = "evaluate"
"""By which a remote judge knows that a job is the same as before."""


@dataclass(frozen=True)
class JudgeRequest:
    """One candidate to judge."""

    candidate: Candidate
    settings: JudgeSettings
    judge: str
    """`local`, `exchange:DIR` or `ray[:ADDRESS][@GPU]`."""
    counters: bool = False
    """Whether the kernels of a right candidate are profiled with Nsight Compute."""

    @classmethod
    @check_arguments
    def of(
        cls,
        op: str,
        source: Path,
        language: Language | None = None,
        *,
        judge: str | None = None,
        baseline: str | None = None,
        sweep: str | None = None,
        device: str | None = None,
        pairs: int = 12,
        timeout_s: Timeout = 30.0,
        threads: Threads | None = None,
        tripwires: bool = True,
        sanitize: bool = False,
        counters: bool = False,
        recorded: Path | None = None,
    ) -> JudgeRequest:
        """Read the source and settle what is not given; see `patcher.evaluate`.

        Raises:
            UsageError: unknown op, a file that cannot be read, or options that do not go together.
            MissingError: counters are asked for and Nsight Compute is not here.
        """
        given = resolve({"judge": judge})
        candidate = Candidate.from_file(load_op(op).name, source, language)
        if recorded is not None and given.judge != LOCAL:
            raise UsageError(
                "a recording is not sent to a judge elsewhere", "judge it here: --judge local"
            )
        if counters:
            _require_counters(candidate.language, device, here=given.judge == LOCAL)
        settings = JudgeSettings(
            device=device,
            sweep=sweep,
            baseline=baseline,
            pairs=pairs,
            timeout_s=timeout_s,
            threads=threads,
            tripwires=tripwires,
            policy=given.tripwires.for_op(candidate.op),
            sanitize=sanitize,
            recorded=recorded,
        )
        return cls(candidate, settings, given.judge, counters)

    def evaluate(self, report: Progress) -> Evaluation:
        """The judge's verdict.

        Raises:
            WaitingError: the judge is remote and has not answered yet.
            PatcherError: as `patcher.bench.judge.evaluate`.
        """
        remote = self.judge != LOCAL
        with open_judges(
            self.judge, self.settings, REQUEST_ID, report, counters=self.counters and remote
        ) as judges:
            [evaluation] = judges.evaluate([self.candidate])
        if self.counters and not remote:
            from patcher.bench.judge.counters import counted

            return counted(self.candidate, evaluation, self.settings.sweep)
        return evaluation


def _require_counters(language: Language, device: str | None, *, here: bool) -> None:
    never = language.traits.device == "cpu" or language.compile_only
    if never or (here and pick_device(device) == "cpu"):
        raise UsageError("--counters is for CUDA kernels on a CUDA device", "drop it")
    if here:
        from patcher.bench.judge.counters import require_ncu

        require_ncu()
