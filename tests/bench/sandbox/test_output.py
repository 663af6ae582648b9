"""What programs print without end, or with a child that holds their pipes open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patcher.bench.sandbox import Excerpt, communicate, run

MOST = 1000


@pytest.mark.parametrize("step", [1, 7, 499, 500, 501, 100_000])
def test_head_and_tail_are_kept_whatever_the_pieces(step: int) -> None:
    whole = b"".join(b"%06d\n" % number for number in range(1000))
    for size in (0, 499, 500, 501, 999, 1000, 1001, len(whole)):
        kept = Excerpt(most_bytes=MOST)
        for at in range(0, size, step):
            kept.add(whole[:size][at : at + step])
        assert kept.left_out == max(size - MOST, 0)
        note = f"\n[{size - MOST} bytes are left out]\n".encode() if size > MOST else b""
        assert bytes(kept) == whole[: min(500, size)] + note + whole[max(500, size - 500) : size]


def test_a_log_is_read_no_further_than_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.write(b"begin")
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"end")
    kept = Excerpt.of_file(log, MOST)
    assert bytes(kept).startswith(b"begin")
    assert bytes(kept).endswith(b"end")
    assert kept.left_out == 2**40 + 3 - MOST
    log.write_bytes(b"x" * 700)
    assert bytes(Excerpt.of_file(log, MOST)) == b"x" * 700


def test_a_program_run_to_its_end_says_how_it_ended() -> None:
    code = "import sys; print('o' * 5000); sys.stderr.write('e'); sys.exit(3)"
    ended, out, err = run([sys.executable, "-IS", "-c", code], 60, {}, MOST)
    assert (ended, out.left_out, str(err)) == (3, 5001 - MOST, "e")
    with pytest.raises(subprocess.TimeoutExpired):
        run([sys.executable, "-IS", "-c", "import time; time.sleep(60)"], 0.3, {}, MOST)


def started(code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-IS", "-c", f"import os, sys, time\n{code}"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True)


def test_a_flood_on_both_pipes_is_read_to_its_end() -> None:
    flood = "[sys.stderr.write('e' * 10_000) for _ in range(3_000)]; print('x' * 30_000_000)"
    process = started(f"print('begin'); {flood}; print('end'); sys.exit(3)")
    out, err = communicate(process, 120, most_bytes=MOST)
    assert process.wait() == 3
    assert bytes(out).startswith(b"begin\nxx")
    assert bytes(out).endswith(b"xx\nend\n")
    assert max(len(bytes(out)), len(bytes(err))) < 2 * MOST
    assert err.left_out == 30_000_000 - MOST


@pytest.mark.parametrize(
    "code",
    [
        "time.sleep(60)",
        "while True: print('x' * 10_000)",
        "os.close(1); os.close(2); time.sleep(60)",
        "os.fork() or time.sleep(60)",
    ],
)
def test_who_does_not_end_is_late_and_keeps_nobody(code: str) -> None:
    process = started(code)
    with pytest.raises(subprocess.TimeoutExpired):
        communicate(process, 0.5)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_watch_is_asked_while_it_prints_and_while_it_does_not() -> None:
    for code in ("time.sleep(60)", "while True: print('x')"):
        looks: list[float] = []

        def watch(looks: list[float] = looks) -> None:
            looks.append(time.monotonic())
            if len(looks) == 3:
                raise KeyError("enough")

        process = started(code)
        with pytest.raises(KeyError):
            communicate(process, 60, watch=watch)
        process.kill()
        process.wait()
