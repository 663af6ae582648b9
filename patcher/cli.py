"""The command line: parse, call one function, print. Errors are one sentence and an exit code."""

from __future__ import annotations

import sys
from typing import Any

import typer
from rich.console import Console

from patcher.bench import Interrupted, PatcherError, UsageError
from patcher.commands.console import app, json_text
from patcher.commands.streams import ReaderGoneError, StdoutError, prepare, require_text
from patcher.runs.stopping import Stopping
from patcher.visible import visible

CLICK_ERROR: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
"""Wrong usage as typer raises it, whether it brings its own click or uses the installed one."""


_RUNS = ("run", "optimize", "demo", "resume")
_RESUME = "go on with: patcher resume"
_AGAIN = "give the command again"


def main() -> None:
    """Run the command line and exit with its documented code."""
    as_json = "--json" in sys.argv[1:]
    with Stopping() as stopping:
        try:
            prepare()
            require_text(sys.argv[1:])
            code = _run(sys.argv[1:])
            sys.stdout.flush()
        except BaseException as error:
            if stopping.asked and not isinstance(error, Interrupted):
                # what was interrupted may have made another error of it: an import does
                resumable = any(word in _RUNS for word in sys.argv[1:2])
                error = Interrupted(_RESUME if resumable else _AGAIN)
            code = _ended_by(error, as_json)
    sys.exit(code if isinstance(code, int) else 0)


def _run(words: list[str]) -> Any:
    """Run the command that the words name, and return its exit code.

    The `main` of typer would turn a signal into a mere exit code, so that nobody would be told.
    """
    command = typer.main.get_command(app)
    try:
        with command.make_context("patcher", words) as context:
            return command.invoke(context)
    except typer.Exit as end:
        return end.exit_code


def _ended_by(error: BaseException, as_json: bool) -> int:
    """The exit code of an error that was told; one that nobody expected goes on."""
    match error:
        case PatcherError():
            return _told(error, as_json)
        case CLICK_ERROR():
            if type(error).__name__ == "NoArgsIsHelpError":
                sys.stderr.write(f"{error}\n")
                return UsageError.exit_code
            return _told(UsageError(_message(error), _help_hint(error)), as_json)
        case KeyboardInterrupt() | EOFError() | typer.Abort():
            return _told(Interrupted(_AGAIN), as_json)
        case ReaderGoneError() | BrokenPipeError():
            return 0
        case OSError():
            return _told(_system_error(error), as_json)
        case UnicodeError():
            message = f"a name or a text is not {sys.getfilesystemencoding()}: {error}"
            hint = "rename the file or folder, or set a locale of its encoding: LC_ALL=C.UTF-8"
            return _told(UsageError(message, hint), as_json)
        case ImportError():
            from patcher.extras import missing_package

            command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
            return _told(missing_package(error, command), as_json)
    raise error


def _system_error(error: OSError) -> PatcherError:
    """An error of the system in one sentence."""
    reason = error.strerror or str(error)
    if error.filename is None:
        return UsageError(f"the operating system refused: {reason}", "see `patcher doctor`")
    return UsageError(f"{error.filename}: {reason}", "give a path that can be read and written")


def _message(error: Any) -> str:
    return str(error.format_message())


def _help_hint(error: BaseException) -> str:
    context = getattr(error, "ctx", None)
    if context is None:
        return "see: patcher --help"
    path = context.command_path
    if type(error).__name__ != "MissingParameter":
        return f"see: {path} --help"
    asked = " ".join(context.command.collect_usage_pieces(context)).upper()
    return f"{path} {asked.replace('{', '').replace('}', '')}; see: {path} --help"


def _told(error: PatcherError, as_json: bool) -> int:
    """Say it, as a document on stdout or as two lines on stderr; its exit code."""
    try:
        if as_json and not isinstance(error, StdoutError):
            sys.stdout.write(json_text({"error": error.as_dict()}))
            sys.stdout.flush()
            return error.exit_code
    except ReaderGoneError:
        return error.exit_code
    except StdoutError as full:  # the document cannot be written
        _told(full, as_json)
        return error.exit_code
    console = Console(stderr=True)
    console.print(f"[bold red]{error.kind}:[/]", end=" ")
    console.print(visible(error.message), markup=False, highlight=False)
    if error.hint:
        console.print("[bold]next:[/]", end=" ")
        console.print(visible(error.hint), markup=False, highlight=False)
    return error.exit_code
