"""The strongest baseline: what is remembered of it, and what is tried again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from patcher.bench import Candidate, Evaluation, Language, Outcome
from patcher.bench.judge import JudgeSettings, evaluate
from patcher.bench.judge.baselines import Strongest
from patcher.bench.judge.evaluation import BaselineTime
from patcher.show.evaluation import evaluation_table

OPS = Path(__file__).parents[2] / "data/ops"
TRUE = """
def scaled_add(x, y, out, scale):
    out.copy_(x.float() + scale * y.float())
"""
MORE = '''

def fragile(device: str) -> Baseline:
    """Fails until the file beside it is gone, as a compiler does on a full disk."""
    from pathlib import Path

    if Path(__file__).with_name("full").exists():
        raise OSError("no space is left")
    return _eager


def absent(device: str) -> Baseline:
    import no_such_package

    return no_such_package.run


BASELINES |= {"fragile": fragile, "absent": absent}
'''


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An op with a baseline that fails at first, and one that is not installed."""
    folder = tmp_path / "ops/scaled_add"
    shutil.copytree(OPS / "scaled_add", folder)
    with (folder / "baselines.py").open("a", encoding="utf-8") as file:
        file.write(MORE)
    (folder / "full").touch()
    monkeypatch.setenv("PATCHER_OPS", str(tmp_path / "ops"))
    monkeypatch.setenv("PATCHER_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def judged() -> Callable[[], Evaluation]:
    def run() -> Evaluation:
        settings = JudgeSettings(device="cpu", pairs=2, points=1, calls=1, lives_s=0)
        candidate = Candidate(op="scaled_add", language=Language.TORCH, source=TRUE)
        return evaluate(candidate, settings)

    return run


def test_what_failed_is_tried_again_and_said(op: Path, judged: Callable[[], Evaluation]) -> None:
    first = judged()
    assert first.failed_baselines == ("fragile",)
    assert str(first.baselines["fragile"]) == "failed: OSError: no space is left"
    assert not first.baselines["absent"].installed
    assert "not against fragile, which failed here" in str(evaluation_table(first).title)
    (op / "full").unlink()
    again = judged()
    assert again.baselines["fragile"].time_us is not None
    assert again.failed_baselines == ()
    assert str(again.baselines["absent"]).startswith("not here")
    assert "which failed here" not in str(evaluation_table(again).title)


def test_what_was_timed_under_load_is_timed_again(
    op: Path, judged: Callable[[], Evaluation], tmp_path: Path
) -> None:
    judged()
    [file] = (tmp_path / "cache/strongest").glob("*.json")
    kept = Strongest.model_validate_json(file.read_text())
    slow = dict.fromkeys(kept.times_us, 1e9)
    loaded = kept.model_copy(update={"times_us": slow, "disturbed": ("eager",)})
    file.write_text(loaded.model_dump_json())
    time_us = judged().baselines["eager"].time_us
    assert time_us is not None
    assert time_us < 1e6
    file.write_text(file.read_text()[:40])
    assert judged().baselines["eager"].time_us is not None, "a damaged file is measured anew"


def test_only_what_is_settled_is_left_alone() -> None:
    known = Strongest(
        name="a",
        times_us={"a": 1.0, "b": 2.0},
        missing={"c": "not here: c"},
        failed={"d": "OSError"},
        disturbed=("b",),
    )
    assert known.settled == {"a", "c"}
    assert known.all()["d"] == BaselineTime(missing="failed: OSError", installed=True)


def test_a_whole_scalar_is_given_as_one_and_never_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ops/scaled_add"
    shutil.copytree(OPS / "scaled_add", folder)
    text = (folder / "op.toml").read_text(encoding="utf-8")
    changed = text.replace('type = "float"\nvalue = 0.5', 'type = "int"\nvalue = 3')
    assert changed != text
    (folder / "op.toml").write_text(changed, encoding="utf-8")
    monkeypatch.setenv("PATCHER_OPS", str(tmp_path / "ops"))
    monkeypatch.setenv("PATCHER_CACHE", str(tmp_path / "cache"))
    source = TRUE.replace("    out", "    assert (scale, type(scale)) == (3, int)\n    out")
    settings = JudgeSettings(device="cpu", pairs=2, points=1, calls=1, lives_s=0)
    found = evaluate(Candidate(op="scaled_add", language=Language.TORCH, source=source), settings)
    assert found.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW), found.detail
