"""Clocks that cannot be true, on made-up blocks."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from patcher.bench.judge.clockcheck import (
    TimedBlock,
    below_floor,
    hidden_paid,
    left_out,
    overran,
    shared_us,
    suspicious,
    traced,
)
from patcher.bench.judge.process import Spent
from patcher.bench.judge.timed_arm import EmptyCommands
from patcher.bench.sandbox import process_tree as tree
from patcher.bench.sandbox.process_tree import CpuTime, cpus_allowed, pin, stop

PAIRS = 12


def blocks(
    call_us: float, calls: int = 24, hidden_us: float = 0.0, seed: int = 0
) -> list[TimedBlock]:
    """Honest blocks: calls with 5 % noise, and what the protocol takes beside them."""
    draw = random.Random(seed)
    made = []
    for _ in range(PAIRS):
        times = [call_us * draw.uniform(0.97, 1.05) for _ in range(calls)]
        wall = sum(times) + 300.0 * draw.uniform(0.9, 1.1) + hidden_us
        made.append(TimedBlock(times, calls, wall))
    return made


def alone(call_us: float, seed: int = 1) -> list[TimedBlock]:
    return blocks(call_us, calls=1, seed=seed)


THEIRS, THEIRS_ALONE = blocks(20.0), alone(24.0)


@pytest.mark.parametrize("speedup", [0.5, 1.0, 2.0, 10.0])
def test_honest_clocks_are_believed(speedup: float) -> None:
    ours = blocks(20.0 / speedup, seed=2)
    assert suspicious(ours, THEIRS, alone(24.0 / speedup), THEIRS_ALONE) is None
    assert left_out(ours, THEIRS) is None


def test_time_that_is_left_out_shows_in_the_judges_clock() -> None:
    """Half of the time is left out: the wall clock has it, block after block."""
    ours = blocks(10.0, hidden_us=10.0 * 24, seed=3)
    problem = left_out(ours, THEIRS)
    assert problem is not None
    assert "judge's clock" in problem


def test_a_clock_that_is_true_in_every_third_block_gains_nothing() -> None:
    honest = blocks(10.0, seed=3)
    forged = [
        TimedBlock([t / 5 for t in b.times_us], b.calls, b.wall_us) if i % 3 else b
        for i, b in enumerate(honest)
    ]
    assert left_out(forged, THEIRS) is None
    paid = hidden_paid(forged, THEIRS)
    assert statistics.fmean(block.figure for block in paid) == pytest.approx(10, rel=0.1)
    assert hidden_paid(honest, THEIRS) == honest


@pytest.mark.parametrize("host_us", [26.0, 45.0, 70.0])
@pytest.mark.parametrize(("call_us", "calls"), [(2.4, 9), (13.0, 3), (50.0, 2)])
def test_a_process_that_the_host_serves_later_pays_nothing(
    call_us: float, calls: int, host_us: float
) -> None:
    """As on an H100's host, in all blocks of some shapes: up to three times such calls."""
    theirs = blocks(2 * call_us, calls, seed=7)
    ours = blocks(call_us, calls, hidden_us=host_us, seed=8)
    assert left_out(ours, theirs) is None
    assert hidden_paid(ours, theirs) == ours


def test_what_all_blocks_leave_out_beyond_the_host_is_paid() -> None:
    theirs, ours = blocks(20.0, 3, seed=7), blocks(10.0, 3, hidden_us=400.0, seed=8)
    paid = hidden_paid(ours, theirs)
    assert statistics.fmean(block.figure for block in paid) == pytest.approx(10 + 100, rel=0.15)


def test_a_busy_machine_is_not_a_forged_clock() -> None:
    ours = blocks(10.0, seed=4)
    late = [
        TimedBlock(b.times_us, b.calls, b.wall_us + (2000.0 if i % 3 == 0 else 0.0))
        for i, b in enumerate(ours)
    ]
    assert suspicious(late, THEIRS, alone(12.0), THEIRS_ALONE) is None
    assert left_out(late, THEIRS) is None


