"""`patcher.profile`: where decode spends its time, from a file or captured here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from patcher.api.display import Chart, StageReport, data_frame, html_table, progress_bar
from patcher.bench import (
    Count,
    DType,
    FilePath,
    FilePaths,
    Threads,
    UsageError,
    as_paths,
    check_arguments,
    presets,
)
from patcher.captures import capture_here
from patcher.extras import names_its_extra
from patcher.hotspot import Hotspot, KernelStat, Profile, read
from patcher.hotspot.read import UNNAMED
from patcher.ledgers import with_ledger, with_ledger_of
from patcher.places import places_in

if TYPE_CHECKING:
    from pandas import DataFrame

_NESTED = {"variants"}
_SHOWN = 10
"""Rows of the ranking that a notebook and `print` show."""


class ProfileResult(Profile):
    """A profile with its ranking, as `patcher.profile` returns it.

    `hotspots` are the ranked rows, `kernels` the kernels as measured, `warnings` what a reader of
    the figures must know. All times are nanoseconds.
    """

    def to_pandas(self, rows: Literal["hotspots", "kernels"] = "hotspots") -> DataFrame:
        """The rows as a data frame.

        Args:
            rows: `hotspots` for the ranking (kernel families, fusion chains, memory operations,
                idle time), or `kernels` for every kernel.

        Returns:
            One row for each hotspot or kernel, in the order of the profile. The columns are the
            fields of `Hotspot` or `KernelStat`: names and categories are strings, `*_ns` and
            counts integers, shares floats in percent.

        Raises:
            UsageError: other rows are asked for.
            MissingError: pandas is not installed.
        """
        match rows:
            case "hotspots":
                kind: type[Hotspot | KernelStat] = Hotspot
                found: Sequence[Hotspot | KernelStat] = self.hotspots
            case "kernels":
                kind, found = KernelStat, self.kernels
            case _:
                raise UsageError(f"unknown rows {rows!r}", "say hotspots or kernels")
        columns = [name for name in kind.model_fields if name not in _NESTED]
        return data_frame([one.model_dump(exclude=_NESTED) for one in found], columns)

    def plot(self) -> Chart:
        """The lanes of one decode step above the ranked hotspots, as a chart."""
        from patcher.report.picture import plot

        return Chart(f"profile of {self.model}", plot(self))

    def __repr__(self) -> str:
        first = f", first: {self.hotspots[0].name}" if self.hotspots else ""
        return (
            f"<ProfileResult {self.model}: {len(self.hotspots)} hotspots of {len(self.kernels)} "
            f"kernels, {self.total_kernel_ns / 1e6:.3f} ms{first}>"
        )

    def __str__(self) -> str:
        """The ranking's first rows as a table of plain text."""
        from patcher.show.profile import ranking_text

        return ranking_text(self, _SHOWN)

    def _repr_html_(self) -> str:
        rows = [
            (
                spot.rank,
                f"{spot.share_pct:.1f} %",
                f"{spot.mean_ns / 1e3:.2f}",
                "" if spot.sol_pct is None else f"{spot.sol_pct:.0f} %",
                f"+{spot.ceiling_pct:.1f} %",
                spot.triage,
                spot.name,
            )
            for spot in self.hotspots[:_SHOWN]
        ]
        left = len(self.hotspots) - len(rows)
        more = f"; {left} smaller rows are in to_pandas()" if left else ""
        head = ("#", "share", "mean us", "of SOL", "ceiling", "do", "kernel or chain")
        return html_table(f"{self.model}: {self.source}{more}", head, rows)


