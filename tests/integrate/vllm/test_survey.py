"""What a worker says of the layers that its patches take, and of patches that do nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from patch_sample import CANDIDATE, OP, add_norm_guards, evaluation
from patch_sample import kernel as add_norm
from vllm_here import config, dispatcher, needs_vllm, nothing

from patcher import bench
from patcher.integrate import Patch, Store
from patcher.integrate.vllm import engine
from patcher.integrate.vllm.plugin import LOADS, WARMS_UP, VllmPlugin
from patcher.integrate.vllm.points import POINTS

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

REFUSED = {
    "a weight that is offset by one": 1,
    "no weight": 1,
    "a mean over a part of the row": 1,
    "weight in float64": 1,
}


class Block(torch.nn.Module):
    """Norms of the real vLLM: some that fit, and one of each kind that does not."""

    def __init__(self, fitting: int = 2) -> None:
        from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

        super().__init__()
        plain = [RMSNorm(64, dtype=torch.float32) for _ in range(fitting)]
        self.fitting = torch.nn.ModuleList(plain)
        self.others = torch.nn.ModuleList(
            [
                GemmaRMSNorm(64),
                RMSNorm(64, has_weight=False),
                RMSNorm(64, var_hidden_size=32, dtype=torch.float32),
                RMSNorm(64, dtype=torch.float64),
            ]
        )
        self.again = plain[0] if plain else None  # a layer at two places is one


class Runner:
    """A worker without a device: what vLLM calls of one, in that order."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model: Any = None
        self._loads, self.model_runner = model, SimpleNamespace()
        self.uses: Callable[[], object] = lambda: None

    def init_device(self) -> None: ...

    def load_model(self, *, load_dummy_weights: bool = False) -> str:
        self.model = self._loads
        return "loaded"

    def get_model(self) -> Any:
        return self.model

    def reload_weights(self, path: str) -> None:
        for norm in self.model.fitting:
            norm.weight.data = norm.weight.data.to(torch.float64)

    def compile_or_warm_up_model(self) -> None:
        self.uses()

    def shutdown(self) -> None: ...


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any
) -> Iterator[Callable[[Runner], Any]]:
    """Starts a worker with a patch of `add_norm` switched on, up to its model."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    patch = Patch.create(
        tmp_path / "patch", OP, CANDIDATE, evaluation(), engine="vllm", made_by="test"
    )
    monkeypatch.setattr(Patch, "kernel", lambda _: add_norm)
    Store(tmp_path / "home").apply(patch.folder)
    monkeypatch.setenv("PATCHER_PATCHES", "on")
    monkeypatch.setenv("PATCHER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATCHER_RECEIPTS", str(tmp_path / "receipts"))
    monkeypatch.setenv("PATCHER_RANK", "")  # so that it is put back
    plugin = VllmPlugin()
    plugin.install()

    def start(runner: Runner) -> Any:
        worker = WorkerWrapperBase.__new__(WorkerWrapperBase)
        worker.vllm_config, worker.global_rank = config, 0
        worker.worker, worker._worker_extension_cls = runner, None
        worker.init_device()
        worker.init_device()  # a second time changes nothing
        return worker

    start.plugin = plugin  # type: ignore[attr-defined]
    yield start
    plugin.remove()


@contextmanager
def shown() -> Iterator[list[str]]:
    """What vLLM's handler shows where an engine has set it up at its default level."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)


def receipt(start: Any, tmp_path: Path) -> dict[str, Any]:
    start.plugin.active.writer.write()
    [path] = (tmp_path / "receipts").glob("*.json")
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def test_vllms_workers_have_the_methods_that_are_followed() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    assert [name for name in (*LOADS, WARMS_UP, "get_model") if not hasattr(Worker, name)] == []


