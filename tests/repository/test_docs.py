"""What the documentation shows exists, and what it says to run does run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from command_line import patcher
from local_server import local_server

from patcher import cli
from patcher.commands.index import load_all

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`(patcher [^`\n]+)`(?!`)")
TITLE = re.compile(r'title="([^"]+)"')


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def shown_commands(text: str) -> Iterator[list[str]]:
    """The words after `patcher` of each command in blocks of commands and in code spans."""
    lines = [
        line
        for fence in FENCE.finditer(text)
        if fence["info"] in ("", "console")
        for line in fence["text"].splitlines()
    ]
    for line in [*lines, *SPAN.findall(FENCE.sub("", text))]:
        for part in re.split(r"&&|\|", line.removeprefix("$ ")):
            words = shlex.split(part, comments=True) if part.count("'") % 2 == 0 else []
            while words and re.fullmatch(r"[A-Z_]+=.*|ssh|gpu", words[0]):
                words = words[1:]
            if words and Path(words[0]).name == "patcher" and len(words) > 1:
                yield words[1:]


@cache
def commands() -> Any:
    load_all()
    return typer.main.get_command(cli.app)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_options_that_a_page_shows_exist(page: Path) -> None:
    for words in shown_commands(page.read_text(encoding="utf-8")):
        command = commands()
        names = []
        while words and hasattr(command, "commands") and words[0] in command.commands:
            command = command.commands[words[0]]
            names.append(words[0])
            words = words[1:]
        shown = f"patcher {' '.join([*names, *words])}"
        known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
        if not names:
            assert words[0] == "COMMAND" or words[0] in known, shown
        known |= {"--help"}
        options = {word.partition("=")[0] for word in words if re.match(r"--\w", word)}
        assert options <= known, shown


def test_commands_are_found_where_pages_show_them() -> None:
    text = "```console\n$ A=b patcher ops show X --json   # why\n```\nand `patcher run M --op X`.\n"
    assert list(shown_commands(text)) == [["ops", "show", "X", "--json"], ["run", "M", "--op", "X"]]
    assert sum(len(list(shown_commands(page.read_text()))) for page in PAGES) > 60


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == ROOT], ids=page_id)
def test_links_of_the_pages_at_the_top_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links or page.name == "SECURITY.md"
    for link in links:
        if not link.startswith(("http://", "https://")):
            assert (ROOT / link.partition("#")[0]).exists(), link


def test_every_command_and_option_is_in_the_reference() -> None:
    pytest.importorskip("mkdocs", reason="pip install '.[docs]'")
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/hooks/cli_reference.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = hook.page()

    def visit(command: Any, name: str) -> None:
        assert f"### {name} {{" in page
        for parameter in command.params:
            shown = parameter.opts if parameter.param_type_name == "option" else []
            assert all(f"{option}" in page for option in shown if not parameter.hidden)
        for inner, one in getattr(command, "commands", {}).items():
            if not one.hidden:
                visit(one, f"{name} {inner}")

    for name, command in commands().commands.items():
        if not command.hidden:
            visit(command, f"patcher {name}")


@pytest.mark.slow
def test_the_op_of_the_tutorial_is_judged_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs/tutorials/write-an-op.md").read_text(encoding="utf-8")
    for fence in FENCE.finditer(page):
        if title := TITLE.search(fence["info"]):
            file = tmp_path / title[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(fence["text"], encoding="utf-8")
    (tmp_path / "my_ops/silu_mul/solutions").mkdir()
    source = tmp_path / "silu_mul.cpp"
    broken = tmp_path / "broken.cpp"
    broken.write_text(source.read_text().replace("(1.0f + exp", "(1.001f + exp"))
    assert broken.read_text() != source.read_text()

    def judged(file: Path) -> dict[str, Any]:
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "patcher", "evaluate", "silu_mul", str(file)),
                *("--baseline", "eager", "--pairs", "3", "--json"),
            ],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PATCHER_OPS": str(tmp_path / "my_ops")},
            cwd=tmp_path,
            timeout=300,
        )
        assert done.stdout, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    # values are compared first; with so few pairs a busy machine makes an honest clock doubtful
    failed = {check["name"] for check in judged(source)["checks"] if not check["passed"]}
    assert failed <= {"clocks"}
    assert judged(broken)["outcome"] == "mismatch"


@pytest.mark.slow
def test_the_local_model_of_the_tutorial_runs_a_loop_unattended(tmp_path: Path) -> None:
    """A double stands for the server: what it answers is no model's. The command is the page's."""
    page = (ROOT / "docs/tutorials/local-model.md").read_text(encoding="utf-8")
    [entry] = [fence for fence in FENCE.finditer(page) if 'title="patcher.toml"' in fence["info"]]
    [words] = [words for words in shown_commands(page) if words[0] == "optimize"]
    [served] = re.findall(r"llama_cpp.server .*--port (\d+)", page)
    right = (ROOT / "kernels/silu_and_mul/solutions/cpu_simd/silu_and_mul.cpp").read_text()
    replies = [f"The form.\n```cpp\n{right.split('#include')[0]}```\n", f"```cpp\n{right}```\n"]
    words[words.index("--iterations") + 1] = "2"
    env = {"PATCHER_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    with local_server(replies) as server:
        config = entry["text"].replace(f"http://localhost:{served}/v1", server.url)
        assert server.url in config
        (tmp_path / "patcher.toml").write_text(config, encoding="utf-8")
        assert "qwen2.5-coder-1.5b" in patcher("models", cwd=tmp_path, env=env).stdout
        done = patcher(*words, "--json", cwd=tmp_path, env=env)
        for _ in range(3):  # what other programs disturbed is judged again
            if "this machine is too busy" in done.stderr:
                done = patcher("resume", "latest", "--json", cwd=tmp_path, env=env)
    assert done.returncode in (0, 1), done.stderr
    assert [asked["messages"][0]["content"][:9] for asked in server.seen] == 2 * ["You write"]
    for asked in server.seen:
        assert (asked["stream"], asked["temperature"]) == (False, 0.7)
        assert asked["max_tokens"] == 1200
    assert "holds a comment and no code" in server.seen[1]["messages"][1]["content"]
    [folder] = tmp_path.glob("patcher-runs/*/ops/silu_and_mul")
    first, second = (
        json.loads((folder / str(n) / "attempt.json").read_text(encoding="utf-8")) for n in (0, 1)
    )
    assert first["outcome"] == "generation_failure"
    assert second["digest"]
    assert second["usage"] == {
        "input_tokens": 3000,
        "output_tokens": len(replies[1]) // 4,
        "cached_tokens": None,
        "cost_usd": 0.0,
    }
    assert first["repairs"] == second["repairs"] == []
    shown = patcher("status", "latest", "--json", cwd=tmp_path, env=env)
    ledger = json.loads(shown.stdout)["ledger"]
    assert (ledger["calls"], ledger["unknown"]["tokens"]) == (2, 0)
    assert ledger["used"]["tokens"] == 6000 + sum(len(reply) // 4 for reply in replies)
