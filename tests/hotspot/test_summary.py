"""What nsys stats prints, in every format, reads to what its database holds."""

from __future__ import annotations

import gzip
import lzma
import sqlite3
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from patcher import bench
from patcher.hotspot.readers.summary import read_summary
from patcher.hotspot.recording import Recording, SummaryRow

DATA = Path(__file__).parents[1] / "data/nsys"
Times = dict[str, list[tuple[int, int]]]
"""Start and end of the launches of each kernel."""


def content(name: str) -> str:
    path = DATA / name
    raw = (
        path.read_bytes() if path.exists() else gzip.decompress((DATA / f"{name}.gz").read_bytes())
    )
    return raw.decode("utf-8")


def recorded(name: str) -> Recording:
    return read_summary(content(name), Path(name).name)


def kinds(recording: Recording) -> set[str]:
    return {warning.kind for warning in recording.warnings}


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, sqlite3.Connection]:
    found = {}
    for name in ("h", "n"):
        path = tmp_path_factory.mktemp("databases") / f"{name}.sqlite"
        path.write_bytes(lzma.decompress((DATA / f"golden/{name}.sqlite.xz").read_bytes()))
        found[name] = sqlite3.connect(path)
    return found


def launches_of(database: sqlite3.Connection, spelling: str = "demangledName") -> Times:
    found: Times = defaultdict(list)
    for name, start, end in database.execute(
        f'SELECT s.value, k.start, k."end" FROM CUPTI_ACTIVITY_KIND_KERNEL k '
        f"JOIN StringIds s ON s.id = coalesce(k.{spelling}, k.demangledName)"
    ):
        found[name].append((start, end))
    return found


def durations(times: Times) -> dict[str, list[int]]:
    return {name: [end - start for start, end in pairs] for name, pairs in times.items()}


def rows_of(times: Times) -> list[tuple[str, int, int, float, int, int]]:
    """What a summary must say: name, instances, total, median, least, greatest."""
    return sorted(
        (name, len(spans), sum(spans), median(spans), min(spans), max(spans))
        for name, spans in durations(times).items()
    )


WHOLE = (
    *("h_cuda_gpu_kern_sum.csv", "h_cuda_gpu_kern_sum.tsv.txt", "h_cuda_gpu_kern_sum.json.txt"),
    *("h_cuda_gpu_kern_sum.hdoc.txt", "h_cuda_gpu_kern_sum.htable.txt", "h_cuda_gpu_sum.csv"),
    *("h_two_reports_stdout.csv", "n_cuda_gpu_kern_sum.csv"),
    "h_kern_sum_column_nohdr_nolimit.txt",
)


@pytest.mark.parametrize("name", WHOLE)
def test_formats_in_ns_read_exactly(name: str, databases: dict[str, sqlite3.Connection]) -> None:
    recording = recorded(f"golden/{name}")
    assert sorted(map(tuple, recording.rows)) == rows_of(launches_of(databases[name[0]]))
    beside = {"host_bound"} if "two_reports" in name else set()
    assert kinds(recording) == {"no_times"} | beside
    assert recording.hidden is None
    assert recording.source.endswith(f" {name}")


@pytest.mark.parametrize(("name", "spelling"), [("base", "shortName"), ("mangled", "mangledName")])
def test_other_spellings_of_names(
    name: str, spelling: str, databases: dict[str, sqlite3.Connection]
) -> None:
    recording = recorded(f"golden/h_cuda_gpu_kern_sum_{name}.csv")
    assert sorted(map(tuple, recording.rows)) == rows_of(launches_of(databases["h"], spelling))
    assert kinds(recording) - {"no_times"} == ({"mangled_names"} if name == "mangled" else set())


