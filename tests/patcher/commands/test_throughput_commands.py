"""`patcher throughput`: its commands, and the spelling that they had before."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import typer
from command_line import patcher
from typer.testing import CliRunner

from patcher.bench import UsageError
from patcher.commands.console import app
from patcher.commands.option_groups import OptionGroup, grouped
from patcher.commands.throughput import throughput_app
from patcher.commands.throughput_spelling import new_spelling

GROUP: Any = typer.main.get_command(throughput_app)


def options_of(name: str) -> set[str]:
    return {option for one in GROUP.commands[name].params for option in one.opts} | {"--help"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("m --patch p", "compare m --patch p"),
        ("--patch p m --batch=8", "compare m --patch p --batch=8"),
        (
            "m --patch p --elsewhere --alone --json",
            "compare m --patch p --elsewhere --alone --json",
        ),
        ("m --patch p --patch q --best-set", "best-set m --patch p --patch q"),
        ("m --patch p --tune-baseline", "compare m --patch p --tune-baseline"),
        ("m --engine vllm --tune-baseline --out f", "tune m --engine vllm --out f"),
        ("m --tune-baseline --margin-pct 1 --also-batch 1", "tune m --also-batch 1"),
        ("m --self-test --pairs 200", "self-test m --pairs 200"),
        ("m --self-test --best-set", "self-test m"),
        ("m --from s.jsonl", "decide s.jsonl --model m"),
        ("m --from=s.jsonl --report r --batch 8", "decide s.jsonl --model m"),
        (
            "m --from v.json --patch p --report r --margin-pct 1",
            "decide v.json --model m --patch p --report r --margin-pct 1",
        ),
        ("m --patch p --unheard-of 3", "compare m --patch p --unheard-of 3"),
        ("m --help", "compare m --help"),
    ],
)
def test_the_old_spelling_is_understood(old: str, new: str) -> None:
    assert new_spelling(old.split(), options_of) == new.split()


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("m", "nothing to compare"),
        ("m --best-set", "nothing to compare"),
        ("m --patch p --self-test", "several things to do"),
        ("m --from f --self-test", "several things to do"),
        ("m --from f --patch p --best-set", "several things to do"),
        ("m --self-test --report r", "a report is of one verdict"),
        ("m --patch p --best-set --profile x", "a report is of one verdict"),
        ("m --self-test --alone", "a process for each arm"),
        ("m --patch p --best-set --alone", "a process for each arm"),
        ("m --tune-baseline --tuned f", "a search, and what one found"),
    ],
)
def test_what_could_not_be_asked_still_cannot(old: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        new_spelling(old.split(), options_of)


def test_a_hint_names_only_what_was_given(tmp_path: Path) -> None:
    where = ("gpt-oss-tiny", "--engine", "transformers", "--device", "cpu")
    found = CliRunner().invoke(app, ["throughput", "tune", *where])
    assert isinstance(found.exception, UsageError)
    assert found.exception.hint == "choose another --engine: vllm"
    more = ("--engine-arg", "max_num_seqs=8")
    found = CliRunner().invoke(app, ["throughput", "self-test", *where, *more])
    assert isinstance(found.exception, UsageError)
    assert "--tuned" not in found.exception.hint


@pytest.mark.parametrize("command", ["compare", "tune"])
@pytest.mark.parametrize("option", ["--trace", "--concurrency", "--rate", "--port", "--with"])
def test_what_is_of_a_client_needs_one(command: str, option: str) -> None:
    patch = ("--patch", "p") if command == "compare" else ()
    words = ["throughput", command, "gpt-oss-tiny", "--engine", "vllm", *patch, option, "1"]
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, UsageError)
    assert f"{option} " in found.exception.message.replace(",", "")
    assert "--client" in found.exception.hint


def test_every_option_of_before_is_known_to_its_command() -> None:
    shared = {"--engine", "--device", "--batch", "--input-len", "--output-len", "--weights"}
    shared |= {"--preset", "--threads", "--lock-mhz", "--engine-arg", "--out", "--json"}
    size = {"--pairs", "--processes", "--margin-pct", "--quality-steps"}
    others = {"--elsewhere", "--also-batch", "--also-context"}
    page = {"--report", "--profile", "--patched-profile"}
    baseline = {"--tune-baseline", "--tuned", "--patch"}
    served = {"--client", "--trace", "--concurrency", "--port"}
    own = served | {"--quick"}
    assert options_of("compare") > shared | size | others | page | baseline | own
    assert options_of("compare-engines") > served | {"--engine", "--processes", "--report"}
    assert options_of("best-set") > shared | size | others | baseline
    assert options_of("tune") > shared | others
    assert options_of("self-test") > shared | size
    assert options_of("decide") > page | {"--patch", "--model", "--margin-pct", "--out", "--json"}


def test_a_line_on_stderr_names_the_new_spelling_and_the_document_stays(tmp_path: Path) -> None:
    lines = [
        json.dumps({"pair": pair, "arm": arm, "tokens_per_s": speed + pair / 1e3})
        for pair in range(20)
        for arm, speed in (("baseline", 100.0 + pair % 3), ("patched", (100.0 + pair % 3) * 1.02))
    ]
    (tmp_path / "s.jsonl").write_text("\n".join(lines))
    old = patcher("throughput", "gpt-oss-20b", "--from", "s.jsonl", "--json", cwd=tmp_path)
    new = patcher("throughput", "decide", "s.jsonl", "--json", cwd=tmp_path)
    assert old.returncode == new.returncode == 0
    assert json.loads(old.stdout) == json.loads(new.stdout)
    assert old.stderr.splitlines() == [
        "new spelling: patcher throughput decide s.jsonl --model gpt-oss-20b --json"
    ]
    assert not new.stderr
    page = patcher("throughput", "decide", "s.jsonl", "--report", "r", cwd=tmp_path)
    assert page.returncode == 2
    assert "a report is of one verdict" in page.stderr


@dataclass(frozen=True)
class Colours(OptionGroup):
    PANEL: ClassVar[str] = "Colours"

    shade: Annotated[int, typer.Option("--shade", help="How dark.", min=0)] = 3
    names: Annotated[list[str] | None, typer.Option("--name")] = None


def test_options_of_a_group_come_as_one_parameter() -> None:
    seen: list[tuple[str, Colours, bool]] = []
    app = typer.Typer()

    @app.command()
    @grouped
    def paint(
        wall: str, colours: Colours, twice: Annotated[bool, typer.Option("--twice")] = False
    ) -> int:
        """Paint a wall."""
        seen.append((wall, colours, twice))
        return 0

    assert [*inspect.signature(paint).parameters] == ["wall", "shade", "names", "twice"]
    runner = CliRunner()
    assert runner.invoke(app, ["north", "--name", "a", "--name", "b", "--twice"]).exit_code == 0
    assert runner.invoke(app, ["south", "--shade", "5"]).exit_code == 0
    assert runner.invoke(app, ["south", "--shade", "-1"]).exit_code == 2
    assert seen[0] == ("north", Colours(names=["a", "b"]), True)
    assert seen[1] == ("south", Colours(shade=5), False)
    assert "Colours" in runner.invoke(app, ["--help"]).stdout
