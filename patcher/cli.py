"""The command line: parse, call one function, print. Errors are one sentence and an exit code."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer
from rich.console import Console

from patcher.bench import PatcherError, UsageError
from patcher.commands.console import app
from patcher.runs.stopping import Interrupted, Stopping

CLICK_ERROR: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
"""Wrong usage as typer raises it, whether it brings its own click or uses the installed one."""


_RUNS = ("run", "optimize", "demo", "resume")
_RESUME = "go on with: patcher resume"


def main() -> None:
    """Run the command line and exit with its documented code."""
    as_json = "--json" in sys.argv[1:]
    with Stopping() as stopping:
        try:
            code = app(standalone_mode=False)
        except BaseException as error:
            if stopping.asked and not isinstance(error, Interrupted):
                # what was interrupted may have made another error of it: an import does
                resumable = any(word in _RUNS for word in sys.argv[1:2])
                error = Interrupted("interrupted", _RESUME if resumable else "")
            code = _ended_by(error, as_json)
    sys.exit(code if isinstance(code, int) else 0)


def _ended_by(error: BaseException, as_json: bool) -> int:
    """The exit code of an error that was told; one that nobody expected goes on."""
    match error:
        case PatcherError():
            _report(error, as_json)
            return error.exit_code
        case CLICK_ERROR():
            if type(error).__name__ == "NoArgsIsHelpError":
                sys.stderr.write(f"{error}\n")
            else:
                _report(UsageError(_message(error), _help_hint(error)), as_json)
            return 2
        case KeyboardInterrupt() | typer.Abort():
            return _ended_by(Interrupted("interrupted"), as_json)
        case BrokenPipeError():
            sys.stderr.close()
            return 0
        case ImportError():
            from patcher.extras import missing_package

            command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
            _report(missing_package(error, command), as_json)
            return 3
    raise error


def _message(error: Any) -> str:
    return str(error.format_message())


def _help_hint(error: BaseException) -> str:
    context = getattr(error, "ctx", None)
    return f"see: {context.command_path} --help" if context else "see: patcher --help"


def _report(error: PatcherError, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"error": error.as_dict()}, ensure_ascii=False) + "\n")
        return
    console = Console(stderr=True)
    console.print(f"[bold red]{error.kind}:[/]", end=" ")
    console.print(error.message, markup=False, highlight=False)
    if error.hint:
        console.print("[bold]next:[/]", end=" ")
        console.print(error.hint, markup=False, highlight=False)
