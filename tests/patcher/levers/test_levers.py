"""The user's levers: which prompt gets what, and what is refused before anything is paid for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from patcher.bench import UsageError
from patcher.levers.load import LARGEST, LARGEST_FILE, Levers, before_task, load_levers
from patcher.models import Role
from patcher.settings import Settings, example_file, resolve

OP = "fused_add_rms_norm"
OURS = "# Contract\nwords\n\n# Your task\nWrite it.\n"
FILE = """
[tripwires]
banned = ['\\bgoto\\b']

[tripwires.ops.rope]
banned = ['\\bsinf?\\b']
required = ['rotate']

[[prompts]]
append = "Prefer 128-bit loads."
agents = ["generate"]

[[prompts]]
append_file = "late.md"
iterations = "3-"

[[prompts]]
override = "Before.\\n{{ prompt }}\\nAfter."
agents = ["analyse"]
iterations = [0, 2]
ops = ["rope"]

[[auxiliary]]
file = "vendor/helpers.cuh"
says = "Our reductions."
iterations = "0-1"

[score]
script = "score.py"
timeout_s = 5
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "patcher.toml").write_text(FILE)
    (tmp_path / "late.md").write_text("It is late.\n")
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor/helpers.cuh").write_text("float sum(float x); // ```\n")
    (tmp_path / "score.py").write_text("print()")
    return tmp_path


def settings_of(folder: Path, **flags: Any) -> Settings:
    return resolve(flags, environ={}, folder=folder)


def levers_of(folder: Path) -> Levers:
    return load_levers(settings_of(folder).for_run(), folder)


def test_each_lever_is_pulled_where_it_says(folder: Path) -> None:
    levers = levers_of(folder)
    more = levers.extra(OP, "generate", 1, memory="- You cannot fly.")
    assert more == (
        "# A source of the user's: `helpers.cuh`\nOur reductions.\n"
        "````cuh\nfloat sum(float x); // ```\n````\n\n"
        "# What earlier runs learned\n- You cannot fly."
    )
    assert levers.extra(OP, "generate", 2) == ""
    rules = "# The user's rules\nRegular expressions over the source without its comments:\n"
    first = levers.adapt(OP, "generate", 0, OURS)
    assert first == (
        f"# Contract\nwords\n\n{rules}- It must not match `\\bgoto\\b`.\n\n"
        "# Your task\nWrite it.\n\nPrefer 128-bit loads.\n"
    )
    later = levers.adapt(OP, "generate", 3, OURS)
    assert later.endswith("Prefer 128-bit loads.\n\nIt is late.\n")
    assert levers.adapt(OP, "analyse", 2, OURS) == OURS, "no lever, not a byte changed"


def test_an_override_may_hold_our_prompt(folder: Path) -> None:
    levers = levers_of(folder)
    assert levers.adapt("rope", "analyse", 2, OURS) == f"Before.\n{OURS}\nAfter."
    assert levers.adapt("rope", "analyse", 1, OURS) == OURS
    (folder / "patcher.toml").write_text('[[prompts]]\noverride = "Nothing else."\n')
    roles: tuple[Role, ...] = ("generate", "analyse", "diagnose")
    for role in roles:
        assert levers_of(folder).adapt(OP, role, 0, OURS) == "Nothing else."


def test_patterns_of_one_op_add_to_those_of_all(folder: Path) -> None:
    tripwires = settings_of(folder).tripwires
    assert tripwires.for_op(OP).banned == (r"\bgoto\b",)
    assert tripwires.for_op("rope").banned == (r"\bgoto\b", r"\bsinf?\b")
    assert tripwires.for_op("rope").required == ("rotate",)
    text = levers_of(folder).adapt("rope", "generate", 9, OURS)
    assert "- It must match `rotate`." in text


def test_the_task_stays_last() -> None:
    text = "# Your task\nof an older one\n\n# Your task\nWrite.\n"
    assert before_task(text, "# More").endswith("one\n\n# More\n\n# Your task\nWrite.\n")
    assert before_task("no such heading\n", "# More") == "# More\n\nno such heading\n"


def test_what_files_held_is_what_the_run_keeps(folder: Path) -> None:
    kept = Levers.model_validate_json(levers_of(folder).model_dump_json())
    (folder / "late.md").write_text("changed")
    (folder / "vendor/helpers.cuh").unlink()
    assert "It is late." in kept.adapt(OP, "generate", 3, OURS)
    assert "float sum" in kept.extra(OP, "generate", 0)
    assert len(kept.auxiliary[0].digest) == 64
    assert str(folder) not in kept.model_dump_json()


