"""Names, formats and damage that a kernel summary must survive."""

from __future__ import annotations

import csv
import html
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nsys_sample import content

from patcher import bench
from patcher.hotspot.readers.summary import read_summary
from patcher.hotspot.readers.tables import tables
from patcher.hotspot.recording import SummaryRow

HEAD = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns)"
PLANTED = (
    *('k_with "quote", comma', 'k_with "quote"', "a,b", "a, b,", '"', "Num Calls", "Name", "1"),
    *(
        "1,2,3,4,5,6,7,8,9",
        "Time (%)",
        "a | b",
        "- --",
        "<td>",
        "&lt;",
        "[CUDA memset]",
        "…x",
        "[{",
    ),
    *("Processing [x]", "100.0", "a  b   c", "{}", "k\\n", "NVTX Range", "Ω<μs>", "a\x85b\x0cc"),
    *("void f<(int)1>(T1 *, const T1 &)::[lambda() (instance 1)]", "at::operator/(int, int)"),
)
"""Names as they may be, and as only an enemy would write them."""


def summary_rows(names: list[str]) -> tuple[SummaryRow, ...]:
    return tuple(
        SummaryRow(name, at + 1, (at + 1) * 1000, 1000.0, 900 + at, 1100 + at)
        for at, name in enumerate(names)
    )


def cells_of(rows: tuple[SummaryRow, ...]) -> list[list[str]]:
    whole = sum(row.total_ns for row in rows)
    return [
        [
            *(f"{100 * row.total_ns / whole:.1f}", str(row.total_ns), str(row.instances)),
            *(f"{row.total_ns / row.instances:.1f}", f"{row.median_ns:.1f}"),
            *(str(row.min_ns), str(row.max_ns), "0.0", row.name),
        ]
        for row in rows
    ]


def as_csv(rows: tuple[SummaryRow, ...]) -> str:
    """As nsys does: a name is quoted if it holds a comma, its quotes are not doubled."""
    lines = [
        ",".join([*cells[:-1], f'"{cells[-1]}"' if "," in cells[-1] else cells[-1]])
        for cells in cells_of(rows)
    ]
    return "\n".join([f"{HEAD},Name", *lines, "", ""])


def as_requoted_csv(rows: tuple[SummaryRow, ...]) -> str:
    file = io.StringIO(newline="")
    writer = csv.writer(file, quoting=csv.QUOTE_ALL)
    writer.writerow([*HEAD.split(","), "Name"])
    writer.writerows([cells[0], f"{int(cells[1]):,}", *cells[2:]] for cells in cells_of(rows))
    return file.getvalue()


def as_tsv(rows: tuple[SummaryRow, ...]) -> str:
    head = f"{HEAD},Name".replace(",", "\t")
    lines = ["\t".join([*cells[:-1], cells[-1].replace("\t", " ")]) for cells in cells_of(rows)]
    return "\n".join([head, *lines, ""])


def as_json(rows: tuple[SummaryRow, ...]) -> str:
    columns = [*HEAD.split(","), "Name"]
    items = [
        dict(zip(columns, [*map(float, cells[:-1]), cells[-1]], strict=True))
        for cells in cells_of(rows)
    ]
    return json.dumps(items, indent=2)


def as_broken_json(rows: tuple[SummaryRow, ...]) -> str:
    """Quotes in names are not escaped."""
    columns = HEAD.split(",")
    items = []
    for cells in cells_of(rows):
        pairs = zip(columns, cells, strict=False)
        members = [f'    "{column}": {cell}' for column, cell in pairs]
        items.append(",\n".join([*members, f'    "Name": "{cells[-1]}"']))
    return "[\n" + ",\n".join(f"  {{\n{item}\n  }}" for item in items) + "\n]\n"


