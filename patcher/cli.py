"""The command line: parse, call one function, print. Errors are one sentence and an exit code."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer
from rich.console import Console

from bench import MissingError, PatcherError, UsageError
from patcher import (  # noqa: F401 (importing them registers them)
    commands,
    exporting,
    measuring,
    patching,
    profiling,
    reviewing,
    selftesting,
    trtllm,
)
from patcher.console import app

CLICK_ERROR: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
"""Wrong usage as typer raises it, whether it brings its own click or uses the installed one."""


def main() -> None:
    """Run the command line and exit with its documented code."""
    as_json = "--json" in sys.argv[1:]
    try:
        code = app(standalone_mode=False)
    except PatcherError as error:
        _report(error, as_json)
        sys.exit(error.exit_code)
    except CLICK_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{error}\n")
        else:
            _report(UsageError(_message(error), _help_hint(error)), as_json)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        _report(_Interrupted("interrupted", "go on with: patcher resume"), as_json)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except ImportError as error:
        _report(MissingError(f"{error.name or error} is not installed", "pip install it"), as_json)
        sys.exit(3)
    sys.exit(code if isinstance(code, int) else 0)


class _Interrupted(PatcherError):
    kind = "interrupted"
    exit_code = 130


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
