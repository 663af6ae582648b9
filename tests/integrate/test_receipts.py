"""Receipts of several hosts, containers and forked processes, and on a volume that is full."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from feature_matrix import ANY, feature
from rich.console import Console

from patcher import bench
from patcher.integrate import CallCounters, Receipt, read_receipts
from patcher.integrate.receipts import ReceiptWriter
from patcher.show.patches import receipts_table

FULL = """
    import logging, resource, signal, sys, time
    from pathlib import Path
    from patcher.integrate import CallCounters
    from patcher.integrate.receipts import Receipt, ReceiptWriter

    logging.basicConfig(format="%(message)s")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    def full(whether):
        room = 0 if whether else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    book = CallCounters("norm", "0" * 64)
    start, middle, end = (word == "full" for word in sys.argv[2:])
    full(start)
    writer = ReceiptWriter(Path(sys.argv[1]))
    writer.add(book, "vllm:add_norm")
    writer.put(Receipt.of(CallCounters("other", "1" * 64)).model_copy(update={"failure": "why"}))
    full(middle)
    book.reasons["too wide"] += 1
    time.sleep(2.5)
    full(end)
    book.reasons["too wide"] += 1
    writer.close()
    print("alive")
"""


@feature("`PATCHER_RECEIPTS` on a full volume", "right", ANY)
@pytest.mark.parametrize(
    ("volume", "counted"),
    [
        (("full", "full", "full"), None),
        (("full", "free", "free"), 2),
        (("free", "full", "full"), 0),
        (("free", "free", "full"), 1),
    ],
)
def test_a_full_volume_costs_the_receipt_and_nothing_else(
    tmp_path: Path, volume: tuple[str, ...], counted: int | None
) -> None:
    folder = tmp_path / "receipts"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL), str(folder), *volume],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "alive\n"
    assert done.stderr.count("receipts cannot be written") == 1, done.stderr
    assert "Traceback" not in done.stderr
    found = read_receipts(folder)
    if counted is None:
        assert not found
    else:
        [receipt, failed] = found
        assert receipt.fallbacks.get("too wide", 0) == counted
        assert failed.failure == "why"
    assert not [path for path in folder.iterdir() if path.suffix != ".json"]


@feature("`PATCHER_RECEIPTS` that is no folder", "refused", ANY)
def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(bench.UsageError, match="cannot write receipts"):
        ReceiptWriter(tmp_path / "file" / "receipts")


def write(folder: Path, patch_id: str = "norm") -> None:
    book = CallCounters(patch_id, "0" * 64)
    book.reasons["too wide"] += 1
    writer = ReceiptWriter(folder)
    writer.add(book, "vllm:add_norm")
    writer.close()


@feature("several hosts and containers, one folder of receipts", "right", ANY)
def test_containers_whose_processes_have_one_id_keep_their_receipts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 7)
    for rank, host in enumerate(("one", "two", "two")):  # the last is a replica on one host
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        monkeypatch.setenv("PATCHER_RANK", str(rank))
        write(tmp_path)
    found = read_receipts(tmp_path)
    assert [(one.host, one.rank, one.pid) for one in found] == [
        ("one", 0, 7),
        ("two", 1, 7),
        ("two", 2, 7),
    ]
    console = Console(record=True, width=160)
    console.print(receipts_table(found))
    shown = console.export_text()
    assert shown.count("two") == 2
    assert "host" in shown
    console.print(receipts_table(found[:1]))
    assert "host" not in console.export_text()


def test_a_patch_that_is_in_twice_in_a_process_keeps_both_counts(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path)
    assert [one.fallbacks for one in read_receipts(tmp_path)] == [{"too wide": 1}] * 2


def test_a_receipt_of_an_older_version_is_read(tmp_path: Path) -> None:
    old = {"patch_id": "norm", "digest": "0" * 64, "pid": 7}
    path = tmp_path / "norm.7.json"
    path.write_text(Receipt.model_validate(old).model_dump_json(include=set(old)))
    [receipt] = read_receipts(tmp_path)
    assert (receipt.pid, receipt.host) == (7, "")


def count(book: CallCounters, how_often: int) -> None:
    book.reasons["too wide"] += how_often


@feature("a process that forks", "right", ANY)
@pytest.mark.parametrize("forked_by", ["os", "multiprocessing"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_calls_of_a_forked_process_are_in_a_receipt_of_its_own(
    tmp_path: Path, forked_by: str
) -> None:
    book = CallCounters("norm", "0" * 64)
    writer = ReceiptWriter(tmp_path)
    writer.add(book, "vllm:add_norm")
    count(book, 5)
    if forked_by == "os":
        for how_often in (2, 0):  # the second has nothing to tell
            child = os.fork()
            if child == 0:
                count(book, how_often)
                writer.close()
                os._exit(0)
            os.waitpid(child, 0)
    else:
        context: Any = multiprocessing.get_context("fork")
        for how_often in (2, 0):
            process = context.Process(target=count, args=(book, how_often))
            process.start()
            process.join()
    count(book, 1)
    writer.close()
    found = read_receipts(tmp_path)
    told = {one.pid == os.getpid(): one.fallbacks for one in found}
    assert told == {True: {"too wide": 6}, False: {"too wide": 2}}
    assert len(found) == 2


@feature("the folder of receipts: removed, or left by `chdir`", "right", ANY)
def test_receipts_are_where_they_were_when_the_process_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    writer = ReceiptWriter(Path("receipts"))
    book = CallCounters("norm", "0" * 64)
    writer.add(book, "transformers:norm")
    writer.put(Receipt.of(CallCounters("other", "1" * 64)).model_copy(update={"failure": "why"}))
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    shutil.rmtree(tmp_path / "receipts")
    writer.close()
    assert [one.patch_id for one in read_receipts(tmp_path / "receipts")] == ["norm", "other"]
    assert list(elsewhere.iterdir()) == []


@feature("a process that may start no thread", "right", ANY)
def test_without_a_thread_receipts_are_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # as at a limit of processes

    monkeypatch.setattr(threading.Thread, "start", start)
    writer = ReceiptWriter(tmp_path)
    assert "only when the process ends: can't start new thread" in caplog.text
    book = CallCounters("norm", "0" * 64)
    writer.add(book, "transformers:norm")
    book.reasons["too wide"] += 3
    writer.close()
    [receipt] = read_receipts(tmp_path)
    assert receipt.fallbacks == {"too wide": 3}


SIGNALLED = """
    import os, signal, sys, threading, time
    from pathlib import Path
    from patcher.integrate import CallCounters
    from patcher.integrate.receipts import Receipt, ReceiptWriter

    what, book, write = sys.argv[2], CallCounters("norm", "0" * 64), Receipt.write
    writer = ReceiptWriter(Path(sys.argv[1]))
    writer.add(book, "vllm:add_norm")
    book.reasons["too wide"] += 1
    in_write, main = threading.Event(), threading.main_thread()

    def close(*_):
        book.reasons["too wide"] += 1
        writer.close()

    def leave(*_):
        sys.exit(3)

    signal.signal(signal.SIGTERM, close if what == "close" else leave)

    def interrupted(receipt, path):
        if threading.current_thread() is not main:
            in_write.set()
            if what == "join":
                time.sleep(1)
        elif what != "join" and not in_write.is_set():
            in_write.set()
            os.kill(os.getpid(), signal.SIGTERM)
        write(receipt, path)

    Receipt.write = interrupted
    if what == "join":
        in_write.wait()
        book.reasons["too wide"] += 1
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        writer.close()
    else:
        writer.write()
