"""A workspace for an agent from outside: what it holds, what may be touched, what is found out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from patcher import bench
from patcher.bench import Language, UsageError, VerificationError
from patcher.bench.judge import TripwirePolicy
from patcher.bench.toolchains import cache_root, toolchain
from patcher.cli import app
from patcher.judges.worker import Worker
from patcher.workspace import (
    RESULTS,
    OpenWorkspace,
    attempt,
    lay_out,
    open_workspace,
    parse,
    starting_point,
)

OPS = bench.load_ops()
OP = OPS["fused_add_rms_norm"]
GOOD = next(candidate for info, candidate in OP.solutions() if info.name == "cpu_simd").source
BROKEN = "void fused_add_rms_norm() { broken }\n"


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], OpenWorkspace]]:
    """Workspaces with three results, made once and copied: they share the judge's copy."""
    made = lay_out(OP, tmp_path_factory.mktemp("made") / "task", Language.CPP, threads=1)
    (made.folder / made.workspace.file).write_text(BROKEN)
    for _ in range(3):
        attempt(made, "compile", lambda *_: None)
    copy = cache_root() / "workspaces" / f"{genesis_of(made.folder)}.jsonl"
    kept = copy.read_bytes()

    def copied(target: Path) -> OpenWorkspace:
        copy.write_bytes(kept)
        shutil.copytree(made.folder, target)
        return open_workspace(target)

    yield copied
    copy.unlink()


def genesis_of(folder: Path) -> str:
    return hashlib.sha256((folder / "workspace.json").read_bytes()).hexdigest()


def test_a_workspace_has_all_that_an_agent_needs(tmp_path: Path) -> None:
    opened = lay_out(OP, tmp_path / "task", Language.CPP)
    folder = opened.folder
    protected = {"SKILL.md", "op.toml", "reference.py", "compile", "verify", "profile"}
    assert set(opened.workspace.protected) == protected
    others = {"workspace.json", RESULTS, "fused_add_rms_norm.cpp"}
    assert {path.name for path in folder.iterdir()} == protected | others
    for name in {*protected, "workspace.json", RESULTS}:
        assert not (folder / name).stat().st_mode & 0o222, name
    assert os.access(folder / "compile", os.X_OK)
    assert (folder / "fused_add_rms_norm.cpp").stat().st_mode & 0o200
    assert (folder / "op.toml").read_bytes() == (OP.folder / "op.toml").read_bytes()
    skill = (folder / "SKILL.md").read_text()
    for words in ("# Rules", "# Workflow", "# Priorities", "# Success", "TensorView", "./profile"):
        assert words in skill
    example = (folder / "fused_add_rms_norm.cpp").read_text()
    assert example == toolchain(Language.CPP).example
    with pytest.raises(UsageError, match="not empty"):
        lay_out(OP, folder, Language.CPP)
    with pytest.raises(UsageError, match="only compiled here"):
        lay_out(OP, tmp_path / "another", Language.HIP)


def test_a_level_of_the_reward_that_an_op_cannot_give_is_said(tmp_path: Path) -> None:
    spec = f"exchange:{tmp_path}"
    lay_out(OPS["moe_matmul_down"], tmp_path / "task", Language.TRITON, judge=spec)
    skill = (tmp_path / "task/SKILL.md").read_text()
    assert "torch.compile cannot be held against here: the op has none" in skill


@pytest.mark.parametrize("name", OPS)
def test_the_starting_point_in_pytorch_is_right(name: str) -> None:
    op = OPS[name]
    kind = op.contract.sweeps[0].device
    scope: dict[str, Any] = {}
    exec(starting_point(op, Language.TORCH), scope)
    point = op.sweep(kind).points()[0]
    given = op.inputs.make(point, torch.Generator().manual_seed(3), "normal")
    scalars = {scalar.name: scalar.value for scalar in op.contract.scalars}
    before = {key: value.clone() for key, value in given.items()}
    wanted = op.reference(**before, **scalars)
    stays = op.kept(**before, **scalars)
    scope[name](**given, **scalars)
    for key, values in wanted.items():
        expected = values.to(before[key].dtype)
        if key in stays:
            expected = torch.where(stays[key], before[key], expected)
        assert torch.equal(given[key], expected)
    for tensor in op.contract.tensors:
        if tensor.access == "read":
            assert torch.equal(given[tensor.name], before[tensor.name])


