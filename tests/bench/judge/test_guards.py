"""Guards of the judge that stand behind another one, so that no candidate alone shows their
absence: each is tried by itself here. The others are taken out by `patcher selftest --mutations`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from patcher import bench
from patcher.bench import Candidate, Language, Outcome
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.bench.judge.cases import Case, Expected, Secrets, value_problem
from patcher.bench.judge.process import Runner, Spent
from patcher.bench.judge.random_pool import RandomPool
from patcher.bench.judge.regimes import EXACT
from patcher.bench.judge.timed_arm import TimedArm, WrongCall, fresh_sets
from patcher.bench.judge.zygote import ForgedReplyError, Limits, RunnerFailure, Zygote, placed
from patcher.bench.ops.op import Op
from patcher.bench.sandbox import WATCH_S
from patcher.bench.toolchains import build

NORM = bench.load_op("fused_add_rms_norm")
STOCK = RandomPool(NORM, NORM.sweep("cpu"), "cpu", Secrets(1))
"""Empty: nothing of this op is large."""
LINEAR = Op(Path(__file__).parents[2] / "corpus/ops/linear")
RIGHT = """
import torch
def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    input.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight)
"""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote("cpu") as found:
        yield found


@pytest.fixture
def runner(zygote: Zygote) -> Iterator[Runner]:
    with Runner(zygote, Limits(reply_s=60.0), trusted=True) as found:
        found.start(1)
        yield found


def loaded(runner: Runner, source: str) -> None:
    candidate = Candidate(op=NORM.name, language=Language.TORCH, source=source)
    built = build(candidate, NORM.contract)
    path = str(placed(built, runner.folder))
    runner.command("candidate", path=path, binding=built.binding, entry=NORM.name)


def called(runner: Runner) -> None:
    prepared(TimedArm(NORM, "cpu", runner, STOCK, checked=True))


def prepared(arm: TimedArm) -> None:
    point = NORM.sweep("cpu").points()[0]
    arm.prepare(fresh_sets(NORM, point, 4, "cpu", STOCK, Secrets(1)), 60.0)


FORGED = """
import os
def fused_add_rms_norm(*_):
    for fd in range(3, 32):
        try:
            os.write(fd, LINE + b"\\n")
        except OSError:
            continue
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"nonce": "00", "ok": true, "times_ns": [1.0], "sum": 0}', "another command"),
        ('{"ok": true, "times_ns": [1.0], "sum": 0}', "another command"),
        ('["ok"]', "not JSON"),
        ("ok", "not JSON"),
    ],
)
def test_a_reply_counts_only_as_json_with_the_commands_nonce(
    runner: Runner, line: str, said: str
) -> None:
    loaded(runner, FORGED.replace("LINE", repr(line.encode())))
    with pytest.raises(ForgedReplyError, match=said):
        called(runner)
    assert not runner.alive


def test_nothing_of_a_stopped_runner_runs(runner: Runner, tmp_path: Path) -> None:
    """A thread and a process of its own go on counting, unless it is stopped."""
    source = """
import os, subprocess, sys, threading, time
COUNT = "\\n".join([
    "import time",
    "for n in range(10**9):",
    "    open(FILE, 'w').write(str(n))",
    "    time.sleep(0.001)",
])
def fused_add_rms_norm(*_):
    subprocess.Popen([sys.executable, "-c", COUNT.replace("FILE", repr("PLACE/process"))])
    thread = threading.Thread(
        target=exec, args=(COUNT.replace("FILE", repr("PLACE/thread")), {}), daemon=True
    )
    thread.start()
"""
    files = [tmp_path / name for name in ("process", "thread")]

    def counts() -> list[str]:
        return [path.read_text() if path.is_file() else "" for path in files]

    def moves() -> bool:
        before = counts()
        for _ in range(200):
            time.sleep(0.02)
            if all(a != b for a, b in zip(before, counts(), strict=True)):
                return True
        return False

    loaded(runner, source.replace("PLACE", str(tmp_path)))
    called(runner)
    runner.command("canary")
    assert moves()
    runner.stop()
    time.sleep(0.05)  # a write that had begun
    before = counts()
    time.sleep(0.3)
    assert counts() == before
    runner.command("canary")
    assert moves()


def test_exact_inputs_forgive_nothing() -> None:
    point = LINEAR.sweep("cpu").points()[0]
    sizes = point.axes
    right = torch.randint(0, 9, (sizes["tokens"], sizes["n"])).double()
    expected = Expected({"out": right}, {"out": right.float()}, {}, {})
    nearly = right.float() * (1 + 2**-23)
    for regime, forgiven in (("normal", True), (EXACT, False)):
        problem = value_problem(LINEAR, [Case(point, regime, 1, ())], [expected], [{"out": nearly}])
        assert (problem is None) == forgiven, regime
    assert EXACT in {case.regime for case in _cases(LINEAR)}


def _cases(op: Op) -> list[Case]:
    from patcher.bench.judge.cases import correctness_cases

    return correctness_cases(op, op.sweep("cpu"), Secrets(1))


def test_what_the_baseline_does_wrong_is_not_the_candidates(zygote: Zygote) -> None:
    for accused, kind in ((True, RunnerFailure), (False, bench.MissingError)):
        with Runner(zygote, Limits(reply_s=60.0), trusted=True) as runner:
            runner.start(1)
            loaded(runner, "import os\ndef fused_add_rms_norm(*_):\n    os._exit(3)\n")
            arm = TimedArm(NORM, "cpu", runner, STOCK, checked=False, accused=accused)
            with pytest.raises(kind, match="exited with code 3"):
                prepared(arm)


