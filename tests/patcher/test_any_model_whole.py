"""Small models of as many architectures go the whole way: profile, a run with a recorded loop, its
patch, the A/B, and back to the same bits."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_sample import recording, verdict
from command_line import patcher as command
from tiny_models import KINDS, MORE, WHOLE, model_of, multimodal

import patcher
from patcher import pipeline
from patcher.ab import one_process
from patcher.ab.job import ABJob
from patcher.ab.measurement import Measurement
from patcher.bench import Candidate, Evaluation, Language, UsageError, Workload, load_op, load_ops
from patcher.bench.ab.phases import ABProgress
from patcher.bench.engines import open_engine
from patcher.bench.judge import JudgeSettings
from patcher.hotspot import Profile, target
from patcher.integrate import Patch
from patcher.kernel_search import stage
from patcher.plan import RunPlan
from patcher.runs.run import Run
from patcher.settings import resolve
from patcher.workloads import workload_for

WITHOUT = ("gpt2", "opt", "rwkv")
"""Architectures that no op of the library can be put in but `linear`."""
MORE_ROLES = (
    *(("mixtral", "moe_topk"), ("granitemoehybrid", "moe_topk"), ("qwen3_next", "moe_topk")),
    *(("llama", "rope"), ("glm4_moe", "rope"), ("deepseek_v3", "rope")),
    *(("qwen2", "linear"), ("opt", "linear"), ("mamba2", "linear")),
    *(("llama", "rms_norm"), ("deepseek_v3", "fused_add_rms_norm")),
)
"""Further ops for which architectures go the whole way."""
SIZES = {"hidden=64", "intermediate=128", "inner=64,outer=64", "n_experts=4,top_k=2"}
SIZES |= {"q_heads=4,head_dim=16", "q_heads=4,kv_heads=4,head_dim=16", "inner=128,outer=64"}


def solution(op: str) -> Candidate:
    """A kernel of the library that takes all sizes: one in C++, which is compiled once for all
    models, or in PyTorch where there is none."""
    found = {info.name: candidate for info, candidate in load_op(op).solutions()}
    return found.get("cpu_simd") or found["cpu_torch"]


def loop_of(op: str, folder: Path) -> str:
    """A recorded loop whose one reply is that kernel, as `--model` names it."""
    kernel = solution(op)
    reply = f"```{kernel.language.traits.tags[0]}\n{kernel.source}\n```"
    recording(folder, [("0/generate", reply)], op)
    return f"replay:{folder / 'recording.jsonl'}"


def small(kind: str, folder: Path) -> str:
    if kind == "gemma3":
        return multimodal(folder)
    return model_of(folder, kind, **{**KINDS, **MORE}.get(kind, {}))


class RecordedJudge:
    """In place of the judge: what it said of the kernel in another run."""

    def prepare(self, candidates: Sequence[Candidate]) -> None: ...

    def evaluate(self, candidates: Sequence[Candidate]) -> list[Evaluation]:
        return [verdict(candidate, 1.5) for candidate in candidates]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The programs that a run starts run here, where torch is loaded: the profiled one, and that of
    the A/B. The loop is a recording, of replies and of verdicts."""

    def profiled(words: list[str], variables: object) -> None:
        monkeypatch.setattr(sys, "argv", words[words.index("patcher.hotspot.target") :])
        assert target.main() == 0

    def compared(job: ABJob, folder: Path, progress: ABProgress, _keep: Path) -> Measurement:
        [found] = one_process.compare_here(job, [Patch.load(folder)], progress)
        return found

    @contextmanager
    def judges(where: str, settings: JudgeSettings, *_: Any, **__: Any) -> Iterator[RecordedJudge]:
        assert settings.sweep is not None
        named = settings.sweep.partition("@")[2]
        assert named in SIZES, "the model's own sizes"
        yield RecordedJudge()

    monkeypatch.setattr(importlib.import_module("patcher.hotspot.capture"), "_run", profiled)
    monkeypatch.setattr(pipeline, "compare_patch", compared)
    monkeypatch.setattr(stage, "open_judges", judges)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def begin(model: str, loop: str, folder: Path, op: str | None = None) -> tuple[Run, Workload]:
    workload = workload_for(model, "cpu", batch=2, input_len=8, output_len=4, threads=1)
    asked = {"model": loop, "iterations": 1, "memory": "off", "runs_dir": folder / "runs"}
    language = Language.CPP if op is None else solution(op).language
    plan = RunPlan(op=op, language=language, pairs=6, quality_steps=4, threads=1)
    return pipeline.start(resolve(asked), "run", model, workload, plan), workload


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("kind", "op"), [*WHOLE.items(), *MORE_ROLES])
def test_a_model_goes_the_whole_way_and_back(kind: str, op: str, tmp_path: Path) -> None:
    run, workload = begin(small(kind, tmp_path), loop_of(op, tmp_path), tmp_path, op)
    with run:
        result = pipeline.execute(run, lambda *_: None, lambda _: None)
        profile, measured = run.load("profile", Profile), run.load("measure", Measurement)
    assert result.decision is not None
    assert result.decision.verdict in ("accept", "reject", "inconclusive")
    claimed = {spot.op: spot.patch_points for spot in profile.hotspots if spot.op}
    # the others are eagerly operators that name no module
    if op.endswith("rms_norm"):
        # a norm that goes with the addition before it is claimed by the op of both
        named = op if op in claimed else "fused_add_rms_norm"
        points = {f"{each.engine}: {each.point}" for each in load_op(named).contract.patch_points}
        assert claimed[named]
        assert set(claimed[named]) <= points
    assert measured.receipt.calls
    # in prefill norms of Gemma's heads have transposed rows, and the output matrix some of all
    strided = {"not contiguous"} if "gemma" in kind or op == "linear" else set()
    assert set(measured.receipt.fallbacks) <= strided
    assert measured.quality.passed, measured.quality.reason
    assert measured.reverted_identical

    engine = open_engine(workload)
    prompts = engine.prompts(7)
    before = engine.generate(prompts, 4).tokens
    with patcher.patched(engine.model, run.path / "patch") as receipt:
        engine.generate(prompts, 4)
    assert receipt.total_calls
    assert engine.generate(prompts, 4).tokens.equal(before)
    assert not any("patch_point" in vars(type(each)) for each in engine.model.modules())


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_model_without_a_place_is_told_so_before_anything_is_measured(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "capture", lambda *_: pytest.fail("it was profiled"))
    ops = {name: op for name, op in load_ops().items() if name != "linear"}
    monkeypatch.setattr("patcher.places.load_ops", lambda: ops)
    with pytest.raises(UsageError, match="no op of the library can be put in"):
        begin(small(kind, tmp_path), "replay:demo", tmp_path)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "deepseek_v2", "granitemoehybrid", "gemma3_text"])
def test_the_same_by_its_commands(kind: str, tmp_path: Path) -> None:
    """With every process of its own, and the judge."""
    op, model = WHOLE[kind], small(kind, tmp_path)
    size = ("--device", "cpu", "--batch", "2", "--input-len", "8", "--output-len", "8", "--json")
    profiled = command("profile", model, *size, cwd=tmp_path)
    assert op in {spot["op"] for spot in json.loads(profiled.stdout)["hotspots"]}
    words = ("--op", op, "--language", "cpp", "--iterations", "1", "--pairs", "6", "--threads", "1")
    run = command("run", model, *words, *size, "--model", loop_of(op, tmp_path), cwd=tmp_path)
    assert run.returncode in (0, 1), run.stdout
    found = json.loads(run.stdout)
    assert found["decision"]["verdict"] in ("accept", "reject", "inconclusive")
    assert any("bit-identical" in reason for reason in found["decision"]["reasons"])