@pytest.mark.parametrize(
    ("name", "step"), [("csv-dur-us", 1), ("timeunit-ms", 100)], ids=["us", "ms"]
)
def test_coarse_units_read_within_half_their_step(
    name: str, step: int, databases: dict[str, sqlite3.Connection]
) -> None:
    """us are printed to 1 ns (the median to the next even one), ms to 100 ns, which is told."""
    recording = recorded(f"golden/h_cuda_gpu_kern_sum_{name}.csv")
    wanted = rows_of(launches_of(databases["h"]))
    for row, (kernel, instances, *times) in zip(sorted(recording.rows), wanted, strict=True):
        assert (row.name, row.instances) == (kernel, instances)
        assert row[2:] == pytest.approx(times, abs=step / 2 + 1e-6)
    assert ("rounded_times" in kinds(recording)) == (step > 1)


@pytest.mark.parametrize(
    "name", ["h_cuda_gpu_kern_sum.column.txt", "h_cuda_gpu_kern_sum.table.txt"]
)
def test_text_clips_names_and_keeps_kernels_apart(
    name: str, databases: dict[str, sqlite3.Connection]
) -> None:
    recording = recorded(f"golden/{name}")
    wanted = [
        (name if len(name) <= 100 else f"{name[:99]}…", *rest)
        for name, *rest in rows_of(launches_of(databases["h"]))
    ]
    assert sorted(map(tuple, recording.rows)) == sorted(wanted)
    assert kinds(recording) == {"no_times", "clipped_names"}
    assert len({row.name for row in recording.rows}) < len(recording.rows)
    both = recorded("golden/h_default_reports_stdout.txt")
    assert sorted(both.rows) == sorted(recording.rows)


@pytest.mark.parametrize("report", ["kern_gb_sum", "kern_sum_nvtx-name"])
def test_rows_of_one_kernel_are_added_up(
    report: str, databases: dict[str, sqlite3.Connection]
) -> None:
    recording = recorded(f"golden/h_cuda_gpu_{report}.csv")
    wanted = rows_of(launches_of(databases["h"]))
    assert len(recording.rows) == len(wanted)
    for row, (name, instances, total, middle, least, most) in zip(
        sorted(recording.rows, key=lambda row: row.name), wanted, strict=True
    ):
        assert (row.name, row.instances, row.total_ns) == (name, instances, total)
        assert row.median_ns in (None, middle)  # unknown once two rows are one
        assert (row.min_ns, row.max_ns) == (least, most)
    assert kinds(recording) - {"no_times"} == ({"nvtx_names"} if "nvtx" in report else set())


def test_the_execution_summary_holds_the_kernels_whose_launch_is_known(
    databases: dict[str, sqlite3.Connection],
) -> None:
    """Totals are mean x count and the mean has one decimal: 0.05 ns a launch and row."""
    recording = recorded("golden/h_cuda_kern_exec_sum.csv")
    wanted: dict[str, list[int]] = defaultdict(list)
    for name, span in databases["h"].execute(
        'SELECT s.value, k."end" - k.start FROM CUPTI_ACTIVITY_KIND_KERNEL k '
        "JOIN StringIds s ON s.id = k.demangledName JOIN CUPTI_ACTIVITY_KIND_RUNTIME r "
        "ON r.correlationId = k.correlationId AND k.globalPid = r.globalTid & -16777216"
    ):
        wanted[name].append(span)
    assert {row.name: row.instances for row in recording.rows} == {
        name: len(spans) for name, spans in wanted.items()
    }
    for row in recording.rows:
        spans = wanted[row.name]
        assert row.total_ns == pytest.approx(sum(spans), abs=0.05 * len(spans) + 1)
        assert (row.min_ns, row.max_ns) == (min(spans), max(spans))
    assert "recorded_launches" in kinds(recording)


def test_a_cut_summary_by_range_is_part_of_its_source(
    databases: dict[str, sqlite3.Connection],
) -> None:
    recording = recorded("golden/h_nvtx_kern_sum.csv")
    spans = durations(launches_of(databases["h"]))
    assert sum(row.instances for row in recording.rows) == 1836
    for row in recording.rows:
        assert row.instances <= len(spans[row.name])
        assert row.total_ns <= sum(spans[row.name])
        assert row.min_ns in spans[row.name]
        assert row.max_ns in spans[row.name]
    assert kinds(recording) == {"no_times", "ranges"}


