"""Traces that are broken where nothing is read: the rest is read and the loss is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from traces_sample import EPOCH, STEP, Event, kernel, mark, steps, write_trace

from patcher import bench
from patcher.hotspot import Profile, read

NAMES = [f"ProfilerStep#{number}" for number in range(8)]
H100: Event = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132, "computeMajor": 9}
PYTHON: Event = {"ph": "X", "cat": "python_function", "name": "NAME", "pid": 1, "tid": 1}
PYTHON |= {"ts": EPOCH, "dur": 1, "args": {"Python id": 7}}


def whole(profile: Profile) -> None:
    """Check the eight steps of five kernels."""
    assert profile.total_kernel_ns == 418_000
    assert sum(kernel.instances for kernel in profile.kernels) == 40
    assert profile.steps == 8
    assert profile.wall_ns is not None
    assert profile.wall_ns / 8 == pytest.approx(54_700, abs=60)


def said(profile: Profile, kind: str) -> str:
    [warning] = [warning for warning in profile.warnings if warning.kind == kind]
    return warning.message


def test_the_trace_without_an_odd_event(tmp_path: Path) -> None:
    profile = read(write_trace(tmp_path / "t.json", steps(NAMES)))
    whole(profile)
    assert profile.warnings == ()


ODD = {
    "backslash": (r'"torch\cuda\__init__.py(219): _lazy_init"', "repaired"),
    "users": (r'"C:\users\me\x.py(1): f"', "repaired"),
    "raw newline": ('"lib = Library(DEF)\n(1): <module>"', None),
    "tab": ('"a\tb"', None),
    "quote": ('"<built-in method "x" of y>"', "repaired"),
    "quote and comma": ('"f("a", b)"', "repaired"),
    "last backslash": (r'"C:\dir\"', "repaired"),
}


@pytest.mark.parametrize("case", ODD)
def test_a_name_that_is_never_used_may_be_broken(case: str, tmp_path: Path) -> None:
    written, kind = ODD[case]
    path = write_trace(tmp_path / "t.json", [PYTHON, *steps(NAMES)])
    path.write_text(path.read_text().replace('"NAME"', written))
    profile = read(path)
    whole(profile)
    assert [w.kind for w in profile.warnings][:1] == ([kind] if kind else [])


@pytest.mark.parametrize("odd", [b"C:\\\xb2\xe2\xca\xd4", b"caf\xe9", b"a\0b"])
def test_bytes_in_an_unused_name_may_be_no_text(odd: bytes, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", [PYTHON, *steps(NAMES)])
    path.write_bytes(path.read_bytes().replace(b"NAME", odd))
    profile = read(path)
    whole(profile)
    assert "replaced" in profile.warnings[0].message


def test_a_comma_after_the_last_event_is_repaired(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", steps(NAMES))
    text = path.read_text()
    at = text.rindex("]")
    path.write_text(f"{text[:at]},{text[at:]}")
    profile = read(path)
    whole(profile)
    assert [warning.kind for warning in profile.warnings] == ["repaired"]


def test_a_kernel_without_a_name_has_a_row(tmp_path: Path) -> None:
    events = steps(NAMES)
    for event in events:
        if event["name"] == STEP[1][0]:
            event["name"] = ""
    profile = read(write_trace(tmp_path / "t.json", events))
    whole(profile)
    assert "(kernel without a name)" in {spot.name for spot in profile.hotspots}


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-nan(ind)", "NaN", "1.#INF"])
def test_a_value_that_is_never_used_may_be_no_number(value: str, tmp_path: Path) -> None:
    odd = PYTHON | {"args": {"memory bandwidth (GB/s)": "VALUE"}}
    path = write_trace(tmp_path / "t.json", [*steps(NAMES), odd], traceName="HERE")
    text = path.read_text().replace('"VALUE"', value)
    path.write_text(text.replace("HERE", r".\log\worker0.pt.trace.json"))
    whole(read(path))


def test_an_event_that_cannot_be_repaired_is_left_out_and_counted(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", [PYTHON, *steps(NAMES)])
    path.write_text(path.read_text().replace('"Python id": 7', '"Python id": }{'))
    profile = read(path)
    whole(profile)
    assert "1 of 89 events are left out" in said(profile, "broken_events").replace(" is ", " are ")


def test_a_broken_kernel_is_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", steps(NAMES))
    path.write_text(path.read_text().replace('"dur": 2.5', '"dur": 2.5.1'))
    with pytest.raises(bench.UsageError, match="a kernel or copy that is broken JSON"):
        read(path)


def test_a_number_of_thousands_of_digits_is_said_in_our_words(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", steps(NAMES))
    path.write_text(path.read_text().replace("30.0", "9" * 9999))
    with pytest.raises(bench.UsageError, match="a number has thousands of digits"):
        read(path)


def test_text_of_two_bytes_a_character_is_read(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", steps(NAMES))
    path.write_text(path.read_text(), encoding="utf-16")
    whole(read(path))


def test_a_broken_trace_without_an_event_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{\n"a\n"traceEvents": {}]\n}')
    with pytest.raises(bench.UsageError, match="no events"):
        read(tmp_path / "t.json")


def test_a_cut_trace_is_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", steps(NAMES))
    text = path.read_text()
    for end in (len(text) // 2, text.rindex("}", 0, -4) + 1, len(text) - 3):
        path.write_text(text[:end])
        with pytest.raises(bench.UsageError, match="may be cut off"):
            read(path)


def test_a_step_that_did_not_end_is_left_out(tmp_path: Path) -> None:
    late = mark("ProfilerStep#8", EPOCH + 4000, -1, 1, 1)
    profile = read(write_trace(tmp_path / "t.json", [*steps(NAMES), late]))
    whole(profile)
    assert "1 of 9 steps is left out" in said(profile, "unfinished_steps")


UNTIMED: dict[str, Event] = {
    "ts 0": {"ts": 0, "dur": 0},
    "ts 0 with a duration": {"ts": 0, "dur": 5},
    "before 0": {"ts": -5, "dur": 3},
    "unfinished": {"ts": EPOCH + 30, "dur": -1},
    "no duration": {"ts": EPOCH + 30, "dur": None},
    "underflow": {"ts": EPOCH + 30, "dur": 18446744073709551},
    "a month": {"ts": EPOCH + 30, "dur": 2_600_000_000_000},
    "text": {"ts": "soon", "dur": 1},
}


@pytest.mark.parametrize("case", UNTIMED)
def test_a_kernel_without_a_time_is_left_out(case: str, tmp_path: Path) -> None:
    odd = kernel("volta_sgemm_64x64_nt", 0, 0, 9999) | UNTIMED[case]
    profile = read(write_trace(tmp_path / "t.json", [odd, *steps(NAMES)]))
    whole(profile)
    assert "1 of 41 kernels is left out" in said(profile, "untimed")


def test_a_kernel_around_later_ones_of_its_stream_is_left_out(tmp_path: Path) -> None:
    odd = kernel("volta_sgemm_64x64_nt", EPOCH + 25, 300, 9999)
    profile = read(write_trace(tmp_path / "t.json", [*steps(NAMES), odd]))
    assert profile.total_kernel_ns == 418_000
    assert "1 of 41 kernels is left out" in said(profile, "overlapping")


def test_branches_of_a_graph_share_a_stream_and_stay(tmp_path: Path) -> None:
    graph = [kernel("long", EPOCH + 5000, 90, 500)]
    graph += [kernel(f"branch{i}", EPOCH + 5010 + 10 * i, 5, 500) for i in range(3)]
    profile = read(write_trace(tmp_path / "t.json", [*steps([""] * 8), *graph]), window="all")
    assert "overlapping" not in {warning.kind for warning in profile.warnings}
    assert profile.total_kernel_ns == 418_000 + 105_000


def test_kernels_that_took_no_time_have_no_speed(tmp_path: Path) -> None:
    """As a simulator writes them; the norm has an op of the library, and so a least time."""
    events = steps(NAMES[:2], scale=0.0)
    profile = read(write_trace(tmp_path / "t.json", events, deviceProperties=[H100]), "gpt-oss-20b")
    assert profile.total_kernel_ns == 0
    assert {spot.sol_pct for spot in profile.hotspots} == {None}
    alone = write_trace(tmp_path / "u.json", [kernel("k", EPOCH, 0.0)])
    assert {spot.wall_pct for spot in read(alone).hotspots} == {None}


def test_a_chain_takes_no_more_than_its_kernels(tmp_path: Path) -> None:
    """Whatever number of steps is told: the recording has two."""
    small = [
        kernel(f"void vllm::{name}_kernel()", EPOCH + 20 + 100 * step + 20 * at + 5 * part, 3.0)
        for step in range(2)
        for at in range(4)
        for part, name in enumerate(("rms_norm", "rotary_embedding", "gemm"))
    ]
    marks = [mark(name, EPOCH + 100 * at, 100.0) for at, name in enumerate(NAMES[:2])]
    path = write_trace(tmp_path / "t.json", [*small, *marks])
    for told in (None, 2, 40):
        profile = read(path, steps=told)
        [chain] = [spot for spot in profile.hotspots if spot.kind == "chain"]
        # the first of each step does not follow a matmul
        assert (chain.instances, chain.total_ns, chain.share_pct) == (6, 36_000, 50.0)
        assert chain.per_step == 6 / (told or 2)
        assert chain.wall_pct is not None
        assert chain.wall_pct < 100


def test_events_in_any_order_read_alike(tmp_path: Path) -> None:
    events = steps(NAMES)
    whole(read(write_trace(tmp_path / "t.json", [*events[1::2], *events[::2]][::-1])))


def test_jax_and_other_makes_are_named(tmp_path: Path) -> None:
    name: Event = {"ph": "M", "pid": 1, "name": "process_name"}
    work = [{"ph": "X", "pid": 1, "tid": 13, "ts": t, "dur": 5.5, "name": "dot"} for t in (1, 9)]
    jax = [name | {"args": {"name": "/device:GPU:0"}}, *work]
    with pytest.raises(
        bench.UsageError, match=r"a trace of JAX, not of torch.profiler: its 2 kern"
    ):
        read(write_trace(tmp_path / "t.json", jax))
    ascend = [name | {"args": {"name": "Ascend Hardware"}}, *work]
    with pytest.raises(bench.UsageError, match=r"torch_npu \(Ascend\)"):
        read(write_trace(tmp_path / "t.json", ascend))
    mtia = PYTHON | {"cat": "mtia_runtime"}
    with pytest.raises(bench.UsageError, match="Meta's MTIA"):
        read(write_trace(tmp_path / "t.json", [mtia]))


def test_the_sample_is_what_its_docstring_says() -> None:
    assert sum(microseconds for _, microseconds in STEP) == 52.25