def as_html(rows: tuple[SummaryRow, ...]) -> str:
    head = "\n".join(f"<th>{cell}</th>" for cell in [*HEAD.split(","), "Name"])
    body = "\n".join(
        "<tr>\n" + "\n".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "\n</tr>"
        for cells in cells_of(rows)
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>\n</table>\n"


def widths(rows: tuple[SummaryRow, ...]) -> tuple[list[list[str]], list[int]]:
    lines = [[*HEAD.split(","), "Name"], *cells_of(rows)]
    return lines, [max(len(line[at]) for line in lines) for at in range(9)]


def as_columns(rows: tuple[SummaryRow, ...]) -> str:
    lines, wide = widths(rows)
    printed = [
        " " + "  ".join([*(c.rjust(w) for c, w in zip(line[:8], wide, strict=False)), line[8]])
        for line in lines
    ]
    ruler = " " + "  ".join("-" * width for width in wide)
    return "\n".join(["", " ** CUDA (cuda_gpu_kern_sum):", "", printed[0], ruler, *printed[1:], ""])


def as_table(rows: tuple[SummaryRow, ...]) -> str:
    lines, wide = widths(rows)
    border = "+" + "+".join("-" * (width + 2) for width in wide) + "+"
    printed = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, wide, strict=True)) + " |"
        for line in lines
    ]
    return "\n".join(["Text before.", border, printed[0], border, *printed[1:], border, ""])


WRITERS = {
    writer.__name__: writer
    for writer in (
        *(as_csv, as_requoted_csv, as_tsv, as_json, as_broken_json, as_html, as_columns, as_table),
    )
}
NAMES = st.lists(
    st.one_of(
        st.sampled_from(PLANTED),
        st.text(st.sampled_from("ab<>(),:*& \"'|_[]-1…"), min_size=1, max_size=30),
        st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12),
    ).filter(lambda name: name.strip() == name and name not in ("`", "")),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("style", WRITERS)
@settings(max_examples=120, deadline=None)
@given(names=NAMES)
def test_what_is_written_is_read(style: str, names: list[str]) -> None:
    """Also in a stream, between chatter and other reports."""
    if style in ("as_csv", "as_tsv"):
        # a whole line may be a name, but what nsys itself quotes wrongly nobody can tell
        names = [name for name in names if not starts_quoted(name)] or ["k"]
    names = [name for name in names if "/" not in name or "operator" in name] or ["k"]
    if style == "as_broken_json":  # with a lone backslash it may be good JSON of another name
        names = [name.replace("\\", "") or "k" for name in names]
    rows = summary_rows(names)
    text = WRITERS[style](rows)
    assert read_summary(text, "x").rows == rows
    chatter = (
        "Generating SQLite file x.sqlite from x.nsys-rep\nProcessing [x.sqlite] with [{}.py]...\n"
    )
    other = content("golden/h_cuda_gpu_mem_time_sum.csv")
    api = content("golden/h_cuda_api_sum.csv")
    stream = "\n".join(
        f"{chatter.format(report)}{part}\n"
        for report, part in (("a", other), ("cuda_gpu_kern_sum", text), ("cuda_api_sum", api))
    )
    assert read_summary(stream, "x").rows == rows


def starts_quoted(name: str) -> bool:
    return (name.startswith('"') and "," not in name) or '""' in name


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("style", WRITERS)
def test_planted_names(style: str, name: str) -> None:
    if style in ("as_csv", "as_tsv") and starts_quoted(name):
        name = "k" + name
    if style == "as_broken_json":
        name = name.replace("\\", "")
    rows = summary_rows(["first", name.strip(), "last"])
    assert read_summary(WRITERS[style](rows), "x").rows == rows


@pytest.mark.parametrize("name", ["one\ntwo", "f<a,\nb>(int)", "a\nb\nc, d", "x,\n1,2\ny"])
def test_newlines_in_names_are_raw(name: str) -> None:
    for names in (["k", name, "z"], [name], ["k", name]):
        rows = summary_rows(names)
        assert read_summary(as_csv(rows), "x").rows == rows


