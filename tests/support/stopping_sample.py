"""What test_stopping and others share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patcher.bench.sandbox.process_tree import descendants
from patcher.models import Reply, Usage
from patcher.models.replay import RecordedReply

OP = "fused_add_rms_norm"

LIMIT_S = 120


class Stage:
    """A command in a session of its own, as a terminal's."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "patcher", *words, "--json"],
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def until(self, reached: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not reached():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def runs(self, *words: str) -> bool:
        """Whether something below it has these words in its command line."""
        for pid in descendants(self.process.pid):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if all(word in line for word in words):
                return True
        return False

    def stop(self, number: signal.Signals, to: str) -> dict[str, Any]:
        """What it says at the end."""
        (os.killpg if to == "group" else os.kill)(self.process.pid, number)
        out, err = self.process.communicate(timeout=LIMIT_S)
        assert b"Traceback" not in err, err.decode()
        if number is signal.SIGKILL:
            assert self.process.returncode == -signal.SIGKILL
            return {}
        assert self.process.returncode == 130, (self.process.returncode, err.decode())
        found: dict[str, Any] = json.loads(out)["error"]
        assert found["kind"] == "interrupted"
        return found


def recorded(file: Path, source: str) -> str:
    """The model that answers the first question with that source."""
    reply = Reply(
        text=f"```cpp\n{source}\n```\n",
        model="recorded",
        usage=Usage(),
        stop_reason="end_turn",
        source="api",
        prompt_digest="0" * 64,
    )
    line = RecordedReply(
        step=f"{OP}/0/ask-generate",
        role="generate",
        prompt_digest="0" * 64,
        system="",
        prompt="",
        reply=reply,
    )
    file.write_text(line.model_dump_json() + "\n")
    return f"replay:{file}"