"""


@feature("a signal while receipts are written", "right", ANY)
@pytest.mark.parametrize(
    ("what", "status", "counted"), [("close", 0, 2), ("leave", 3, 1), ("join", 3, 2)]
)
def test_a_signal_while_receipts_are_written_loses_none(
    tmp_path: Path, what: str, status: int, counted: int
) -> None:
    """A handler closes the writer in the midst of a write, or ends the process; or the process is
    ended while the writer waits for its thread.
    """
    folder = tmp_path / "receipts"
    command = [sys.executable, "-c", textwrap.dedent(SIGNALLED), str(folder), what]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (status, "")
    [receipt] = read_receipts(folder)
    assert receipt.fallbacks == {"too wide": counted}
    assert [path.suffix for path in folder.iterdir()] == [".json"]


@feature("a clock that stands still or goes back", "right", ANY)
def test_receipts_need_no_clock_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now in (10**18, 10**18, 10**18 - 10**9):
        monkeypatch.setattr("time.time_ns", lambda now=now: now)
        monkeypatch.setattr("time.time", lambda now=now: now / 1e9)
        write(tmp_path)
    assert [one.fallbacks for one in read_receipts(tmp_path)] == [{"too wide": 1}] * 3


STARTED = """
    import multiprocessing, sys
    from pathlib import Path

    def work(folder):
        from patcher.integrate import CallCounters
        from patcher.integrate.receipts import ReceiptWriter
        book = CallCounters("norm", "0" * 64)
        ReceiptWriter(Path(folder)).add(book, "vllm:add_norm")
        book.reasons["too wide"] += 1

    if __name__ == "__main__":
        child = multiprocessing.get_context(sys.argv[2]).Process(target=work, args=sys.argv[1:2])
        child.start()
        child.join()
        raise SystemExit(child.exitcode)
"""


@feature("a child of multiprocessing that loads its own model", "right", ANY)
@pytest.mark.parametrize("way", ["fork", "forkserver", "spawn"])
def test_the_last_calls_of_a_child_that_is_not_ended_by_python_are_written(
    tmp_path: Path, way: str
) -> None:
    script, folder = tmp_path / "program.py", tmp_path / "receipts"
    script.write_text(textwrap.dedent(STARTED))
    subprocess.run([sys.executable, str(script), str(folder), way], check=True, timeout=120)
    [receipt] = read_receipts(folder)
    assert receipt.fallbacks == {"too wide": 1}