def test_one_call_that_does_the_work_of_all_shows_in_the_mean() -> None:
    ours = [TimedBlock([20.0 * 24, *[0.5] * 23], 24, 20.0 * 24 + 311.0) for _ in range(PAIRS)]
    problem = suspicious(ours, THEIRS, alone(24.0), THEIRS_ALONE)
    assert problem is not None
    assert "longer than the median" in problem


def test_work_that_is_shared_between_calls_shows_in_a_call_alone() -> None:
    problem = suspicious(blocks(1.0, seed=5), THEIRS, alone(60.0), THEIRS_ALONE)
    assert problem is not None
    assert "by itself" in problem


def test_nothing_is_faster_than_the_machine() -> None:
    problem = below_floor(blocks(0.05, seed=6), 0.5)
    assert problem is not None
    assert "below what this machine can do" in problem


@pytest.mark.parametrize("speedup", [0.5, 1.0, 2.0, 10.0])
def test_a_call_by_itself_that_costs_as_the_baselines_does_is_not_paid_twice(
    speedup: float,
) -> None:
    ours = blocks(20 / speedup, seed=2)
    in_proportion, as_much = alone(24 / speedup), alone(20 / speedup + 4)
    for each in (in_proportion, as_much):
        assert shared_us(ours, THEIRS, each, THEIRS_ALONE) < 0.03 * 20 / speedup


def test_a_call_that_does_the_work_of_others_costs_what_it_does_by_itself() -> None:
    more = shared_us(blocks(1.0, seed=5), THEIRS, alone(60.0), THEIRS_ALONE)
    assert 50 < 1.0 + more < 60


def test_a_block_costs_the_cpu_time_of_all_threads_less_an_empty_command() -> None:
    empty = EmptyCommands()
    for cpu_us in (38.0, 40.0, 90.0):
        empty.add(Spent(cpu_us, cpu_us + 60, 0))
    assert empty.net_us(Spent(1040, 1100, 0), 1) == 1000
    assert empty.net_us(Spent(1040, 9100, 8000), 1) == 1000, "other programs ran"
    assert empty.net_us(Spent(3040, 1100, 0), 1) == 3000, "other CPUs worked, too"
    assert empty.net_us(Spent(40, 5150, 0), 1) == 5000, "it slept"


def test_on_several_cpus_the_judges_clock_counts() -> None:
    empty = EmptyCommands()
    empty.add(Spent(40, 100, 0))
    assert empty.net_us(Spent(2040, 1100, 0), 2) == 1000
    assert empty.net_us(Spent(1040, 1100, 500), 2) == 1000, "a wait may be for its own threads"
    assert empty.net_us(Spent(6040, 1100, 0), 2) == 3000, "a third CPU worked"


def test_work_on_any_stream_is_inside_of_the_events() -> None:
    spans = [("mine", 1_000, 51_000), ("mine", 60_000, 101_000)]
    assert overran(spans, 100_000.0) is None
    beside = [*spans, ("on another stream", 40_000, 400_000)]
    problem = overran(beside, 100_000.0)
    assert problem is not None
    assert "CUPTI" in problem


def test_whose_kernels_ran_is_said_by_time() -> None:
    ampere = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)"
    seen = traced([("mine", 0, 30), (ampere, 30, 100)], 2, "rows=8")
    assert seen.said.startswith("by CUPTI at rows=8: 2 kernels and copies in 2 calls: ")
    assert "its own 30 %" in seen.said
    assert list(seen.libraries.values()) == [70.0]


