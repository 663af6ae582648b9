"""The table of contents of the command line: which file has a command, and where help lists it.

The file of a command is imported when the command is named, and not before: `patcher --help` reads
this table alone.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class CommandEntry(NamedTuple):
    """One line of `patcher --help`."""

    module: str
    """The file in this folder that registers the command."""
    panel: str
    summary: str


START = "Start here"
PROFILE = "Profile a model"
KERNELS = "Write and judge kernels"
MODELS = "Models and their throughput"
PATCHES = "Patches"
RUNS = "Runs"

COMMANDS = {
    "demo": CommandEntry("run", START, "Run the whole path on this CPU: no GPU, no key."),
    "doctor": CommandEntry("doctor", START, "Check this machine, and how to fix what it lacks."),
    "config": CommandEntry("config", START, "Show each setting, and where its value comes from."),
    "profile": CommandEntry("profile", PROFILE, "Rank the kernels that decode spends its time in."),
    "ops": CommandEntry("ops", KERNELS, "List the ops of the kernel library."),
    "evaluate": CommandEntry("evaluate", KERNELS, "Judge a kernel: is it correct, is it faster?"),
    "optimize": CommandEntry("optimize", KERNELS, "Let language models write a kernel for an op."),
    "workspace": CommandEntry("workspace", KERNELS, "Make a folder for a coding agent of yours."),
    "attempt": CommandEntry("workspace", KERNELS, "Judge the kernel in such a folder."),
    "tasks": CommandEntry("tasks", KERNELS, "Create tasks for training, each an op."),
    "train": CommandEntry("train", KERNELS, "Train a model that writes kernels; evaluate it."),
    "worker": CommandEntry("worker", KERNELS, "Judge kernels for loops on other machines."),
    "selftest": CommandEntry("selftest", KERNELS, "Test the judge itself on this machine."),
    "models": CommandEntry("models", MODELS, "List served models, and the models that write."),
    "throughput": CommandEntry("throughput", MODELS, "Measure patches end to end, with a verdict."),
    "bundle": CommandEntry("bundle", PATCHES, "Judge a kernel and package it as a patch."),
    "verify": CommandEntry("patches", PATCHES, "Check that a patch fits this environment."),
    "apply": CommandEntry("patches", PATCHES, "Install a patch for its engine."),
    "revert": CommandEntry("patches", PATCHES, "Remove an applied patch."),
    "patches": CommandEntry("patches", PATCHES, "List the applied patches."),
    "receipts": CommandEntry("patches", PATCHES, "Show which patched kernels ran, and how often."),
    "export": CommandEntry("export", PATCHES, "Write a patch in the format of another project."),
    "import": CommandEntry("export", PATCHES, "Read kernels of another project as ops."),
    "trtllm": CommandEntry("trtllm", PATCHES, "Patch, check and benchmark TensorRT-LLM."),
    "run": CommandEntry("run", RUNS, "Profile, optimize, patch, measure, decide, report."),
    "resume": CommandEntry("run", RUNS, "Resume a run that was stopped or waits."),
    "runs": CommandEntry("runs", RUNS, "List the runs: where each stands, and what it cost."),
    "status": CommandEntry("runs", RUNS, "Show where a run stands, and what it cost so far."),
    "report": CommandEntry("report", RUNS, "Write the report of a run."),
    "review": CommandEntry("review", RUNS, "Show the evidence of a patch, and ask for your word."),
    "accept": CommandEntry("review", RUNS, "Record that you accept a patch."),
    "reject": CommandEntry("review", RUNS, "Record that you reject a patch."),
    "record": CommandEntry("record", RUNS, "Save a finished agent loop as a folder."),
    "replay": CommandEntry("record", RUNS, "Run a recorded loop again, without any model."),
    "memory": CommandEntry("memory", RUNS, "Show or forget what earlier runs learned."),
}


def load_all() -> None:
    """Import the file of every command, so that `console.app` knows them all."""
    for entry in COMMANDS.values():
        _load(entry)


class CommandIndex(TyperGroup):
    """Lists the commands of the table; a command takes the place of its line when it is named."""

    def __init__(self, *, commands: Any = None, **attributes: Any) -> None:
        known = dict(commands or {})
        lines = {name: known.pop(name, None) or _line(name) for name in COMMANDS}
        super().__init__(commands={**lines, **known}, **attributes)
        for name, entry in COMMANDS.items():
            self.commands[name].rich_help_panel = entry.panel  # type: ignore[attr-defined]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import what the first word names, then let typer find it."""
        if entry := COMMANDS.get(args[0]):
            from patcher.commands.console import app

            _load(entry)
            whole = typer.main.get_command(app)
            self.commands[args[0]] = whole.commands[args[0]]  # type: ignore[attr-defined]
        return super().resolve_command(ctx, args)


def _line(name: str) -> TyperCommand:
    return TyperCommand(name, help=COMMANDS[name].summary)


def _load(entry: CommandEntry) -> None:
    importlib.import_module(f"patcher.commands.{entry.module}")
