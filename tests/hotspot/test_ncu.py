"""Pages of Nsight Compute read, whatever their form, units and locale."""

from __future__ import annotations

import csv
import gzip
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import patcher.bench.machine.installed
from patcher import bench
from patcher.bench.machine.installed import find_ncu
from patcher.hotspot import ncu_finding
from patcher.hotspot.names import match_key
from patcher.hotspot.profile import Counters
from patcher.hotspot.readers.ncu import attach, read_ncu

DATA = Path(__file__).parents[1] / "data/ncu"
NVJET = "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT"
IDENTITY = '"ID","Process ID","Process Name","Host Name","Kernel Name","Device","CC",'


def write(folder: Path, text: str, name: str = "counters.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def wide(folder: Path, *metrics: tuple[str, str, str], name: str = "k") -> Path:
    """A raw page of one launch: (metric, unit, value)."""
    line = [f'"0","1","p","h","{name}","0","9.0"', *(f'"{value}"' for _, _, value in metrics)]
    header = IDENTITY + ",".join(f'"{metric}"' for metric, _, _ in metrics)
    units = ",".join(['""'] * 7 + [f'"{unit}"' for _, unit, _ in metrics])
    return write(folder, "\n".join((header, units, ",".join(line))) + "\n")


def long(folder: Path, *metrics: tuple[str, str, str]) -> Path:
    """A page of rows: (metric, unit, value)."""
    head = IDENTITY + '"Section Name","Metric Name","Metric Unit","Metric Value"'
    lines = [f'"0","1","p","h","k","0","9.0","s","{m}","{u}","{v}"' for m, u, v in metrics]
    return write(folder, "\n".join((head, *lines)) + "\n")


def test_the_raw_page_is_the_same_in_its_own_and_in_base_units() -> None:
    own, base = read_ncu(DATA / "raw.csv.gz"), read_ncu(DATA / "raw-base.csv.gz")
    assert list(own) == list(base)
    assert [counters.launches for counters in own.values()] == [2, 3, 2, 2]
    for name, counters in own.items():
        for field, value in counters.model_dump().items():
            assert value == pytest.approx(getattr(base[name], field), rel=2e-3), (name, field)


def test_the_gemm_moved_and_computed_what_its_shape_says() -> None:
    gemm = read_ncu(DATA / "raw-base.csv.gz")[NVJET]
    assert gemm.flops == 2 * 4096 * 2880 * 5120
    assert gemm.duration_ns == (161_664 + 161_568) / 2
    assert gemm.dram_bytes == pytest.approx(177.6e6, rel=1e-3)
    assert gemm.dram_throughput_pct == pytest.approx(22.83, abs=0.01)
    assert gemm.sm_throughput_pct == pytest.approx(87.34, abs=0.01)


def test_the_details_page_agrees_but_knows_no_operations() -> None:
    """Its labels: "Memory Throughput" is there in percent and in bytes per second."""
    raw, details = read_ncu(DATA / "raw-base.csv.gz"), read_ncu(DATA / "details.csv.gz")
    for name, counters in details.items():
        assert counters.flops is None
        assert counters.duration_ns == pytest.approx(raw[name].duration_ns, rel=0.02)
        assert counters.dram_bytes == pytest.approx(raw[name].dram_bytes, rel=0.03)
        assert counters.sm_throughput_pct == pytest.approx(raw[name].sm_throughput_pct, rel=0.05)


def test_base_units_with_separators_and_rows_of_rules() -> None:
    [counters] = read_ncu(DATA / "copy_blocked_details.csv.gz").values()
    assert counters.duration_ns == 21_058_944
    assert counters.dram_bytes == pytest.approx(196_456_177_859.63 * 0.021058944)
    assert counters.dram_throughput_pct == 61.84


def test_a_summary_per_kernel_gives_averages(tmp_path: Path) -> None:
    header = (
        '"Process ID","Process Name","Host Name","Kernel Name","Block Size","Grid Size","Device",'
        '"CC","Invocations","Section Name","Metric Name","Metric Unit","Minimum","Maximum",'
        '"Average"'
    )
    lines = [
        f'"1","p","h","k","(1, 1, 1)","({grid}, 1, 1)","0","9.0","{count}","s","{metric}","{unit}"'
        f',"0","99","{value}"'
        for grid, count, metric, unit, value in (
            (1, 3, "gpu__time_duration.sum", "us", "2.00"),
            (1, 3, "dram__bytes_read.sum", "Kbyte", "1.50"),
            (1, 3, "dram__bytes_write.sum", "byte", "500"),
            (2, 1, "Duration", "us", "6.00"),
        )
    ]
    path = write(tmp_path, "\n".join(("==PROF== Connected", "hello", header, *lines)) + "\n")
    [counters] = read_ncu(path).values()
    assert counters == Counters(launches=4, duration_ns=3000, dram_bytes=2000)


def test_chatter_before_and_a_gzip_around(tmp_path: Path) -> None:
    text = (
        "==PROF== Profiling 12: 0%....100%\nstep, loss\n"
        + gzip.decompress((DATA / "raw.csv.gz").read_bytes()).decode()
    )
    path = tmp_path / "counters.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert read_ncu(path) == read_ncu(DATA / "raw.csv.gz")


def test_output_of_the_program_around_rows_is_passed_over(tmp_path: Path) -> None:
    text = long(tmp_path, ("gpu__time_duration.sum", "ns", "5"), ("x", "", "6")).read_text()
    noise = '==PROF== done\nloss 0.5\n{"step": 1, "loss": 0.5, "a": 1, "b": 2, "c": 3}\n'
    assert read_ncu(write(tmp_path, text.replace("\n", "\n" + noise)))["k"].duration_ns == 5
    with pytest.raises(bench.UsageError, match="is cut off"):
        read_ncu(write(tmp_path, text + '"1","1","p"'))


@pytest.mark.parametrize("late", ["Kernel Name", "Metric Name", "Metric Unit", "CC"])
def test_a_short_row_of_columns_in_another_order_is_cut_off(tmp_path: Path, late: str) -> None:
    first = ["ID", "Process ID", "Kernel Name", "CC", "Metric Name", "Metric Unit", "Metric Value"]
    header = [*(column for column in first if column != late), late]
    path = write(tmp_path, ",".join(header) + "\n" + "0,1,k,9.0,m,5\n")
    with pytest.raises(bench.UsageError, match="is cut off"):
        read_ncu(path)


@pytest.mark.parametrize(
    ("unit", "value", "expected"),
    [
        *(("ns", "1,500", 1500), ("nsecond", "1500", 1500), ("us", "1.50", 1500)),
        *(("usecond", "1.500000", 1500), ("msecond", "1.50", 1.5e6), ("s", "1.50", 1.5e9)),
        ("second", "2", 2e9),
    ],
)
def test_units_of_time(tmp_path: Path, unit: str, value: str, expected: float) -> None:
    [counters] = read_ncu(wide(tmp_path, ("gpu__time_duration.sum", unit, value))).values()
    assert counters.duration_ns == pytest.approx(expected)


@pytest.mark.parametrize(
    ("unit", "expected"), [("byte", 2), ("Kbyte", 2e3), ("Mbyte", 2e6), ("Gbyte", 2e9)]
)
def test_units_of_size(tmp_path: Path, unit: str, expected: float) -> None:
    [counters] = read_ncu(wide(tmp_path, ("dram__bytes.sum", unit, "2"))).values()
    assert counters.dram_bytes == expected


def test_a_throughput_and_a_duration_give_bytes(tmp_path: Path) -> None:
    path = long(
        tmp_path,
        ("dram__bytes.sum.per_second", "Tbyte/s", "1.50"),
        ("gpu__time_duration.sum", "us", "2.00"),
    )
    [counters] = read_ncu(path).values()
    assert counters.dram_bytes == pytest.approx(3e6)


@pytest.mark.parametrize("absent", ["n/a", "nan", "", "no data", "-nan"])
def test_what_was_not_measured_is_none(tmp_path: Path, absent: str) -> None:
    time = ("gpu__time_duration.sum", "ns", "512")
    [counters] = read_ncu(wide(tmp_path, time, ("dram__bytes.sum", "byte", absent))).values()
    assert counters == Counters(launches=1, duration_ns=512)


SCALARS = ("fadd", "fmul", "ffma", "dadd", "dmul", "dfma", "hadd", "hmul", "hfma")


def operations(folder: Path, capability: str, *more: tuple[str, str, str]) -> float | None:
    metrics = [
        (f"smsp__sass_thread_inst_executed_op_{op}_pred_on.sum", "inst", "100") for op in SCALARS
    ]
    path = wide(folder, ("gpu__time_duration.sum", "ns", "512"), *metrics, *more)
    path.write_text(path.read_text().replace('"9.0"', f'"{capability}"'))
    [counters] = read_ncu(path).values()
    return counters.flops


def test_operations_are_told_only_where_all_of_them_are_known(tmp_path: Path) -> None:
    tensor = "sm__ops_path_tensor_src_{}.sum"
    half, byte = (tensor.format("fp16"), "", "1,000"), (tensor.format("int8"), "", "0")
    assert (
        operations(tmp_path, "9.0", half, byte) == 100 * (1 + 1 + 2 + 1 + 1 + 2 + 2 + 2 + 4) + 1000
    )
    assert operations(tmp_path, "9.0") is None  # tensor cores not measured
    assert operations(tmp_path, "9.0", half, (*byte[:2], "8")) is None  # no floating point
    assert operations(tmp_path, "9.0", half, (tensor.format("fp8_sparsity_on"), "", "8")) is None
    assert operations(tmp_path, "10.0", half, byte) is None  # an instruction may be two
    assert operations(tmp_path, "", half, byte) is None


def test_numbers_of_a_european_locale_are_refused() -> None:
    with pytest.raises(bench.UsageError, match="another locale") as caught:
        read_ncu(DATA / "eu_locale.csv")
    assert "LC_ALL=C" in caught.value.hint
    assert "--print-units base" in caught.value.hint


@pytest.mark.parametrize(
    ("numbers", "fits"),
    [
        (["117,344"], True),
        (["117.34"], True),
        (["30.752000"], True),
        (["1,117.344"], True),
        (["512"], True),
        # nobody can tell
        (["117.344"], False),
        (["117.344", "512"], False),
        # one number shows how the others are written
        (["117.344", "2.50"], True),
        (["117.344", "1,234,567"], True),
        (["117.344", "2,50"], False),
        (["117.344", "1.234.567"], False),
        (["117", "1.234,5"], False),
        (["117", "0,5"], False),
    ],
)
@pytest.mark.parametrize("page", [wide, long])
def test_separators(
    tmp_path: Path, page: Callable[..., Path], numbers: list[str], fits: bool
) -> None:
    metrics = ["gpu__time_duration.sum", "gpc__cycles_elapsed.max"]
    path = page(tmp_path, *((m, "ns", v) for m, v in zip(metrics, numbers, strict=False)))
    if fits:
        [counters] = read_ncu(path).values()
        assert counters.duration_ns == float(numbers[0].replace(",", ""))
    else:
        with pytest.raises(bench.UsageError, match=r"locale|thousands"):
            read_ncu(path)


def test_counters_find_their_kernels_and_say_which_do_not() -> None:
    counters = read_ncu(DATA / "raw.csv.gz")
    norm = (
        "void at::native::<unnamed>::vectorized_layer_norm_kernel<c10::BFloat16, float, (bool)1>"
        "(int, T2, const T1 *)"
    )
    found = attach(counters, [NVJET, norm, "triton_poi_fused_2"])
    assert set(found.counters) == {NVJET, norm}
    assert found.counters[norm].launches == 3
    [warning] = found.warnings
    assert warning.kind == "ncu_unmatched"
    assert "distribution_elementwise" in warning.message
    assert "1 others" in warning.message


def test_a_bare_function_name_is_used_only_where_it_is_clear() -> None:
    """As `ncu --kernel-name-base function` gives it."""
    counters = {"f": Counters(launches=1, duration_ns=5)}
    assert attach(counters, ["void ns::f<(int)1>(int)"]).warnings == ()
    found = attach(counters, ["void ns::f<(int)1>(int)", "void ns::f<(int)2>(int)"])
    assert found.counters == {}
    assert "more than one kernel" in found.warnings[0].message


def test_launches_of_one_kernel_in_two_spellings_are_merged() -> None:
    one, other = (Counters(launches=n, duration_ns=10 * n) for n in (1, 3))
    found = attach({"void a::f<1>(int)": one, "f<1>(int)": other}, ["f<(int)1>"])
    assert found.counters == {"f<(int)1>": Counters(launches=4, duration_ns=25)}


def test_every_name_of_the_page_keeps_its_own_key() -> None:
    names = list(read_ncu(DATA / "raw.csv.gz"))
    assert len({match_key(name) for name in names}) == len(names)


GOOD = (
    IDENTITY
    + '"gpu__time_duration.sum"\n"","","","","","","","ns"\n"0","1","p","h","k","0","9.0","7"\n'
)
BAD = {
    "empty": "",
    "prose": "to be or not to be\n" * 50,
    "header alone": IDENTITY + '"gpu__time_duration.sum"\n',
    "units alone": "\n".join(GOOD.split("\n")[:2]) + "\n",
    "no units": GOOD.replace('"","","","","","","","ns"\n', ""),
    "cut in a line": GOOD[:-6],
    "cut in a name": GOOD[: GOOD.index('"k"') + 2],
    "no metric": GOOD.replace("gpu__time_duration.sum", "launch__waves"),
    "unknown unit": GOOD.replace('"ns"', '"fortnight"'),
    "no unit": GOOD.replace('"ns"', '""'),
    "negative": GOOD.replace('"7"', '"-7"'),
    "text": GOOD.replace('"7"', '"seven"'),
    "hexadecimal": GOOD.replace('"7"', '"0x7"'),
    "long number": GOOD.replace('"7"', '"' + "7" * 5000 + '"'),
    "no name": GOOD.replace('"k"', '""'),
    "other page": '"Process ID","a","b"\n"1","2","3"\n',
    "a million columns": IDENTITY + ",".join(["x"] * 1_000_000) + "\n",
    "long cell": GOOD.replace('"k"', '"' + "k" * 1_000_000 + '"'),
    "lost quote": GOOD.replace('"7"', '"7'),
    "nul": GOOD.replace('"k"', '"\0"'),
    "no invocations": '"Process ID","Kernel Name","Invocations","Metric Name","Metric Unit",'
    '"Minimum","Maximum","Average"\n"1","k","none","Duration","ns","1","1","1"\n',
}


@pytest.mark.parametrize("case", BAD)
def test_bad_pages_are_one_sentence_and_a_fix(case: str, tmp_path: Path) -> None:
    with pytest.raises(bench.UsageError) as caught:
        read_ncu(write(tmp_path, BAD[case]))
    assert "\n" not in caught.value.message
    assert "counters.csv" in caught.value.message
    assert caught.value.hint


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 11_000), st.binary(min_size=1, max_size=8))
def test_a_damaged_page_never_escapes_as_another_error(at: int, junk: bytes) -> None:
    content = gzip.decompress((DATA / "copy_blocked_details.csv.gz").read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counters.csv"
        path.write_bytes(content[:at] + junk + content[at + len(junk) :])
        try:
            counters = read_ncu(path)
        except (bench.UsageError, bench.MissingError):
            return  # MissingError: what begins like a report, where no ncu is
    assert counters


TOOL = """#!/bin/bash
# A double of ncu: prints a page kept beside it, as `ncu --import` does.
[ "$1" = --version ] && echo "Version {version}" && exit 0
[ "$LC_ALL" = C ] || exit 3
[ "$*" = "--import $2 --page raw --csv --print-units base" ] || exit 4
grep -q broken "$2" && echo "==ERROR== cannot read" >&2 && exit 1
gzip -dc "{page}"
"""


def tool(path: Path, version: str = "2025.3.1.0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TOOL.format(version=version, page=DATA / "raw-base.csv.gz"))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_report_goes_through_the_newest_ncu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for version in ("2024.3.2", "2025.10.0", "2025.9.1"):
        tool(tmp_path / "compute" / version / "ncu", version)
    monkeypatch.delenv("PATCHER_NCU", raising=False)
    monkeypatch.setattr(patcher.bench.machine.installed.shutil, "which", lambda _: None)
    monkeypatch.setattr(
        patcher.bench.machine.installed, "NCU_PLACES", (f"{tmp_path}/compute/*/ncu",)
    )
    assert find_ncu() == tmp_path / "compute/2025.10.0/ncu"
    assert ncu_finding() == ("ok", "2025.10.0", "")
    report = write(tmp_path, "report", "run.ncu-rep")
    assert read_ncu(report) == read_ncu(DATA / "raw-base.csv.gz")
    renamed = tmp_path / "run.bin"
    renamed.write_bytes(b"NVR\0more")
    assert read_ncu(renamed) == read_ncu(report)
    with pytest.raises(bench.UsageError, match="cannot read"):
        read_ncu(write(tmp_path, "broken", "bad.ncu-rep"))
    with pytest.raises(bench.UsageError, match="no such file"):
        read_ncu(tmp_path / "none.ncu-rep")


def test_without_ncu_a_report_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATCHER_NCU", str(tmp_path / "none"))
    status, message, fix = ncu_finding()
    assert (status, bool(message), bool(fix)) == ("warn", True, True)
    with pytest.raises(bench.MissingError) as caught:
        read_ncu(write(tmp_path, "report", "run.ncu-rep"))
    assert "ncu --import run.ncu-rep --page raw --csv --print-units base" in caught.value.hint
    monkeypatch.setenv("PATCHER_NCU", str(tool(tmp_path / "mine/ncu")))
    assert find_ncu() == tmp_path / "mine/ncu"


def test_the_pages_are_as_ncu_wrote_them_but_for_columns_left_out() -> None:
    for name in ("raw.csv.gz", "raw-base.csv.gz"):
        with gzip.open(DATA / name, "rt", newline="") as file:
            header, units, *launches = csv.reader(file)
        assert len(header) == len(units) > 90
        assert len(launches) == 9