def test_ranges_before_names_come_off_only_where_it_is_certain() -> None:
    spelled = {
        "aten::mm, op_id = 7/k<a>(int)": "k<a>(int)",
        "aten::mm, seq = 3, op_id = 7, sizes = [[2, 3]]/k<a>(int)": "k<a>(int)",
        "model/layers/0/void f<a, (int)1>(T1 *)": "void f<a, (int)1>(T1 *)",
        "step/at::operator/(int, int)": "at::operator/(int, int)",
        "f<path/of, a>(x)": "f<path/of, a>(x)",
        "at::operator/(int, int)": "at::operator/(int, int)",
        "outer/f<a, (int…": "outer/f<a, (int…",
    }
    for name, bare in spelled.items():
        assert read_summary(as_csv(summary_rows([name])), "x").rows[0].name == bare


BAD = {
    "empty": "",
    "prose": "to be or not to be\n" * 50,
    "nul": as_csv(summary_rows(["a\0b"])),
    "no kernels": f"{HEAD},Name\n\n",
    "skipped": "Processing [x]...\nSKIPPED: x.sqlite does not contain CUDA kernel data.\n",
    "cut in a line": as_csv(summary_rows(["a", "b,c", "d"]))[:-30],
    "cut in a name": as_csv(summary_rows(["a", "b" * 30, "c," + "d" * 40]))[:-10],
    "cut between lines": "\n".join(as_csv(summary_rows(["a", "b", "c"])).split("\n")[:3]),
    "cut in json": as_json(summary_rows(["a", "b"]))[:-40],
    "json without end": as_json(summary_rows(["a", "b"]))[:-2],
    "cut in html": as_html(summary_rows(["a", "b"]))[:-60],
    "cut in a pipe table": as_table(summary_rows(["a", "b"]))[:-200],
    "pipe table without end": as_table(summary_rows(["a", "b"])).rsplit("\n", 2)[0],
    "negative": as_csv(summary_rows(["a"])).replace(",1000,", ",-1000,"),
    "not a number": as_csv(summary_rows(["a"])).replace(",1000,", ",nan,"),
    "endless": as_csv(summary_rows(["a"])).replace(",1000,", ",inf,"),
    "huge": as_csv(summary_rows(["a"])).replace(",1000,", ",1" + "0" * 400 + ","),
    "huge exponent": as_csv(summary_rows(["a"])).replace(",1000,", ",1e99,"),
    "huge in json": as_json(summary_rows(["a"])).replace("1000.0", "1" + "0" * 5000),
    "deep json": "[" * 200_000,
    "deep member": '[{"Time (%)": ' + "[" * 200_000,
    "European": as_csv(summary_rows(["a"])).replace(",1000,", ",1.000.000,"),
    "no instances": as_csv(summary_rows(["a"])).replace(",1,", ",0,"),
    "half an instance": as_csv(summary_rows(["a"])).replace(",1,", ",0.5,"),
    "no name": as_csv(summary_rows(["a"])).replace(",a", ","),
    "a long name": as_csv(summary_rows(["a" * 200_000])),
    "many columns": "Time (%)" + ",a" * 100_000,
    "many lines": "\n" * 3_000_000,
    "no header": "\n".join(as_columns(summary_rows(["a"])).split("\n")[5:]),
    "no header in us": "Processing [x] with [cuda_gpu_kern_sum.py]...\n"
    "100.0 1.000 1 1.000 1.000 0.900 1.100 0.0 k\n",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_a_fix(case: str) -> None:
    with pytest.raises(bench.UsageError) as caught:
        read_summary(BAD[case], "x.csv")
    assert "x.csv" in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300
    assert "nsys stats" in caught.value.hint


def test_a_bad_line_is_named() -> None:
    text = as_csv(summary_rows(["a", "b", "c"])).replace("2000", "two")
    with pytest.raises(bench.UsageError, match=r"x, line 3: ") as caught:
        read_summary(text, "x")
    assert "cuda_gpu_kern_sum" in caught.value.hint


@pytest.mark.parametrize(
    "name",
    [
        *("cuda_gpu_kern_sum.csv", "h200/kern.json", "h200/kern_default.txt"),
        *("h200/kern_table.txt", "golden/h_cuda_gpu_kern_sum.hdoc.txt", "h200/nvtx_kern_sum.csv"),
        *("golden/h_cuda_gpu_kern_sum.tsv.txt", "golden/n_cuda_gpu_trace.csv"),
        *("golden/n_cuda_kern_exec_trace.csv", "golden/h_kern_sum_column_nohdr_nolimit.txt"),
        *("golden/h_cuda_gpu_sum.csv", "golden/h_cuda_kern_exec_sum.csv"),
    ],
)
@settings(max_examples=60, deadline=None)
@given(at=st.floats(0, 1), gone=st.integers(0, 400), junk=st.text(max_size=12))
def test_damage_ends_in_a_recording_or_a_usage_error(
    name: str, at: float, gone: int, junk: str
) -> None:
    text = content(name)
    place = int(at * len(text))
    try:
        recording = read_summary(text[:place] + junk + text[place + gone :], "x")
    except bench.UsageError:
        return
    launches = recording.launches
    assert all(row.instances > 0 and row.total_ns >= 0 for row in recording.rows)
    assert recording.rows or (launches is not None and len(launches) > 0)


REPORTS = (
    *("golden/h_cuda_gpu_kern_gb_sum.csv", "golden/h_cuda_gpu_sum.csv"),
    *("golden/h_cuda_kern_exec_sum.csv", "golden/h_nvtx_kern_sum.csv"),
    *("golden/n_cuda_gpu_trace.csv", "golden/n_cuda_kern_exec_trace.csv"),
)


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("style", ["column", "pipe", "tsv", "json"])
def test_every_report_reads_alike_in_every_format(name: str, style: str) -> None:
    """The other formats are printed here; blanks in grids and empty cells are in these reports."""
    [table] = tables(content(name))
    lines = [table.columns, *(cells for _, cells in table.rows)]
    wide = [max(len(line[at]) for line in lines) for at in range(len(table.columns))]
    if style == "json":
        text = json.dumps([dict(zip(table.columns, line, strict=True)) for line in lines[1:]])
    elif style == "tsv":
        text = "\n".join("\t".join(line) for line in lines)
    else:
        left, between, right, rule = {
            "column": (" ", "  ", "", "-"),
            "pipe": ("| ", " | ", " |", "-"),
        }[style]
        printed = [
            left + between.join(c.rjust(w) for c, w in zip(line, wide, strict=True)) + right
            for line in lines
        ]
        ruler = left + between.join(rule * width for width in wide) + right
        text = "\n".join([printed[0], ruler, *printed[1:]])
    read, wanted = read_summary(text, "x"), read_summary(content(name), "x")
    assert (read.rows, read.warnings, read.gpu) == (wanted.rows, wanted.warnings, wanted.gpu)
    assert (read.launches is None) == (wanted.launches is None)
    if read.launches is not None and wanted.launches is not None:
        assert read.launches.texts == wanted.launches.texts
        for column in ("name", "start", "end", "device", "stream"):
            assert (getattr(read.launches, column) == getattr(wanted.launches, column)).all()


def test_launch_times_come_before_sums_of_the_same_run() -> None:
    trace, sums = content("golden/n_cuda_gpu_trace.csv"), content("golden/n_cuda_gpu_kern_sum.csv")
    for text in (f"{trace}\n{sums}", f"{sums}\n\n{trace}"):
        recording = read_summary(text, "x.csv")
        assert recording.source == "nsys GPU trace x.csv"
        assert recording.launches is not None
        assert len(recording.launches) == 77