def test_origins_are_told(folder: Path) -> None:
    origins = settings_of(folder).origins
    assert {origins[name] for name in ("prompts", "auxiliary", "score", "tripwires")} == {
        "patcher.toml"
    }
    given = resolve(environ={"PATCHER_PROMPTS": '[{"append": "x"}]', "PATCHER_MEMORY": "off"})
    assert given.prompts[0].append == "x"
    assert (given.memory, given.origins["prompts"]) == ("off", "PATCHER_PROMPTS")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[[prompts]]\nagents = ["generate"]\n', "give one of append"),
        ('[[prompts]]\nappend = "a"\noverride = "b"\n', "give one of append"),
        ('[[prompts]]\nappend = "a"\nagents = ["boss"]\n', r"prompts\.0\.agents"),
        ('[[prompts]]\nappend = "a"\niterations = "soon"\n', r"prompts\.0\.iterations"),
        ('[[prompts]]\nappend = "a"\niterations = -1\n', r"prompts\.0\.iterations"),
        ('[[prompts]]\nappend = "a"\niterations = "4-2"\n', r"prompts\.0\.iterations"),
        ('[[prompts]]\nappend = "a"\nops = ["nope"]\n', "unknown op 'nope'"),
        ('[[prompts]]\nappned = "a"\n', r"prompts\.0"),
        ("[tripwires.ops.nope]\nbanned = []\n", "unknown op 'nope'"),
        ("[tripwires.ops.rope]\nbanned = ['(']\n", "no regular expression|not a regular"),
        ('[score]\nscript = "s.py"\ntimeout_s = 0\n', r"score\.timeout_s"),
    ],
)
def test_a_wrong_lever_is_one_clear_error(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "patcher.toml").write_text(text)
    with pytest.raises(UsageError, match=problem) as caught:
        settings_of(tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "content", "problem"),
    [
        ('[[auxiliary]]\nfile = "x"\n', None, "cannot read x: No such file"),
        ('[[auxiliary]]\nfile = "."\n', None, r"\. is no file"),
        ('[[auxiliary]]\nfile = "x"\n', b"a" * (LARGEST_FILE + 1), "65,537 bytes"),
        ('[[auxiliary]]\nfile = "x"\n', b"\xff\xfe", "not UTF-8"),
        ('[[prompts]]\nappend_file = "x"\n', None, "cannot read x"),
        ('[score]\nscript = "x"\n', None, "cannot read x"),
        ('[[auxiliary]]\nfile = "x"\n' * 5, b"a" * LARGEST_FILE, f"at most {LARGEST:,}"),
        ('[[auxiliary]]\nfile = "x"\n', b"key = 'swordfish-swordfish'", "value of SOME_API_KEY"),
    ],
)
def test_a_file_that_cannot_be_sent_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    content: bytes | None,
    problem: str,
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "swordfish-swordfish")
    (tmp_path / "patcher.toml").write_text(text)
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(UsageError, match=problem) as caught:
        levers_of(tmp_path)
    assert "swordfish" not in caught.value.message + caught.value.hint


def test_settings_of_older_runs_have_no_levers() -> None:
    assert load_levers({"model": "anthropic"}) == Levers()


def test_the_whole_example_is_json_too(folder: Path) -> None:
    settings = settings_of(folder).for_run()
    assert json.loads(json.dumps(settings)) == settings
    assert resolve(environ={"PATCHER_SCORE": json.dumps(settings["score"])}).score is not None


def test_the_example_holds_every_setting_and_works(tmp_path: Path) -> None:
    text = example_file()
    (tmp_path / "patcher.toml").write_text(text)
    for name in ("prompts/analyst.md", "vendor/reductions.cuh", "score.py"):
        assert f'"{name}"' in text
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x {{ prompt }} y")
    settings = settings_of(tmp_path)
    assert set(settings.origins.values()) == {"patcher.toml"}, "each setting has its example"
    levers = levers_of(tmp_path)
    assert levers.adapt(OP, "analyse", 3, OURS) == f"x {OURS} y"
    assert "reductions.cuh" in levers.extra("rope", "generate", 1)
