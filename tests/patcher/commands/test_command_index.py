"""The table of contents of the command line: complete, short, and read without the commands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from patcher.commands import index
from patcher.commands.console import app

FOLDER = Path(index.__file__).parent


def every_command() -> list[tuple[str, Any]]:
    """Each command and group of the whole tree by its words, `trtllm bench` for one."""
    index.load_all()
    return list(_below((), typer.main.get_command(app)))


def _below(words: tuple[str, ...], group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield " ".join((*words, name)), command
        if hasattr(command, "commands"):
            yield from _below((*words, name), command)


EVERY = every_command()


def test_the_table_lists_every_command_and_no_other() -> None:
    registered = {command.name or "" for command in _named(app.registered_commands)}
    registered |= {group.name or "" for group in app.registered_groups}
    assert registered == set(index.COMMANDS)
    assert all((FOLDER / f"{entry.module}.py").is_file() for entry in index.COMMANDS.values())


def _named(registered: list[Any]) -> Iterator[Any]:
    for info in registered:
        info.name = info.name or typer.main.get_command_name(info.callback.__name__)
        yield info


@pytest.mark.parametrize("name", index.COMMANDS)
def test_a_summary_is_one_short_sentence(name: str) -> None:
    summary = index.COMMANDS[name].summary
    assert summary.endswith((".", "?"))
    assert len(summary) <= 62


@pytest.mark.parametrize(("words", "command"), EVERY, ids=[words for words, _ in EVERY])
def test_help_has_a_sentence_and_an_example(words: str, command: Any) -> None:
    text = command.help or ""
    if not hasattr(command, "commands") or command.invoke_without_command:
        assert "[bold]Examples[/bold]" in text
        assert words in text
    assert text.strip()[0].isupper()


@pytest.mark.parametrize("value", ["inf", "nan", "-inf", "1e400"])
def test_no_option_takes_a_number_that_is_not_finite(value: str) -> None:
    """Neither a limit nor a share may be one."""
    tried = 0
    for _, command in every_command():
        with command.make_context("patcher", [], resilient_parsing=True) as context:
            for option in command.params:
                if isinstance(_taken(option, context, "1.5"), float):
                    tried += 1
                    assert isinstance(_taken(option, context, value), typer.BadParameter), option
    assert tried > 10


def test_threads_are_bounded() -> None:
    for _, command in every_command():
        with command.make_context("patcher", [], resilient_parsing=True) as context:
            for option in command.params:
                if option.name == "threads":
                    wrong = _taken(option, context, "99999999999999999")
                    assert isinstance(wrong, typer.BadParameter)
                    assert _taken(option, context, "64") == 64


def _taken(option: Any, context: Any, value: str) -> object:
    """What a command gets for an option of that value, or the error."""
    if getattr(option, "is_flag", False) or option.multiple:
        return None
    try:
        return option.process_value(context, value)
    except typer.BadParameter as error:
        return error


def test_help_of_all_imports_no_command() -> None:
    told = subprocess.run(
        [sys.executable, "-P", "-c", _WHOLE_HELP], capture_output=True, text=True, check=True
    )
    imported = {name.removeprefix("patcher.commands.") for name in told.stdout.split()}
    assert "index" in imported
    assert not imported & {entry.module for entry in index.COMMANDS.values()}


_WHOLE_HELP = """
import io, sys
from contextlib import redirect_stdout
from patcher.cli import main
sys.argv = ["patcher", "--help"]
with redirect_stdout(io.StringIO()) as told:
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
assert "evaluate" in told.getvalue()
print(*sorted(name for name in sys.modules if name.startswith("patcher.commands.")))
"""
