"""Writes `reference/cli.md` from the commands themselves, so that it never lags behind them.

MkDocs calls `on_files` before it reads the pages (`hooks:` in mkdocs.yml). The page follows the
panels, the order and the help texts that `patcher --help` shows.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from patcher import cli
from patcher.commands.index import load_all

PAGE = "reference/cli.md"
_MARKUP = re.compile(r"\[/?(?:bold|dim|italic|green|red|yellow|cyan|blue)\]")
"""Rich's markup, which help texts may hold."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to those of the site."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """The reference as Markdown."""
    load_all()
    root = typer.main.get_command(cli.app)
    context = root.make_context("patcher", [], resilient_parsing=True)
    lines = [
        "# Command line",
        "",
        "This page is generated from the commands. `patcher COMMAND --help` prints the same.",
        "",
        *_paragraphs(root.epilog or ""),
    ]
    for panel, commands in _panels(root):
        lines += [f"## {panel}", ""]
        lines += [f"- [`patcher {name}`](#patcher-{name}): {_first(it)}" for name, it in commands]
        lines.append("")
        for name, command in commands:
            lines += _command(command, name, context)
    return "\n".join(lines)


def _panels(root: Any) -> list[tuple[str, list[tuple[str, Any]]]]:
    """The visible commands by panel, both in the order of `patcher --help`."""
    panels: dict[str, list[tuple[str, Any]]] = {}
    for name, command in root.commands.items():
        if not command.hidden:
            panels.setdefault(_panel(command, "Commands"), []).append((name, command))
    return list(panels.items())


def _panel(item: Any, otherwise: str) -> str:
    name = getattr(item, "rich_help_panel", None)
    return name if isinstance(name, str) and name else otherwise


def _command(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True, parent=parent)
    yield from (f"### {context.command_path} {{ #{context.command_path.replace(' ', '-')} }}", "")
    usage = " ".join(command.get_usage(context).removeprefix("Usage:").split())
    yield from ("```console", f"$ {usage}", "```", "")
    yield from _paragraphs(command.help or "")
    for inner, one in getattr(command, "commands", {}).items():
        if not one.hidden:
            yield from _command(one, inner, context)
    by_panel: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            by_panel.setdefault(_panel(parameter, kind), []).append(record)
    for panel, records in by_panel.items():
        yield from _table(panel, records)
    yield from _paragraphs(command.epilog or "")


def _table(panel: str, records: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield from (f"| {panel} | |", "| --- | --- |")
    for names, text in records:
        yield f"| <code>{_cell(html.escape(names))}</code> | {_cell(_plain(text))} |"
    yield ""


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs as they are; a run of examples (lines that begin with `$`) as one block."""
    examples: list[str] = []
    for block in re.split(r"\n\s*\n", text.replace("\b", "")):
        words = " ".join(_MARKUP.sub("", block).split())
        if words.startswith("$ "):
            examples.append(words)
            continue
        if examples:
            yield from ("```console", *examples, "```", "")
            examples = []
        if words:
            yield from (f"**{words}**" if words == "Examples" else _plain(words), "")
    if examples:
        yield from ("```console", *examples, "```", "")


def _first(command: Any) -> str:
    return _plain(re.split(r"\n\s*\n", command.help or "")[0])


def _plain(text: str) -> str:
    """Help text as Markdown: no markup of Rich, nothing that Markdown would take for its own."""
    pieces = re.split(r"(`[^`]*`)", " ".join(_MARKUP.sub("", text).split()))
    return "".join(
        piece if index % 2 else re.sub(r"([\\*_<>\[\]])", r"\\\1", piece)
        for index, piece in enumerate(pieces)
    )


def _cell(text: str) -> str:
    return text.replace("|", "&#124;")
