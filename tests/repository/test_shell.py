"""Every command under what a shell may do to it: it works, or says what is wrong in one sentence.

Full and closed streams, ASCII terminals and locales, narrow and dumb terminals, names that are not
UTF-8. The commands are those of the tree, so a new one is tried by itself.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import shell_commands
from shell_commands import CONDITIONS

CODES = {0, 1, 2, 3, 4, 5, 6, 130}
"""The documented ones."""
COMMANDS = list(shell_commands.commands())


@cache
def told(condition: str) -> dict[str, list[dict[str, Any]]]:
    """What came of every command under a condition."""
    given = CONDITIONS[condition].environment
    with TemporaryDirectory() as scratch:
        target = Path(scratch) / "told.json"
        script = [sys.executable, "-P", shell_commands.__file__, condition, str(target)]
        home = {"PATCHER_HOME": f"{scratch}/home", "PATCHER_CACHE": f"{scratch}/cache"}
        keys = {"ANTHROPIC_API_KEY": "", "OPENAI_API_KEY": "", "PATCHER_PATCHES": "off"}
        hub = {"HF_HUB_OFFLINE": "1"}  # asking it would take most of the time
        environment = {"COLUMNS": "100", **os.environ, **home, **keys, **hub, **given}
        done = subprocess.run(
            script, env=environment, capture_output=True, text=True, check=False, timeout=1200
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, list[dict[str, Any]]] = json.loads(target.read_text("utf-8"))
        return found


def by_words(condition: str, command: str) -> dict[tuple[str, ...], dict[str, Any]]:
    return {tuple(one["words"]): one for one in told(condition)[command]}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("condition", CONDITIONS)  # the outer one: what it took is used again
def test_no_command_ends_in_a_traceback(command: str, condition: str) -> None:
    for one in told(condition)[command]:
        said = " ".join(one["words"]), one["stderr"][-2000:]
        assert "Traceback" not in one["stderr"] + one["stdout"], said
        assert one["code"] in CODES, said


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_result_that_cannot_be_written_is_an_error(command: str) -> None:
    plain = by_words("plain", command)
    for condition, words in (
        ("stdout-full", "cannot write the result to stdout: No space left on device"),
        ("stdout-closed", "stdout is closed"),
    ):
        for called, one in by_words(condition, command).items():
            if plain[called]["stdout"] or condition == "stdout-closed":
                first = 0 if condition == "stdout-closed" else plain[called]["code"]
                assert one["code"] == (first or 2), one
                assert words in " ".join(one["stderr"].split()), one


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_message_that_cannot_be_written_changes_no_result(command: str) -> None:
    plain = by_words("plain", command)
    for condition in ("stderr-full", "stderr-closed"):
        for words, one in by_words(condition, command).items():
            assert one["code"] == plain[words]["code"], one
            assert bool(one["stdout"]) == bool(plain[words]["stdout"]), one


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_json_stays_json_where_the_terminal_is_ascii(command: str) -> None:
    plain = by_words("plain", command)
    for condition in ("ascii-locale", "ascii-dumb", "narrow"):
        for words, one in by_words(condition, command).items():
            assert one["code"] == plain[words]["code"], one
            if "--json" in words:
                assert json.loads(one["stdout"]).keys() == json.loads(plain[words]["stdout"]).keys()
            if condition.startswith("ascii"):
                assert one["stdout"].isascii(), one


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_an_argument_that_is_no_text_is_refused_in_one_sentence(command: str) -> None:
    [one] = told("raw-argument")[command]
    assert one["code"] == 2
    assert "an argument is not utf-8 text: 'k\\udcff'" in " ".join(one["stderr"].split())


def test_a_real_process_does_as_its_fork() -> None:
    """The forks stand for processes that a shell starts: here is one of each kind."""
    patcher = f"{shlex.quote(sys.executable)} -P -m patcher"
    for line, code, said in (
        (f"{patcher} ops >/dev/full", 2, "cannot write the result to stdout"),
        (f"{patcher} ops --json >/dev/full", 2, "cannot write the result to stdout"),
        (f"{patcher} ops >&-", 2, "stdout is closed"),
        (f"{patcher} ops 2>&- | head -n 1", 0, ""),
        (f"{patcher} ops show no-such 2>&-; test $? = 2", 0, ""),
        (f"{patcher} models >&- 2>&- <&-; test $? = 2", 0, ""),
        (f"LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {patcher} ops", 0, ""),
        (f"PYTHONIOENCODING=ascii {patcher} ops show no-such --json", 2, ""),
        (f"{patcher} evaluate rope $'k\\xff.cpp'", 2, "an argument is not utf-8 text"),
    ):
        done = subprocess.run(["bash", "-c", line], capture_output=True, check=False, timeout=120)
        text = " ".join(done.stderr.decode("utf-8", "replace").split())
        assert done.returncode == code, (line, text)
        assert said in text
        assert "Traceback" not in text
