"""Ops of a user's that are wrong: the file is named, no kernel is blamed, other ops stay."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from patcher.bench import Op, UsageError, load_op, load_ops, op_problems
from patcher.bench.judge.cases import Case, expect, make_inputs, planted, shapes_tried
from patcher.bench.judge.regimes import require_seeded
from patcher.cli import main

SCALED_ADD = Path(__file__).parents[2] / "data/ops/scaled_add"


def copy_of(folder: Path, name: str = "scaled_add") -> Path:
    """A copy of `scaled_add` under another name."""
    shutil.copytree(SCALED_ADD, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    edit(folder / name / "op.toml", 'name = "scaled_add"', f'name = "{name}"')
    return folder / name


def edit(file: Path, before: str, after: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert before in text
    file.write_text(text.replace(before, after, 1), encoding="utf-8")


def judged(op: Op) -> None:
    """What the judge asks of an op before it compares a kernel with it."""
    [point, *_] = op.sweep("cpu").points()
    require_seeded(op, shapes_tried(op, op.sweep("cpu")), "cpu")
    case = Case(point, "normal", 3, tuple(each.value for each in op.contract.scalars))
    inputs = make_inputs(op, case, "cpu")
    expect(op, case, inputs)
    planted(op, case, inputs)


def test_a_sound_op_passes(tmp_path: Path) -> None:
    judged(Op(copy_of(tmp_path)))


@pytest.mark.parametrize(
    ("file", "added", "said"),
    [
        ("reference.py", "def (", "SyntaxError"),
        ("reference.py", "1 / 0", "ZeroDivisionError"),
        ("reference.py", "del control", "defines no control"),
        ("reference.py", "def reference(**given): 1 / 0", "reference in .* ZeroDivisionError"),
        ("reference.py", "def control(**given): 1 / 0", "control in .* ZeroDivisionError"),
        ("reference.py", "def reference(**given): pass", "reference gives a NoneType"),
        ("reference.py", "def control(**given): return {'o': 1}", "control gives no out, but o"),
        (
            "reference.py",
            "def reference(**given): return {'out': given['x'].double() * float('nan')}",
            "reference gives NaN in out on normal inputs",
        ),
        (
            "reference.py",
            "old = reference\n\ndef reference(**a): return {'out': old(**a)['out'].float()}",
            "reference gives out in float32",
        ),
        ("inputs.py", "del REGIMES", "defines no REGIMES"),
        ("inputs.py", "def make(*given): 1 / 0", "make in .* ZeroDivisionError"),
        ("inputs.py", "def make(*given): return {}", "make gives nothing, not a tensor for x"),
        (
            "inputs.py",
            "old = make\n\ndef make(*a): return {k: v[:-1] for k, v in old(*a).items()}",
            "and the contract says",
        ),
        (
            "inputs.py",
            "old = make\n\ndef make(*a): return {k: v.double() for k, v in old(*a).items()}",
            "as float64",
        ),
        (
            "inputs.py",
            "old = make\n\ndef make(*a): return old(*a) | "
            "{'x': torch.randn_like(old(*a)['x'].float()).to(old(*a)['x'])}",
            "another x for the same seed",
        ),
        ("baselines.py", "def (", "SyntaxError"),
        ("baselines.py", "BASELINES = {}", "not among its BASELINES: none"),
        ("baselines.py", "BASELINES[ACCURACY_BASELINE] = lambda device: lambda *a: 1 / 0", "Zero"),
        (
            "baselines.py",
            "BASELINES[ACCURACY_BASELINE] = lambda device: lambda *a: a[0] + 1",
            "returns a tensor of its own",
        ),
        (
            "baselines.py",
            "BASELINES[ACCURACY_BASELINE] = lambda device: lambda *a: (a[0][:1],)",
            "returns shapes",
        ),
    ],
)
def test_what_is_wrong_in_a_file_of_an_op_is_said_with_its_name(
    tmp_path: Path, file: str, added: str, said: str
) -> None:
    folder = copy_of(tmp_path)
    path = folder / file
    path.write_text(f"{path.read_text(encoding='utf-8')}\n{added}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=said) as caught:
        judged(Op(folder))
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_a_file_that_is_missing_is_said(tmp_path: Path) -> None:
    folder = copy_of(tmp_path)
    (folder / "inputs.py").unlink()
    with pytest.raises(UsageError, match=r"inputs\.py is missing"):
        judged(Op(folder))


def test_inputs_come_in_the_contracts_order(tmp_path: Path) -> None:
    folder = copy_of(tmp_path)
    path = folder / "inputs.py"
    turned = "old = make\n\ndef make(*a): return dict(reversed(old(*a).items()))\n"
    path.write_text(path.read_text(encoding="utf-8") + turned, encoding="utf-8")
    op = Op(folder)
    [point, *_] = op.sweep("cpu").points()
    made = make_inputs(op, Case(point, "normal", 3, ()), "cpu")
    assert list(made) == [tensor.name for tensor in op.contract.tensors]
    assert all(isinstance(value, torch.Tensor) for value in made.values())


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("schema_version = 1", "schema_version = 9", "9 is not 1"),
        ('name = "mine"', 'name = "../mine"', "cannot be the name of a function"),
        ('name = "out"', 'name = "x"', "two of its arguments are named x"),
        ("schema_version = 1", "schema_version = [", "not a valid contract"),
        ("schema_version = 1", "schema_version = 'one'", "schema_version"),
        ("", '[[symbols]]\npattern = "("\n', "is no regular expression"),
    ],
)
def test_a_broken_contract_leaves_other_ops_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, said: str
) -> None:
    folder = tmp_path / "öps and more"
    copy_of(folder, "sound")
    file = copy_of(folder, "mine") / "op.toml"
    if before:
        edit(file, before, after)
    else:
        file.write_text(file.read_text(encoding="utf-8") + after, encoding="utf-8")
    monkeypatch.setenv("PATCHER_OPS", str(folder))
    assert load_op("sound").folder == folder / "sound"
    assert "rms_norm" in load_ops()
    [(place, _)] = op_problems().items()
    assert place == file.parent
    with pytest.raises(UsageError, match=said) as caught:
        load_op("mine")
    assert str(file) in caught.value.message


def test_an_unreadable_contract_leaves_other_ops_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_of(tmp_path, "sound")
    for name in ("folder", "loop", "pipe", "latin"):
        (copy_of(tmp_path, name) / "op.toml").unlink()
    (tmp_path / "folder/op.toml").mkdir()
    (tmp_path / "loop/op.toml").symlink_to("op.toml")
    os.mkfifo(tmp_path / "pipe/op.toml")
    (tmp_path / "latin/op.toml").write_bytes(b"# \xff\n")
    (copy_of(tmp_path, "bare") / "baselines.py").unlink()
    (tmp_path / "self").symlink_to("self")
    monkeypatch.setenv("PATCHER_OPS", str(tmp_path))
    for name in ("folder", "loop", "pipe", "latin"):
        with pytest.raises(UsageError) as caught:
            load_op(name)
        assert str(tmp_path / name / "op.toml") in caught.value.message
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("sys.argv", ["patcher", "ops"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    table = capsys.readouterr().out
    assert "sound" in table
    assert "rms_norm" in table
    assert "is missing" in table


def test_a_broken_op_does_not_fall_back_to_the_librarys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(copy_of(tmp_path, "rms_norm") / "op.toml", "schema_version = 1", "schema_version = 2")
    monkeypatch.setenv("PATCHER_OPS", str(tmp_path))
    with pytest.raises(UsageError, match="2 is not 1"):
        load_op("rms_norm")
    assert "rms_norm" not in load_ops()