@pytest.mark.parametrize("name", ["n_cuda_gpu_trace.csv", "n_cuda_kern_exec_trace.csv"])
def test_traces_give_launches(name: str, databases: dict[str, sqlite3.Connection]) -> None:
    """The first 79 rows; nsys counts from the start of its recording, so all are shifted alike."""
    launches = recorded(f"golden/{name}").launches
    assert launches is not None
    flat = sorted(
        (start, end, name)
        for name, pairs in launches_of(databases["n"]).items()
        for start, end in pairs
    )[: len(launches)]
    assert [launches.texts[code] for code in launches.name] == [name for _, _, name in flat]
    assert (launches.end - launches.start).tolist() == [end - start for start, end, _ in flat]
    shifts = {start - want for start, (want, _, _) in zip(launches.start, flat, strict=True)}
    assert len(shifts) == 1
    assert set(launches.device.tolist()) == {0}


def test_a_gpu_trace_has_copies_its_stream_and_the_gpu(
    databases: dict[str, sqlite3.Connection],
) -> None:
    recording = recorded("golden/n_cuda_gpu_trace.csv")
    assert recording.memory is not None
    assert len(recording.memory) == 2
    copies = databases["n"].execute('SELECT "end" - start FROM CUPTI_ACTIVITY_KIND_MEMCPY')
    lengths = [length for (length,) in copies]
    assert set(np.diff(recording.memory[:, 1:]).ravel().tolist()) <= set(lengths)
    assert recording.gpu is not None
    assert recording.gpu.name == "Tesla T4"
    assert recording.launches is not None
    assert set(recording.launches.stream.tolist()) == {7}
    assert not recording.rows
    assert not recording.warnings


@pytest.mark.parametrize(
    "name",
    [
        *("cuda_gpu_kern_sum.csv", "h200/cuda_gpu_kern_gb_sum.csv", "h200/kern.json"),
        *("h200/cuda_gpu_kern_sum_base.csv", "h200/kern_default.txt", "h200/kern_table.txt"),
        *("h200/nvtx_kern_sum.csv", "h200/cuda_kern_exec_sum.csv"),
    ],
)
def test_one_run_in_eight_reports(name: str) -> None:
    recording = recorded(name)
    assert sum(row.instances for row in recording.rows) == 11_976
    total = sum(row.total_ns for row in recording.rows)
    rounded = 0.05 * 11_976 if "exec" in name else 0
    assert total == pytest.approx(77_548_893, abs=rounded)
    assert "ranges" not in kinds(recording)  # one range holds all


PASTED = {
    "dclahan_nsys-cuda2.md": (4, 5, 2_176_041_475, {"several_reports", "host_bound"}),
    "dotllm_llama3.1-8b-q4_prefill_nsys2024.6.2.csv": (15, 679, 198_511_027, set()),
    "gui_export_units_in_cells.csv": (1, 267_576, 102_664_000_000, {"incomplete", "rounded_times"}),
    "nsys_2025.3.2_multi_report_thousands.txt": (1, 45, 82_112, {"clipped_names", "host_bound"}),
    "nsys_cli_2026.3.1_stdout_no_thousands.txt": (1, 16_777_216, 21_570_333_587, set()),
    "old_cuda_kernel_statistics_variants.txt": (2, 30, 133_761_757, {"several_reports"}),
    "vllm_b200_nvfp4kv_moe_kern_sum_table.txt": (6, 261_546, 4_372_791_974, {"incomplete"}),
}
"""Rows, instances, total in ns: added up by hand from the files."""


