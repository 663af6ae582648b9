"""`patcher.evaluate`: the judge's verdict on one source file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from patcher.api.display import Chart, StageReport, data_frame, html_table, progress_bar
from patcher.api.judge_request import JudgeRequest
from patcher.bench import (
    Evaluation,
    FilePath,
    Language,
    Threads,
    Timeout,
    Timing,
    UsageError,
    WaitingError,
    check_arguments,
)
from patcher.extras import names_its_extra

if TYPE_CHECKING:
    from pandas import DataFrame


class EvaluationResult(Evaluation):
    """A verdict on one candidate, as `patcher.evaluate` returns it.

    `outcome` says how the evaluation ended, `checks` what was looked at, `timings` the candidate
    against the strongest baseline at each size.
    """

    @property
    def speedup(self) -> float | None:
        """Geometric mean over sizes of baseline time over candidate time; None: not timed."""
        return self.geomean_speedup

    def to_pandas(self) -> DataFrame:
        """The timings as a data frame.

        Returns:
            One row for each size of the sweep: first an integer column for each axis of the op,
            then the other fields of `Timing`. Times are microseconds, speedups are ratios.

        Raises:
            MissingError: pandas is not installed.
        """
        axes = list(dict.fromkeys(axis for timing in self.timings for axis in timing.axes))
        rows = [timing.axes | timing.model_dump(exclude={"axes"}) for timing in self.timings]
        columns = [*axes, *(name for name in Timing.model_fields if name != "axes")]
        return data_frame(rows, columns)

    def plot(self) -> Chart:
        """Time and speedup over the sweep of sizes, as a chart."""
        from patcher.report.picture import plot_evaluation

        return Chart(f"evaluation of {self.op}", plot_evaluation(self))

    def __repr__(self) -> str:
        gain = "" if self.speedup is None else f", {self.speedup:.3f}x against {self.baseline}"
        return f"<EvaluationResult {self.op} ({self.language}): {self.outcome}{gain}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        caption = repr(self).strip("<>").removeprefix("EvaluationResult ")
        if not self.timings:
            rows = [
                ("ok" if check.passed else "fail", check.name, check.detail)
                for check in self.checks
            ]
            return html_table(caption, ("", "check", "detail"), rows)
        points = [
            (
                " ".join(f"{axis}={size}" for axis, size in timing.axes.items()),
                f"{timing.candidate_us:.2f}",
                f"{timing.baseline_us:.2f}",
                f"{timing.speedup:.3f}x",
                f"{timing.speedup_low:.3f} to {timing.speedup_high:.3f}",
            )
            for timing in self.timings
        ]
        head = ("size", "candidate us", "baseline us", "speedup", "95 % interval")
        return html_table(caption, head, points)


@names_its_extra
@check_arguments
def evaluate(
    op: str,
    source: FilePath,
    *,
    language: str | None = None,
    baseline: str | None = None,
    sweep: str | None = None,
    device: str | None = None,
    pairs: int = 12,
    timeout_s: Timeout = 30.0,
    threads: Threads | None = None,
    tripwires: bool = True,
    sanitize: bool = False,
    counters: bool = False,
    recorded: FilePath | None = None,
    judge: str | None = None,
    progress: bool | StageReport = True,
) -> EvaluationResult:
    """Judge one kernel in processes of its own: is it right, is it faster?

    Args:
        op: an op of the library; `patcher ops` lists them.
        source: one source file, whose entry is a function named like the op.
        language: `cpp`, `cuda`, `triton`, ...; by default told by the file.
        baseline: compare with this baseline instead of the strongest that runs here.
        sweep: which sweep of the op is timed; by default the first for the device.
        device: `cpu` or `cuda`; by default a C++ candidate on the CPU, others on CUDA.
        pairs: pairs of timed blocks at each size, at least 3.
        timeout_s: seconds that one call may take, at least 0.1.
        threads: CPU threads of both sides; one by default.
        tripwires: whether the source is looked at for what a kernel must not do.
        sanitize: CUDA: whether it must pass compute-sanitizer, too.
        counters: CUDA: whether Nsight Compute counts in its kernels.
        recorded: calls of an engine that it must get right, too, as `patcher.recorded` wrote them.
        judge: `local`, `exchange:DIR` (served by `patcher worker DIR`), or `ray[:ADDRESS][@GPU]`;
            by the settings if None.
        progress: whether a bar is shown on a terminal or in a notebook, or a function that is
            called with (stage, done, total).

    Returns:
        The verdict. A crash, a hang or a wrong result of the candidate is an outcome, not an
        exception.

    Raises:
        UsageError: unknown op, sweep, baseline or language, or a file that cannot be read.
        MissingError: no compiler or no device for its language here.
        VerificationError: the op's checks do not discriminate, so nothing can be said.
        WaitingError: the judge is remote and has not answered yet; the same call takes it up.

    Examples:
        >>> v = patcher.evaluate("fused_add_rms_norm", "kernel.cu")
        >>> v.outcome, v.speedup
        >>> v.to_pandas()[["tokens", "candidate_us", "speedup"]]
    """
    if pairs < 3:
        raise UsageError(f"{pairs} pairs give no interval", "say 3 or more")
    request = JudgeRequest.of(
        op,
        Path(source),
        None if language is None else language_of(language),
        judge=judge,
        baseline=baseline,
        sweep=sweep,
        device=device,
        pairs=pairs,
        timeout_s=timeout_s,
        threads=threads,
        tripwires=tripwires,
        sanitize=sanitize,
        counters=counters,
        recorded=None if recorded is None else Path(recorded),
    )
    with progress_bar(progress) as report:
        try:
            found = request.evaluate(report)
        except WaitingError as error:
            hint = error.hint.replace("patcher resume", "the same call again")
            raise WaitingError(error.message, hint) from None
    fields: dict[str, Any] = dict(found)
    return EvaluationResult.model_construct(found.model_fields_set, **fields)


def language_of(name: str) -> Language:
    """A language by its name.

    Raises:
        UsageError: there is no such language.
    """
    try:
        return Language(name)
    except ValueError:
        raise UsageError(
            f"unknown language {name!r}", f"say one of {', '.join(Language)}"
        ) from None