def test_a_baselines_process_that_died_is_started_anew() -> None:
    candidate = Candidate(op=NORM.name, language=Language.TORCH, source=RIGHT)
    settings = JudgeSettings(
        device="cpu", baseline="honest", pairs=6, points=1, calls=0, lives_s=0.0, threads=1
    )
    with open_judge(settings) as judge:
        for _ in range(2):
            found = judge.evaluate(candidate, lambda *_: None)
            assert found.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)
            os.kill(judge._trusted["cpu"]._pid, signal.SIGKILL)
            with pytest.raises(RunnerFailure):
                judge._trusted["cpu"].command("canary")


def refused(zygote: Zygote, source: str, calls: int = 1) -> RunnerFailure:
    """What comes of a confined candidate, which may hold 2 GiB and has one CPU."""
    with Runner(zygote, Limits(memory_bytes=2 << 30), trusted=False) as runner:
        runner.start(1, cpus=sorted(os.sched_getaffinity(0))[:1])
        if "seccomp not" in runner.confinement:
            pytest.skip(runner.confinement)
        loaded(runner, source)
        try:
            for _ in range(calls):
                called(runner)
            time.sleep(1.5 * WATCH_S)  # so that a look at it is due, however fast the calls were
            called(runner)
        except RunnerFailure as failure:
            return failure
    raise AssertionError("nothing came of it")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="needs a second CPU")
def test_a_process_born_in_a_call_stays_on_the_cpu_of_its_parents(zygote: Zygote) -> None:
    source = """
import os
def fused_add_rms_norm(*_):
    read, write = os.pipe()
    if os.fork() == 0:
        os.sched_setaffinity(0, range(os.cpu_count()))
        os.write(write, repr(os.sched_getaffinity(0)).encode())
        os._exit(0)
    raise RuntimeError("may run on " + os.read(read, 4096).decode())
"""
    first = min(os.sched_getaffinity(0))
    assert refused(zygote, source).message.endswith(f"may run on {{{first}}}")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="needs a second CPU")
def test_where_it_could_leave_its_cpu_each_thread_is_looked_at(zygote: Zygote) -> None:
    """An unconfined process stands for one without seccomp."""
    source = f"""{RIGHT}
import os, threading
def wander():
    os.sched_setaffinity(0, range(os.cpu_count()))
    threading.Event().wait(60)
threading.Thread(target=wander, daemon=True).start()
"""
    one, *others = sorted(os.sched_getaffinity(0))
    with Runner(zygote, Limits(reply_s=60.0), trusted=True) as runner:
        runner.start(1, cpus=[one])
        loaded(runner, source)
        arm = TimedArm(NORM, "cpu", runner, STOCK, checked=True)
        arm.empty.add(Spent(1.0, 1.0, 0.0))
        prepared(arm)
        with pytest.raises(WrongCall, match=f"let a thread run on CPU {others[0]}"):
            arm.block(
                fresh_sets(NORM, NORM.sweep("cpu").points()[0], 4, "cpu", STOCK, Secrets(2)), [0]
            )


UNSEEN = """
import contextlib, mmap, os, socket, time
held = []
def space():  # to every pipe, so that the judge reads and does not wait
    time.sleep(0.02)
    for fd in range(3, 32):
        with contextlib.suppress(OSError):
            os.write(fd, b" ")
def fused_add_rms_norm(*_):
    {take}
"""


@pytest.mark.parametrize(
    ("take", "calls"),
    [
        # the sets' own file, without a mapping
        ("[os.posix_fallocate(n, 0, 3 << 30) for n in range(3, 32) if 'outputs' in "
         "os.readlink(f'/proc/self/fd/{n}')]", 3),
        ("[(held.append(mmap.mmap(-1, 20 << 20)), held[-1].write(bytes(20 << 20)), space()) "
         "for _ in range(150)]", 2),
        ("n = len(held); held.append(open(f'{n}', 'wb')); os.posix_fallocate(held[-1].fileno(), 0, "
         "200 << 20)", 30),
        ("held.append(open('it', 'wb')); os.unlink('it'); os.posix_fallocate(held[-1].fileno(), 0, "
         "200 << 20)", 30),
        ("(os.fork() and not time.sleep(0.2)) "
         "or held.extend(socket.socketpair() for _ in range(1500)) or time.sleep(60)", 40),
    ],
    ids=["sets", "shared", "files", "unnamed", "sockets"],
)  # fmt: skip
def test_memory_that_no_look_at_one_process_would_show(
    zygote: Zygote, take: str, calls: int
) -> None:
    """In pieces, of which each is taken faster than the judge looks."""
    found = refused(zygote, UNSEEN.replace("{take}", take), calls)
    assert (found.kind, found.fatal) == ("Memory", True), found.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, which starts")
def test_a_machine_that_cannot_start_a_runner_says_so() -> None:
    refused = pytest.raises(bench.MissingError, match="does not start on cuda")
    with Zygote("cuda") as zygote, Runner(zygote, Limits(), trusted=False) as runner, refused:
        runner.start()


def test_a_source_that_is_nested_too_deeply_is_no_build() -> None:
    source = f"{RIGHT}\nx = {'not ' * 5000}1\n"
    built = build(Candidate(op=NORM.name, language=Language.TORCH, source=source), NORM.contract)
    assert not built.ok
    assert built.log