@feature("weights reloaded in another dtype", "falls back", "add_norm")
def test_layers_are_counted_when_a_model_is_loaded_and_again_when_weights_are(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(Block())
    worker = start(runner)
    assert receipt(start, tmp_path)["layers_taken"] is None
    assert worker.load_model(load_dummy_weights=True) == "loaded"
    told = receipt(start, tmp_path)
    assert (told["layers_taken"], told["layers_refused"]) == (2, REFUSED)

    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    runner.uses = lambda: runner.model.fitting[0](x, residual)
    with shown() as lines:
        worker.compile_or_warm_up_model()
    [line] = [line for line in lines if line.startswith("patched layers: ")]
    assert line.startswith("patched layers: add_norm: 2 of 6 layers; 1: ")
    assert "no effect" not in caplog.text

    worker.reload_weights("elsewhere")
    told = receipt(start, tmp_path)
    assert (told["layers_taken"], told["layers_refused"]["weight in float64"]) == (0, 3)
    assert "has no effect: no layer takes it (0 of 6 layers; 3: weight in float64" in caplog.text


def test_a_patch_that_no_layer_takes_is_said_and_is_an_error_where_asked(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(Runner(Block(0)))
    worker.load_model()
    worker.shutdown()
    assert "has no effect: no layer takes it (0 of 4 layers; 1: " in caplog.text
    monkeypatch.setenv("PATCHER_STRICT", "1")
    with pytest.raises(bench.VerificationError, match="no layer takes it"):
        start(Runner(Block(0))).load_model()


@pytest.mark.parametrize("reached", [False, True])
def test_a_patch_that_warm_up_never_calls_is_said(
    reached: bool, start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(Block())
    worker = start(runner)
    worker.load_model()
    if reached:  # by calls that its guards refuse, as of a profiling run's many tokens
        wide = torch.randn(3, 64).double()
        runner.uses = lambda: runner.model.fitting[0](wide.clone(), wide.clone())
    worker.compile_or_warm_up_model()
    why = "every call fell back (1: dtype" if reached else "no call reached it"
    assert f"has no effect after warm-up: {why}" in caplog.text
    worker.shutdown()

    worker.shutdown()  # else an engine with other settings is refused
    monkeypatch.setenv("PATCHER_STRICT", "1")
    worker = start(runner)
    worker.load_model()
    if reached:  # calls of other sizes may come
        worker.compile_or_warm_up_model()
    else:
        with pytest.raises(bench.VerificationError, match="no call reached it"):
            worker.compile_or_warm_up_model()


def test_a_cpu_without_compilation_has_run_nothing_after_warm_up(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, config: Any
) -> None:
    from vllm.config.compilation import CompilationMode

    monkeypatch.setenv("PATCHER_STRICT", "1")
    monkeypatch.setattr(config.compilation_config, "mode", CompilationMode.NONE)
    worker = start(Runner(Block()))
    worker.load_model()
    worker.compile_or_warm_up_model()
    assert "has no effect" not in caplog.text
    worker.shutdown()
    monkeypatch.setattr(config.device_config, "device_type", "cuda")
    worker = start(Runner(Block()))
    worker.load_model()
    with pytest.raises(bench.VerificationError, match="no call reached it"):
        worker.compile_or_warm_up_model()


def test_what_one_engine_took_says_nothing_of_the_next(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHER_STRICT", "1")
    first, second = Runner(Block()), Runner(Block(1))
    rows = torch.randn(3, 64)
    first.uses = lambda: first.model.fitting[0](rows.clone(), rows.clone())
    worker = start(first)
    worker.load_model()
    with torch.no_grad():
        worker.compile_or_warm_up_model()
    worker.shutdown()
    worker = start(second)
    worker.load_model()
    told = receipt(start, tmp_path)
    assert (told["layers_taken"], sum(told["calls"].values())) == (1, 1)
    with pytest.raises(bench.VerificationError, match="no call reached it"):
        worker.compile_or_warm_up_model()
    worker.shutdown()
    with pytest.raises(bench.VerificationError, match="no layer takes it"):
        start(Runner(Block(0))).load_model()


@feature("pipeline parallelism", "right", "add_norm")
def test_a_stage_of_a_pipeline_may_have_no_layer_of_a_role(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, config: Any
) -> None:
    monkeypatch.setenv("PATCHER_STRICT", "1")
    monkeypatch.setattr(config.parallel_config, "pipeline_parallel_size", 2)
    worker = start(Runner(torch.nn.Linear(2, 2)))
    worker.load_model()
    worker.compile_or_warm_up_model()
    assert "has no effect after warm-up: no layer is of its role" in caplog.text


def test_an_engine_starts_whatever_its_layers_are_like(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block = Block()
    monkeypatch.delattr(block.fitting[0], "pass_weight_add")
    worker = start(Runner(block))
    assert worker.load_model() == "loaded"
    worker.shutdown()
    assert "the layers that patches take are not known" in caplog.text
    monkeypatch.setenv("PATCHER_STRICT", "1")
    with pytest.raises(AttributeError):
        start(Runner(block)).load_model()


@pytest.mark.parametrize("kept_by", ["drafter", "speculator"])
def test_a_draft_model_counts_too(kept_by: str) -> None:
    served, draft = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    runner = SimpleNamespace(**{kept_by: SimpleNamespace(model=draft)})
    worker = SimpleNamespace(get_model=lambda: served, model_runner=runner)
    assert engine.models_of(worker) == (served, draft)
    worker.model_runner = SimpleNamespace(**{kept_by: SimpleNamespace()})
    assert engine.models_of(worker) == (served,)


@feature("`enable_sp`", "refused", "add_norm", "experts_to_norm")
@pytest.mark.parametrize("name", ["add_norm", "experts_to_norm"])
def test_norms_that_sequence_parallelism_must_know_are_left_to_it(
    name: str, monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    point, passes = POINTS[name](), config.compilation_config.pass_config
    assert point.find()
    if not hasattr(passes, "enable_sp"):
        pytest.skip("this vLLM has no such pass")
    monkeypatch.setattr(passes, "enable_sp", True)
    with pytest.raises(bench.VerificationError, match=r"sequence parallelism \(enable_sp\)"):
        point.find()


PASSES = [(point.name, name) for point in POINTS.values() for name in point.fusions]


@pytest.mark.parametrize(("name", "lost"), PASSES)
def test_passes_that_a_patch_takes_something_from_are_named(
    name: str,
    lost: str,
    monkeypatch: pytest.MonkeyPatch,
    config: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    passes = config.compilation_config.pass_config
    for known in {known for _, known in PASSES if hasattr(passes, known)}:
        monkeypatch.setattr(passes, known, False)
    point, kernel = POINTS[name](), dispatcher(OP.name, nothing, add_norm_guards())

    def said() -> str:
        caplog.clear()
        point.install(kernel)
        point.remove()
        return caplog.text

    assert "fused by" not in said()
    if not hasattr(passes, lost):
        pytest.skip("this vLLM has no such pass")
    monkeypatch.setattr(passes, lost, True)
    assert f"{name}: what the patch runs is no longer fused by {lost}\n" in said()
    kernel.close()


def test_passes_of_a_second_engine_are_named_too(
    start: Any, monkeypatch: pytest.MonkeyPatch, config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    passes = config.compilation_config.pass_config
    for name in POINTS["add_norm"].fusions:
        monkeypatch.setattr(passes, name, False)
    first = Runner(Block())
    engine = start(first)
    assert "fused by" not in caplog.text
    monkeypatch.setattr(passes, "fuse_norm_quant", True)
    other = start(Runner(Block()))
    assert "no longer fused by fuse_norm_quant" in caplog.text
    for worker in (engine, other):
        worker.shutdown()
