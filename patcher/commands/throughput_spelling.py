"""How `patcher throughput` was spelt before its jobs were commands: still understood."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from patcher.bench import UsageError

MODES = {"--best-set", "--self-test"}
"""Options that are commands now."""
FLAGS = MODES | {
    "--elsewhere",
    "--other-workloads",
    "--alone",
    "--quick",
    "--tune-baseline",
    "--json",
    "--help",
}
"""Options without a value; every other one has one."""
PAGE = ("--report", "--profile", "--patched-profile")


class ThroughputGroup(TyperGroup):
    """Turns `patcher throughput MODEL --patch ...` into the command that does it now."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Say the new spelling on stderr where the old one was used, and go on with it."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = new_spelling(args, self._options)
            line = shlex.join(["patcher", "throughput", *args])
            typer.echo(f"new spelling: {line}", err=True)
        return super().parse_args(ctx, args)

    def _options(self, name: str) -> set[str]:
        return {option for one in self.commands[name].params for option in one.opts} | {"--help"}


class Option(NamedTuple):
    """An option with the words that spell it."""

    name: str
    words: tuple[str, ...]
    value: str | None


def new_spelling(words: Sequence[str], options_of: Callable[[str], Collection[str]]) -> list[str]:
    """The command that does now what these words asked for.

    Args:
        words: after `patcher throughput`.
        options_of: the names of a command's options. What another job took no notice of is left
            out.

    Raises:
        UsageError: several things to do, or nothing, or options that do not go together.
    """
    plain, options = _split(words)
    given = {option.name for option in options}
    command = _command(given)
    samples = next((one.value for one in options if one.name == "--from"), None)
    first = plain
    if samples is not None:
        first = [samples, *(["--model", plain[0]] if plain else []), *plain[1:]]
    kept = [
        one
        for one in options
        if (one.name in options_of(command) or not _known(one.name, options_of))
        and not (command == "tune" and one.name == "--tune-baseline")
        and not (command == "decide" and "--patch" not in given and one.name in PAGE)
    ]
    return [command, *first, *(word for one in kept for word in one.words)]


def _command(given: set[str]) -> str:
    """Which command does it, by the options."""
    patched, samples = "--patch" in given, "--from" in given
    if "--self-test" in given and (samples or patched):
        raise UsageError("several things to do", "give one of --patch, --from and --self-test")
    if samples and not patched:
        return "decide"
    if samples and "--best-set" in given:
        raise UsageError("several things to do", "give --from without --best-set")
    if not (patched or given & {"--self-test", "--tune-baseline", "--help"}):
        raise UsageError("nothing to compare", "give --patch BUNDLE; see patcher throughput --help")
    if given & set(PAGE) and ("--best-set" in given or not patched):
        raise UsageError(
            "a report is of one verdict", "give --patch without --best-set, which writes its own"
        )
    if samples:
        return "decide"
    if "--alone" in given and ("--best-set" in given or not patched):
        raise UsageError(
            "--alone is for one verdict with a process for each arm",
            "give --patch, --processes 3 or --engine vllm, and no --best-set",
        )
    if patched:
        return "best-set" if "--best-set" in given else "compare"
    if "--self-test" in given:
        return "self-test"
    if "--tune-baseline" not in given:  # help alone
        return "compare"
    if "--tuned" in given:
        raise UsageError("a search, and what one found", "give --tune-baseline or --tuned")
    return "tune"


def _known(name: str, options_of: Callable[[str], Collection[str]]) -> bool:
    """Whether the old command had that option; of one that it had not the new one complains."""
    every = ("compare", "best-set", "tune", "self-test", "decide")
    return name in MODES | {"--from"} or any(name in options_of(command) for command in every)


def _split(words: Sequence[str]) -> tuple[list[str], list[Option]]:
    """Words that belong to no option, and the options, in the order in which they were given."""
    plain: list[str] = []
    options: list[Option] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, assigned, value = word.partition("=")
        if not word.startswith("--") or word == "--":
            plain.append(word)
        elif assigned:
            options.append(Option(name, (word,), value))
        elif name in FLAGS or not left:
            options.append(Option(name, (word,), None))
        else:
            value = left.pop(0)
            options.append(Option(name, (word, value), value))
    return plain, options