def run(folder: Path, command: str, **env: str) -> tuple[int, dict[str, Any]]:
    result = subprocess.run(
        [folder / command, "--json"],
        cwd="/",
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, json.loads(result.stdout)


def test_the_commands_ask_the_judge_and_write_its_word_down(tmp_path: Path) -> None:
    """Real scripts; the judge of `profile` is a worker behind a folder."""
    spec = f"exchange:{tmp_path / 'jobs'}"
    opened = lay_out(OP, tmp_path / "a task", Language.CPP, threads=1, judge=spec)
    folder, kernel = opened.folder, opened.folder / "fused_add_rms_norm.cpp"
    kernel.write_text(BROKEN)
    code, told = run(folder, "compile")
    assert (code, told["line"]["reward"]["value"]) == (1, -1)
    assert "broken" in told["log"]
    kernel.write_text(GOOD)
    built = attempt(opened, "compile", lambda *_: None)
    assert (built.good, built.line.reward, built.line.built) == (True, None, True)

    kernel.write_text(BROKEN)
    code, told = run(folder, "profile")
    assert (code, told["error"]["kind"]) == (6, "waiting")
    assert "1 of 1" in told["error"]["message"]  # a wrong one needs no second
    assert len(list((tmp_path / "jobs" / "jobs").glob("[!.]*"))) == 2
    with Worker(tmp_path / "jobs", lambda *_: None, lambda _: None) as worker:
        worker.serve()
    code, told = run(folder, "profile")
    assert code == 1
    assert told["line"]["evaluations"][0]["outcome"] == "compilation_failure"

    lines = [json.loads(line) for line in (folder / RESULTS).read_text().splitlines()]
    assert [line["stage"] for line in lines] == ["compile", "compile", "profile"]
    assert [(line["reward"] or {}).get("value") for line in lines] == [-1, None, -1]
    rewrite(folder / "reference.py", "float64", "float32")
    code, told = run(folder, "verify")
    assert (code, told["error"]["kind"]) == (5, "verification")
    for line, source in zip(lines, (BROKEN, GOOD, BROKEN), strict=True):
        assert (folder / line["file"]).read_text() == source
        assert line["digest"] == hashlib.sha256(f"cpp\0{source}".encode()).hexdigest()


def test_a_right_kernel_is_worth_one_to_verify(
    laid_out: Callable[[Path], OpenWorkspace], tmp_path: Path
) -> None:
    opened = laid_out(tmp_path / "task")
    (opened.folder / opened.workspace.file).write_text(GOOD)
    tried = attempt(opened, "verify", lambda *_: None)
    assert tried.good
    assert tried.line.reward is not None
    assert tried.line.reward.value == 1
    assert tried.line.evaluations[0].outcome == "right"
    assert tried.line.evaluations[0].geomean_speedup is None


def test_the_policy_is_that_of_the_day_it_was_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = TripwirePolicy(banned=("broken",))
    opened = lay_out(OP, tmp_path / "task", Language.CPP, threads=1, policy=policy)
    (opened.folder / opened.workspace.file).write_text(BROKEN)
    (opened.folder / "patcher.toml").write_text("[tripwires]\nbanned = []\n")
    monkeypatch.chdir(opened.folder)
    assert app(["attempt", ".", "verify", "--json"], standalone_mode=False) == 1
    [line] = opened.ledger.lines()
    assert line.evaluations[0].outcome == "guard_violation"


def rewrite(path: Path, old: str, new: str) -> None:
    path.chmod(0o644)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("name", ["SKILL.md", "op.toml", "reference.py", "compile", "profile"])
def test_a_changed_file_is_named_and_nothing_runs(
    name: str, laid_out: Callable[[Path], OpenWorkspace], tmp_path: Path
) -> None:
    folder = laid_out(tmp_path / "task").folder
    path = folder / name
    kept = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(kept + b"\n")
    with pytest.raises(VerificationError, match=f"changed or are missing: {name}"):
        open_workspace(folder)
    path.unlink()
    with pytest.raises(VerificationError, match=name):
        open_workspace(folder)
    path.write_bytes(kept)
    open_workspace(folder)


def test_an_edited_manifest_or_another_op_is_refused(
    laid_out: Callable[[Path], OpenWorkspace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = laid_out(tmp_path / "task").folder
    with monkeypatch.context() as patch:
        shutil.copytree(OP.folder, tmp_path / "ops" / OP.name)
        rewrite(tmp_path / "ops" / OP.name / "inputs.py", '"""', '""" ')
        patch.setenv("PATCHER_OPS", str(tmp_path / "ops"))
        with pytest.raises(VerificationError, match="has changed since"):
            open_workspace(folder)
    rewrite(folder / "workspace.json", '"threads": 1', '"threads": 2')
    with pytest.raises(VerificationError, match=r"workspace\.json was changed"):
        open_workspace(folder)
    with pytest.raises(UsageError, match="not a workspace"):
        open_workspace(tmp_path)


def without_line_two(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return lines[0] + lines[2]


EDITS: dict[str, tuple[Callable[[str], str], int]] = {
    "a better reward": (lambda text: text.replace('"value":-1', '"value":3', 1), 1),
    "a better last line": (lambda text: '"value":3'.join(text.rsplit('"value":-1', 1)), 3),
    "a line less": (without_line_two, 2),
    "a line more": (lambda text: text + text.splitlines(keepends=True)[0], 4),
    "half a line more": (lambda text: text + "{", 4),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edit_of_the_results_is_found(
    case: str, laid_out: Callable[[Path], OpenWorkspace], tmp_path: Path
) -> None:
    edit, line = EDITS[case]
    opened = laid_out(tmp_path / "task")
    results = opened.folder / RESULTS
    results.chmod(0o644)
    results.write_text(edit(results.read_text()))
    with pytest.raises(VerificationError, match=f"line {line} is not what the judge wrote"):
        attempt(opened, "compile", lambda *_: None)


@pytest.mark.parametrize("length", [0, 10, -1, None])
def test_what_is_missing_at_the_end_of_the_results_comes_back(
    length: int | None, laid_out: Callable[[Path], OpenWorkspace], tmp_path: Path
) -> None:
    """As after a kill between the judge's copy and the agent's file."""
    opened = laid_out(tmp_path / "task")
    results = opened.folder / RESULTS
    whole = results.read_bytes()
    results.unlink()
    if length is not None:
        results.write_bytes(whole[:length])
    assert len(opened.ledger.lines()) == 3
    assert results.read_bytes() == whole


def test_the_chain_alone_finds_an_edit_before_the_last_line(
    laid_out: Callable[[Path], OpenWorkspace], tmp_path: Path
) -> None:
    opened = laid_out(tmp_path / "task")
    content = (opened.folder / RESULTS).read_bytes()
    genesis = genesis_of(opened.folder)
    assert len(parse(content, genesis)) == 3
    with pytest.raises(VerificationError, match="line 1 does not follow"):
        parse(content, "0" * 64)
    with pytest.raises(VerificationError, match="line 2 does not follow"):
        parse(content.replace(b'"value":-1', b'"value":3', 1), genesis)
    with pytest.raises(VerificationError, match="line 1 is no result"):
        parse(b"{}\n", genesis)


def test_the_kernel_must_be_a_plain_file(
    laid_out: Callable[[Path], OpenWorkspace], tmp_path: Path
) -> None:
    opened = laid_out(tmp_path / "task")
    kernel = opened.folder / opened.workspace.file
    kernel.write_text("x" * (1 << 21))
    with pytest.raises(UsageError, match="longer than"):
        opened.candidate()
    kernel.unlink()
    kernel.symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="a link"):
        opened.candidate()