@pytest.mark.parametrize("name", PASTED)
def test_what_people_pasted(name: str) -> None:
    recording = recorded(f"text/{name}")
    rows, instances, total, warned = PASTED[name]
    assert len(recording.rows) == rows
    assert sum(row.instances for row in recording.rows) == instances
    assert sum(row.total_ns for row in recording.rows) == total
    assert kinds(recording) == warned | {"no_times"}
    assert (recording.hidden is not None) == ("2025.3.2" in name)


def test_the_cells_of_the_gui_carry_units() -> None:
    assert recorded("text/gui_export_units_in_cells.csv").rows == (
        SummaryRow("fused_moe_kernel", 267_576, 102_664_000_000, 346_878.0, 2592, 239_809_000),
    )


def test_old_headings() -> None:
    parts = content("text/old_cuda_kernel_statistics_variants.txt").split("CUDA Kernel Statistics:")
    first, second, third = (read_summary(part, "x.txt") for part in parts[1:])
    assert first.rows[0] == SummaryRow(
        "void VectorOperation<Add<float>, float>(int, float, float*, Add<float>)",
        *(15, 67_362_653, None, 4_469_005, 4_518_252),
    )
    assert [row.instances for row in second.rows] == [8000, 8002]
    assert "incomplete" in kinds(second)
    assert third.rows[0].median_ns == 4_261_112_682


def test_graphs_traced_as_a_whole_are_told() -> None:
    """A summary alone cannot tell; with the API summary beside it, it can."""
    for name, hidden in (("graph_level_", True), ("", False)):
        kernels = "h200/graph_level_cuda_gpu_kern_sum.csv" if name else "cuda_gpu_kern_sum.csv"
        api = content(f"h200/{name}cuda_api_sum.csv")
        for text in (content(kernels) + "\n" + api, api + "\n" + content(kernels)):
            recording = read_summary(text, "x.csv")
            assert (recording.hidden is not None) == hidden
            assert not hidden or "--cuda-graph-trace=node" in str(recording.hidden)
        assert recorded(kernels).hidden is None


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("golden/h_cuda_api_sum.csv", "an API summary"),
        ("golden/h_cuda_gpu_mem_time_sum.csv", "a memory summary"),
        ("golden/h_cuda_gpu_mem_size_sum.csv", "a memory summary"),
        ("golden/h_nvtx_sum.csv", "an NVTX summary"),
        ("golden/h_nvtx_gpu_proj_sum.csv", "an NVTX summary"),
        ("text/vllm_qwen3-8b_graph_vs_node_and_torch.txt", "another text"),
        ("h200/graph_level_cuda_api_sum.csv", "an API summary"),
    ],
)
def test_reports_without_kernels_are_named(name: str, what: str) -> None:
    with pytest.raises(bench.UsageError, match=f"is {what}, not a kernel summary") as caught:
        recorded(name)
    assert "cuda_gpu_kern_sum" in caught.value.hint


@pytest.mark.parametrize("fence", ["    ", "> ", ""])
def test_markdown_around_a_table(fence: str) -> None:
    text = content("text/vllm_b200_nvfp4kv_moe_kern_sum_table.txt")
    fenced = "\n".join(f"{fence}{line}" for line in ["Look:", "```", *text.split("\n"), "```", "!"])
    if fence == "> ":
        with pytest.raises(bench.UsageError):
            read_summary(fenced, "x.md")
        return
    assert sum(row.instances for row in read_summary(fenced, "x.md").rows) == 261_546
    stripped = "\n".join(line.strip() for line in text.split("\n"))
    assert sum(row.instances for row in read_summary(stripped, "x.md").rows) == 261_546


def test_windows_line_ends_and_byte_order_marks() -> None:
    for name in ("cuda_gpu_kern_sum.csv", "h200/kern_default.txt", "h200/kern.json"):
        text = content(name)
        windows = "\ufeff" + text.replace("\n", "\r\n")
        assert read_summary(windows, name).rows == read_summary(text, name).rows
