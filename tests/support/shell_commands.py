"""Every command under one condition of the shell, for `test_shell`: `python shell_commands.py
CONDITION FILE` writes what came of each into FILE, as JSON.

Each runs in a fork of this process, which has imported what is heavy, with the descriptors that the
condition gives it and streams as Python makes them of such descriptors at its start.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

DATA = Path(__file__).resolve().parents[1] / "data"
LIMIT_S = 60
RAW = os.fsdecode(b"k\xff")
"""A name that is not UTF-8."""

WORDS = {
    "selftest": ["--corpus", "no-such-thing"],
    "worker": ["--once", "jobs"],
    "demo": [],
    "tasks create": [__file__],  # no folder
}
"""Where what is made up of a command's parameters would take long."""

WORKING = {
    "profile": ["m", "--from", str(DATA / "nsys/decode.sqlite")],
    "config": ["--example"],
    "ops show": ["fused_add_rms_norm"],
}
"""Words on which a command has something to tell."""


@dataclass(frozen=True)
class Condition:
    """What the shell does to a command."""

    stdout: str = "keep"
    """keep, full or closed."""
    stderr: str = "keep"
    stdin: str = "null"
    environment: dict[str, str] = field(default_factory=dict)
    """Also of the process that forks, so that Python starts under it."""
    brief: bool = False
    """Whether its help and its JSON are left out."""
    raw_argument: bool = False
    raw_folder: bool = False


ASCII = {
    "LC_ALL": "C",
    "LANG": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
}
CONDITIONS = {
    "plain": Condition(),
    "stdout-full": Condition(stdout="full"),
    "stdout-closed": Condition(stdout="closed"),
    "all-closed": Condition(stdout="closed", stderr="closed", stdin="closed", brief=True),
    "stderr-full": Condition(stderr="full", stdin="closed", brief=True),
    "stderr-closed": Condition(stderr="closed", brief=True),
    "ascii-locale": Condition(environment=ASCII),
    "ascii-dumb": Condition(
        environment={"PYTHONIOENCODING": "ascii", "TERM": "dumb", "COLUMNS": "0", "LINES": "many"},
        brief=True,
    ),
    "narrow": Condition(environment={"COLUMNS": "20"}),
    "raw-argument": Condition(raw_argument=True),
    "raw-folder": Condition(raw_folder=True, brief=True),
    "raw-folder-ascii": Condition(environment=ASCII, raw_folder=True, brief=True),
}


def commands() -> dict[str, Any]:
    """Every command that does something, by its words, in the order of the tree."""
    import typer

    from patcher.commands import index
    from patcher.commands.console import app

    index.load_all()
    return dict(_below((), typer.main.get_command(app)))


def _below(words: tuple[str, ...], group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _below((*words, name), command)
            if not command.invoke_without_command:
                continue
        yield " ".join((*words, name)), command


def calls(name: str, command: Any, condition: Condition) -> list[list[str]]:
    """The command lines that are tried of a command."""
    made_up = WORDS.get(name) or list(_made_up(command))
    tried = [made_up] + ([WORKING[name]] if name in WORKING else [])
    if condition.raw_argument:
        tried = [[*made_up, RAW]]
    elif not condition.brief:
        tried += [[*words, "--json"] for words in tried]
        tried.append(["--help"])
    return [[*name.split(), *words] for words in tried]


def _made_up(command: Any) -> Iterator[str]:
    """A word for each parameter that must be given; most name what is not there."""
    for parameter in command.params:
        if parameter.required:
            if parameter.param_type_name == "option":
                yield parameter.opts[0]
            kind = parameter.bare_type
            choices = get_args(kind)
            yield str(choices[0]) if choices else "1" if kind in (int, float) else "no-such-thing"


def tried(words: list[str], condition: Condition, scratch: Path) -> dict[str, Any]:
    """What came of one command line: its exit code, and what it wrote to stderr and stdout."""
    out, err = scratch / "stdout", scratch / "stderr"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            signal.alarm(LIMIT_S)
            _streams(condition, out, err)
            code = _run(words)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return {
        "words": [word.encode("utf-8", "backslashreplace").decode() for word in words],
        "code": os.waitstatus_to_exitcode(status),
        "stdout": out.read_bytes().decode("utf-8", "backslashreplace"),
        "stderr": err.read_bytes().decode("utf-8", "backslashreplace"),
    }


def _streams(condition: Condition, out: Path, err: Path) -> None:
    """The descriptors, and what Python makes of them at its start."""
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    wanted = {
        0: (condition.stdin, Path(os.devnull), os.O_RDONLY),
        1: (condition.stdout, out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        2: (condition.stderr, err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    }
    out.write_bytes(b"")
    err.write_bytes(b"")
    for number, (kind, path, flags) in wanted.items():
        if kind == "closed":
            os.close(number)
            continue
        opened = os.open("/dev/full" if kind == "full" else path, flags)
        os.dup2(opened, number)
        os.close(opened)

    def stream(number: int, mode: str, errors: str | None, **more: Any) -> Any:
        try:
            os.fstat(number)
        except OSError:
            return None
        raw = open(number, mode, closefd=False)  # noqa: SIM115 (it stays open)
        return io.TextIOWrapper(raw, encoding=encoding, errors=errors, **more)

    sys.stdin = sys.__stdin__ = stream(0, "rb", "strict")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = stream(1, "wb", errors)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stream(  # type: ignore[misc]
        2, "wb", "backslashreplace", line_buffering=True
    )


def _run(words: list[str]) -> int:
    """The exit code as the interpreter gives it, whose last act is to write out its buffers."""
    from patcher.cli import main

    sys.argv = ["patcher", *words]
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        if sys.stderr is not None:
            traceback.print_exc()
        code = 70
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = 120
    return code


def main(name: str, target: Path) -> None:
    """Try all, and write down what came of each, a list for each command."""
    ours = ("patcher.pipeline", "patcher.integrate", "patcher.hotspot", "patcher.ab")
    for heavy in ("torch", "scipy.stats", "rich.markdown", *ours):
        importlib.import_module(heavy)  # once, not in every fork

    condition = CONDITIONS[name]
    told: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / (RAW if condition.raw_folder else "work")
        folder.mkdir()
        os.chdir(folder)
        for words, command in commands().items():
            os.environ["PATCHER_RUNS_DIR"] = "/dev/null/runs" if words == "demo" else "runs"
            told[words] = [
                tried(line, condition, Path(scratch)) for line in calls(words, command, condition)
            ]
    target.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