@names_its_extra
@check_arguments
def profile(
    source: FilePath | None = None,
    model: str | None = None,
    *,
    window: str | None = None,
    minus: FilePath | None = None,
    ncu: FilePath | None = None,
    steps: Count | None = None,
    force: bool = False,
    ledger: bool = False,
    gpu: str | None = None,
    engine: str = "transformers",
    device: str | None = None,
    batch: Count | None = None,
    input_len: Count | None = None,
    output_len: Count | None = None,
    weights: str = "random",
    dtype: DType | None = None,
    threads: Threads | None = None,
    patches: FilePaths = (),
    keep: FilePath | None = None,
    progress: bool | StageReport = True,
) -> ProfileResult:
    """Read a profile and rank it; without a file, capture one of `model` on this machine.

    Args:
        source: an nsys report (`.nsys-rep`), its SQLite or Parquet export, what `nsys stats`
            printed in any format, or a torch.profiler trace (`.json`, `.json.gz`).
        model: a preset's name tells layers and sizes, any other name is just kept. To capture: a
            preset, a Hugging Face id, a folder or a config.json.
        window: text of an NVTX range to rank, or `all` to keep warm-up and loading; by default the
            steady decode steps.
        minus: a profile of the same run with fewer tokens, whose kernels are taken off.
        ncu: Nsight Compute's counters for the same kernels: a report, or its csv.
        steps: decode steps in the file, where it cannot tell.
        force: rank a trace that hides kernels, under a warning.
        ledger: also compare a decode step with the least that the model needs, as `ledger` of the
            result.
        gpu: the GPU of a file that does not name it, for the ledger.
        engine: the engine that runs the model, to capture.
        device: `cpu` or `cuda`, to capture; by default CUDA where there is one.
        batch: sequences in a decode step; the preset's by default. One a call; `patcher profile
            --batch 1,8,64` captures several in one run of the engine.
        input_len: prompt tokens of a sequence, to capture, or of a file for its ledger.
        output_len: decode steps, to capture.
        weights: `random`, `hub` or `local`, to capture.
        dtype: `float32`, `bfloat16` or `float16`, to capture; by default as in `throughput`. Or
            of a file for its ledger; by default as the model was published.
        threads: CPU threads, to capture.
        patches: a bundle, or several, that are in while it is captured.
        keep: folder for the captured files, which name the host and its folders.
        progress: whether a bar is shown on a terminal or in a notebook, or a function that is
            called with (stage, done, total).

    Returns:
        The profile. `print` and a notebook show its ranking.

    Raises:
        UsageError: a file that cannot be read or hides kernels, or arguments that do not go
            together.
        MissingError: nsys, ncu, a GPU or the engine is needed and not here.
        PatcherError: the captured program failed.

    Examples:
        >>> p = patcher.profile("decode.nsys-rep")
        >>> print(p)
        >>> p.hotspots[0].name
        >>> p.to_pandas().sort_values("ceiling_pct")
        >>> p.plot().save("decode.svg")
    """
    captures = {
        "device": device,
        "input_len": input_len,
        "output_len": output_len,
        "dtype": dtype,
        "threads": threads,
        "keep": keep,
        "patches": patches or None,
    }
    if gpu is not None and not (ledger and source):
        raise UsageError("gpu names the GPU of a file, for its ledger", "add ledger=True")
    with progress_bar(progress) as report:
        if source is not None:
            if ledger:  # which counts with the prompt and the dtype of a file
                del captures["input_len"], captures["dtype"]
            if wrong := [name for name, value in captures.items() if value is not None]:
                raise UsageError(
                    f"{wrong[0]} applies only to a capture", "leave it out, or leave source out"
                )
            if str(source) in presets() and not Path(source).exists():
                raise UsageError(
                    f"there is no file {source}, but a model of that name",
                    f'to capture it: profile(model="{source}")',
                )
            report(f"read {Path(source).name}", 0, 1)
            found = read(
                source,
                model or UNNAMED,
                window=window,
                minus=minus,
                ncu=ncu,
                batch=batch,
                steps=steps,
                force=force,
                places=None if model is None else places_in(model),
            )
            if ledger:
                if model is None:
                    raise UsageError("a ledger needs the model's sizes", "name the model")
                found = with_ledger(
                    found, model, batch=batch, context=input_len, gpu=gpu, dtype=dtype
                )
            return _result(found)
        if model is None:
            raise UsageError("nothing to profile", "give a file, or model= to capture")
        if minus or ncu or window or steps or force:
            raise UsageError("minus, ncu, window, steps and force go with a file", "name a profile")
        from patcher.workloads import workload_of

        workload = workload_of(
            model, device, engine, batch, input_len, output_len, weights, threads, dtype
        )
        folder = None if keep is None else Path(keep)
        bundles = [Path(one) for one in as_paths(patches)]
        [found], _ = capture_here([workload], folder, bundles, lambda stage: report(stage, 0, 1))
        if ledger:
            found = with_ledger_of(found, workload)
        return _result(found)


def _result(found: Profile) -> ProfileResult:
    fields: dict[str, Any] = dict(found)
    return ProfileResult.model_construct(found.model_fields_set, **fields)