def test_the_cpu_time_of_another_process_is_counted_with_its_threads() -> None:
    code = """
        import os, threading, hashlib
        data = bytes(1 << 26)
        input()
        for one in [threading.Thread(target=hashlib.sha256, args=(data,)) for _ in range(2)]:
            one.start()
        hashlib.sha256(data)
        pid = os.fork()
        if pid == 0:
            hashlib.sha256(data)
            input()
        print("done", flush=True)
        input()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        before = CpuTime.of(stop(process.pid), process.pid)
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        stopped = stop(process.pid)
        assert len(stopped) == 2
        used, waited = CpuTime.of(stopped, process.pid).since(before)
        begin = time.process_time()
        hashlib.sha256(bytes(1 << 26))
        each = time.process_time() - begin
        assert used > 2 * each
        assert waited == 0, "a process was begun, and so no wait is told"
        tree.kill(process.pid)


def test_a_child_that_has_ended_is_counted() -> None:
    code = """
        import hashlib, os
        input()
        if os.fork() == 0:
            for _ in range(4):
                hashlib.sha256(bytes(1 << 26))
            os._exit(0)
        input()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        before = CpuTime.of(stop(process.pid), process.pid)
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        while len(children := tree.descendants(process.pid) - {process.pid}) == 0:
            time.sleep(0.01)
        [child] = children
        while "Z" not in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2]:
            time.sleep(0.01)
        used, _ = CpuTime.of(stop(process.pid), process.pid).since(before)
        assert used > 0.02
        tree.kill(process.pid)


def test_a_wait_for_the_cpu_is_told_where_nothing_was_begun() -> None:
    """Two processes on one CPU: each waits while the other runs."""
    cpu = sorted(os.sched_getaffinity(0))[:1]
    code = "import time\nprint(1, flush=True)\nwhile True: time.process_time()"
    words = [sys.executable, "-c", code]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE) as one,
        subprocess.Popen(words, stdout=subprocess.PIPE) as other,
    ):
        try:
            for each in (one, other):
                pin([each.pid], cpu)
                assert each.stdout
                each.stdout.readline()
            begun = time.monotonic()
            before = CpuTime.of(stop(one.pid), one.pid)
            os.kill(one.pid, signal.SIGCONT)
            time.sleep(0.2)
            after = CpuTime.of(stop(one.pid), one.pid)
            quiet = replace(after, last_id=before.last_id)  # as if this machine were idle
            used, waited = quiet.since(before)
            assert waited > 0.02
            assert used < time.monotonic() - begun
            assert replace(after, last_id="another").since(before) == (used, 0.0)
        finally:
            one.kill()
            other.kill()


def test_a_thread_that_worked_and_had_to_wait_is_told_from_one_that_was_only_woken() -> None:
    """Two busy processes on one CPU, one of which has an idle thread beside."""
    cpu = sorted(os.sched_getaffinity(0))[:1]
    code = """
        import threading, time
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print(1, flush=True)
        while True:
            time.process_time()
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE) as one,
        subprocess.Popen(words, stdout=subprocess.PIPE) as other,
    ):
        try:
            for each in (one, other):
                assert each.stdout
                each.stdout.readline()
                pin([each.pid], cpu)
            before = tree.thread_times(stop(one.pid))
            os.kill(one.pid, signal.SIGCONT)
            time.sleep(0.2)
            now = tree.thread_times(stop(one.pid))
        finally:
            one.kill()
            other.kill()
    assert len(now) == 2
    assert tree.held_up_s(before, now) > 0.02
    [idle] = now.keys() - {one.pid}
    now[idle] = replace(now[idle], waited_s=now[idle].waited_s + 9.0)
    assert tree.held_up_s(before, now) < 9.0, "it did not work"
    assert tree.held_up_s({}, {}) == 0.0


def test_a_thread_that_left_its_cpus_is_seen() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pin([process.pid], cpus[:1])
        assert cpus_allowed([process.pid]) == set(cpus[:1])
        if len(cpus) > 1:
            os.sched_setaffinity(process.pid, cpus)
            assert cpus_allowed([process.pid]) == set(cpus)
        process.kill()
    assert cpus_allowed([process.pid]) == set()
