"""What others publish of KernelBench, and our column beside it, condition by condition.

A cell is empty where their paper or code, as far as it was read, does not say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from patcher.bench import Record
from patcher.bench.lab.kernelbench_figures import ColumnFigures
from patcher.bench.lab.loop_runs import Estimated

ARITHMETIC = {
    "fp32": "float32, TF32 off, both sides",
    "tf32": "float32, TF32 allowed, both sides",
    "bf16": "bfloat16, both sides",
    "fp16": "float16, both sides",
}


class PublishedFigures(Record):
    """The conditions and figures of one source."""

    name: str
    source: str
    problems: str
    device: str
    language: str = ""
    model: str = ""
    iterations: str = ""
    against: str
    arithmetic: str = ""
    sizes: str = ""
    right_when: str = ""
    right: str = ""
    geomean: str = ""
    mean: str = ""
    median: str = ""
    usd: str = ""
    minutes: str = ""
    minutes_of: str = ""


KFORGE = PublishedFigures(
    name="KForge",
    source="[arXiv 2606.02963](https://arxiv.org/abs/2606.02963)",
    problems="37 of Level 2: a matmul and what follows it",
    device="Intel Arc B580",
    iterations="5",
    against="the faster of eager and torch.compile",
    geomean="5.13",
)
CUDAFORGE = PublishedFigures(
    name="CudaForge",
    source="[arXiv 2511.01884](https://arxiv.org/abs/2511.01884)",
    problems="KernelBench",
    device="NVIDIA RTX 6000",
    language="CUDA",
    model="OpenAI o3, as coder and as judge",
    against="PyTorch",
    sizes="the file's",
    right_when="one input within 1e-2 (its code at f70bc3f)",
    right="97.6 %",
    mean="1.68",
    median="1.11",
    usd="0.30",
    minutes="26.5",
    minutes_of="the whole loop, on one GPU",
)
ROWS = (
    ("source", "source"),
    ("problems", "problems"),
    ("device", "device"),
    ("language", "language"),
    ("model", "model"),
    ("iterations", "iterations"),
    ("speedup over", "against"),
    ("arithmetic", "arithmetic"),
    ("sizes timed", "sizes"),
    ("right is", "right_when"),
    ("right", "right"),
    ("speedup, geomean", "geomean"),
    ("mean", "mean"),
    ("median", "median"),
    ("$ a kernel", "usd"),
    ("minutes a kernel", "minutes"),
    ("which are", "minutes_of"),
)


def ours(column: ColumnFigures, answered_by: str = "") -> PublishedFigures:
    """A column of ours in the same words; `answered_by` is the model that wrote the replies."""
    right = column.right_by[-1] if column.right_by else None
    return PublishedFigures(
        name=f"patcher, {column.precision}",
        source="below",
        problems=f"{column.runs}, named below",
        device=", ".join(column.devices),
        language=", ".join(column.languages),
        model=answered_by or ", ".join(column.models),
        iterations=f"at most {len(column.right_by)}",
        against="the faster of eager and torch.compile (max-autotune)",
        arithmetic=ARITHMETIC.get(column.precision, column.precision)
        + (f"; kernels in a narrower type in {column.narrower}" if column.narrower else ""),
        sizes=_sizes(column.sizes),
        right_when="seeded cases at hidden sizes and in regimes, within the error that the "
        "arithmetic allows against float64",
        right="" if right is None else _percent(right),
        geomean=_shown(column.geomean),
        mean=_shown(column.mean),
        median=_shown(column.median),
        usd=f"{column.usd:.2f}" if column.usd else "",
        minutes="" if column.gpu_s is None else f"{column.gpu_s / 60:.1f}",
        minutes_of="on the GPU, of all its candidates; the model's time is not in it",
    )


def beside(columns: Sequence[ColumnFigures], answered_by: str = "") -> list[str]:
    """A table: a row a condition or figure, a column a source."""
    all_ = [*(ours(column, answered_by) for column in columns), KFORGE, CUDAFORGE]
    lines = [_line("", *(each.name for each in all_)), f"| --- |{' --- |' * len(all_)}"]
    lines += [_line(what, *(getattr(each, name) for each in all_)) for what, name in ROWS]
    return lines


def _sizes(runs: Mapping[str, int]) -> str:
    """The sizes that were timed, with the number of runs where they differ."""
    if len(runs) < 2:
        return "".join(runs)
    return "; ".join(f"{words} in {count}" for words, count in runs.items())


def _percent(share: Estimated) -> str:
    assert share.low is not None
    assert share.high is not None
    return f"{100 * share.value:.1f} % ({100 * share.low:.0f} to {100 * share.high:.0f})"


def _shown(value: Estimated | None) -> str:
    return "" if value is None else str(value)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
