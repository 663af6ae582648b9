"""`patcher.throughput`: the end-to-end A/B of patches, with its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from patcher.ab.result import ABResult
from patcher.api.display import Chart, StageReport, data_frame, html_table, progress_bar
from patcher.bench import (
    Count,
    DType,
    FilePaths,
    Threads,
    Throughput,
    UsageError,
    as_paths,
    check_arguments,
)
from patcher.extras import names_its_extra

if TYPE_CHECKING:
    from pandas import DataFrame

_COLUMNS = (
    *("kind", "process", "pair", "arm", "tokens_per_s", "tokens", "decode_s", "prefill_s"),
    *("sm_clock_mhz", "temperature_c", "power_w", "kernel_calls"),
)


class ThroughputResult(ABResult):
    """Patches that were in together: what was measured, and the verdict.

    `measured` and `decisions` have one entry for each patch; all but receipts is shared.
    """

    @property
    def throughput(self) -> Throughput:
        """The A/B as measured: comparison, A/A control, windows, environment."""
        return self.measured[0].throughput

    @property
    def verdict(self) -> str:
        """`accept`, `reject` or `inconclusive`."""
        return self.decision.verdict

    @property
    def gain_pct(self) -> float:
        """Gain in tokens per second, in percent of the baseline."""
        return self.decision.gain_pct

    @property
    def interval_pct(self) -> tuple[float, float]:
        """Lower and upper end of the gain's interval, in percent."""
        return self.decision.gain_low_pct, self.decision.gain_high_pct

    def to_pandas(self) -> DataFrame:
        """The timed windows as a data frame.

        Returns:
            One row for each window, in the order measured: `kind` is `ab`, or `aa` for the
            control; `arm` is `baseline` or `patched`; times are seconds.

        Raises:
            MissingError: pandas is not installed.
        """
        windows = self.throughput.windows
        rows = [{name: getattr(window, name) for name in _COLUMNS} for window in windows]
        return data_frame(rows, _COLUMNS)

    def plot(self) -> Chart:
        """The gain's interval against the margin, and the gain of each pair, as a chart."""
        from patcher.report.picture import plot_throughput

        return Chart(f"gain of {', '.join(self.patches)}", plot_throughput(self.throughput))

    def __repr__(self) -> str:
        low, high = self.interval_pct
        return (
            f"<ThroughputResult {', '.join(self.patches)}: {self.verdict}, "
            f"{self.gain_pct:+.2f} % [{low:+.2f}, {high:+.2f}]>"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        caption = repr(self).strip("<>").removeprefix("ThroughputResult ")
        return html_table(caption, ("why",), [(reason,) for reason in self.decision.reasons])


@names_its_extra
@check_arguments
def throughput(
    model: str,
    patches: FilePaths,
    *,
    engine: str = "transformers",
    device: str | None = None,
    batch: Count | None = None,
    input_len: Count | None = None,
    output_len: Count | None = None,
    weights: str = "random",
    dtype: DType | None = None,
    preset: str | None = None,
    pairs: int | None = None,
    processes: Annotated[int, Field(ge=0)] | None = None,
    margin_pct: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None,
    quality_steps: Count = 32,
    engine_args: Mapping[str, Any] | None = None,
    threads: Threads | None = None,
    progress: bool | StageReport = True,
) -> ThroughputResult:
    """Measure patches end to end: interleaved A/B with an A/A control, quality, and a verdict.

    Args:
        model: a preset, a Hugging Face id or a folder.
        patches: a bundle (folder or `.zip` file) or the id of an applied patch; or several, which
            are in together.
        engine: `transformers` or `vllm`.
        device: `cpu` or `cuda`; by default CUDA where there is one.
        batch: sequences decoded together.
        input_len: prompt tokens of a sequence.
        output_len: decode steps of a window.
        weights: `random` (seeded), `hub` or `local`.
        dtype: `float32`, `bfloat16` or `float16`; by default the preset's, or of another model
            what it was published in, and float32 on a CPU.
        preset: traffic by name: `kforge` (hours) or `quick` (minutes).
        pairs: pairs of windows at most, at least 6.
        processes: process pairs, a process for each side; 0: one process for both. By default 4
            for vLLM, which is patched when it starts, else 0.
        margin_pct: gain in percent that the interval must exceed; by the settings if None.
        quality_steps: decode steps that are compared for quality.
        engine_args: vLLM: arguments of the engine in both arms, by name.
        threads: CPU threads.
        progress: whether a bar is shown on a terminal or in a notebook, or a function that is
            called with (stage, done, total).

    Returns:
        What was measured and the verdict on it.

    Raises:
        UsageError: unknown names, arguments that do not go together, or two patches for one point.
        MissingError: the engine or the device is not here.
        VerificationError: a bundle is damaged or does not fit this environment.

    Examples:
        >>> t = patcher.throughput("gpt-oss-tiny", patches=["norm.zip"])
        >>> t.verdict, t.gain_pct, t.interval_pct
    """
    import json

    from patcher.ab.options import ThroughputOptions, job_of
    from patcher.ab.timeline import Timeline
    from patcher.ab.verdict import compare_and_decide
    from patcher.integrate import open_bundle
    from patcher.settings import resolve
    from patcher.workloads import workload_of

    if not patches:
        raise UsageError("nothing to compare", "give patches=[...]")
    if pairs is not None and pairs < 6:
        raise UsageError(f"{pairs} pairs give no interval", "say 6 or more")
    asked = ThroughputOptions(preset, batch, input_len, output_len, pairs, processes)
    workload = workload_of(model, device, engine, *asked.shape, weights, threads, dtype)
    arguments = [f"{name}={json.dumps(value)}" for name, value in (engine_args or {}).items()]
    margin = resolve({"margin_pct": margin_pct}).margin_pct
    job = job_of(asked, workload, False, arguments, margin, quality_steps)
    with ExitStack() as stack:
        folders = [stack.enter_context(open_bundle(one)).folder for one in as_paths(patches)]
        report = stack.enter_context(progress_bar(progress))
        found = compare_and_decide(job, folders, Timeline(report), keep=resolve({}).runs_dir)
    fields: dict[str, Any] = dict(found)
    return ThroughputResult.model_construct(found.model_fields_set, **fields)
