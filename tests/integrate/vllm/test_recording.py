"""What vLLM hands to its own kernels is recorded by the points that patches use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_here import config, needs_vllm

from patcher.bench import UsageError, load_op
from patcher.bench.judge.call_recording import read_recording
from patcher.bench.judge.contract_observation import observe
from patcher.integrate.recorders import recorder, start_recorders
from patcher.integrate.switches import Switches
from patcher.integrate.vllm.points import POINTS

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

TOKENS, SIZE = 3, 64


def norm() -> Any:
    from vllm.model_executor.layers.layernorm import RMSNorm

    layer = RMSNorm(SIZE, eps=1e-5, dtype=torch.float32)
    layer.weight.data.uniform_(0.75, 1.25)
    return layer


def linear() -> Any:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    layer = ReplicatedLinear(SIZE, 2 * SIZE, bias=True, return_bias=False)
    for parameter in layer.parameters():
        parameter.data.uniform_(-1.0, 1.0)
    return layer


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("name", "make"), [("norm.plain", norm), ("linear", linear)])
def test_a_layers_calls_are_recorded_with_the_engines_outputs(
    name: str, make: Any, compiled: bool, config: Any, tmp_path: Path
) -> None:
    layer, file = make(), tmp_path / "calls.safetensors"
    x, wide = torch.randn(TOKENS, SIZE), torch.randn(TOKENS, 3 * SIZE)[:, :SIZE]
    own = [layer(x), layer(wide)]
    with recorder("vllm", name, file) as found:
        run: Any = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
        given = [run(x), run(wide)]
    torch._dynamo.reset()
    assert (found.seen, len(found.calls), found.record().left_out) == (2, 2, {})
    recording, calls = read_recording(file, load_op(POINTS[name].op).contract)
    assert (recording.engine, recording.point) == ("vllm", name)
    for call, gave, mine in zip(calls, given, own, strict=True):
        torch.testing.assert_close(gave, mine)
        assert call.outputs["output"].equal(gave), "what the layer gave"
    first = load_op(POINTS[name].op).contract.tensors[0].name
    assert calls[0].inputs[first].equal(x)
    assert calls[1].inputs[first].equal(wide)
    assert torch.equal(layer(x), own[0])


def test_what_was_recorded_confirms_the_contract_and_names_a_pitch(
    config: Any, tmp_path: Path
) -> None:
    layer, file = norm(), tmp_path / "calls.safetensors"
    with recorder("vllm", "norm.plain", file):
        layer(torch.randn(TOKENS, 3 * SIZE)[:, :SIZE])
    [group] = observe(file).groups
    assert group.finding == "confirmed"
    assert group.not_judged == (f"input has strides [{3 * SIZE}, 1]: judged are [64, 1], [72, 1]",)


def test_a_call_that_the_guards_leave_to_the_engine_is_named(config: Any, tmp_path: Path) -> None:
    layer, file = linear(), tmp_path / "calls.safetensors"
    with recorder("vllm", "linear", file):
        layer(torch.randn(65, SIZE))
    [group] = observe(file).groups
    assert (group.finding, group.problem) == ("left to the engine", "tokens above 64")


@pytest.mark.parametrize("name", [n for n, point in POINTS.items() if point.tells_tokens])
def test_points_that_are_given_text_are_not_recorded(name: str, tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="token ids"),
        recorder("vllm", name, tmp_path / "calls.safetensors"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_process_with_the_id_of_a_former_one_has_a_file_of_its_own(
    tmp_path: Path, config: Any
) -> None:
    switches = Switches("off", True, None, recorded=("norm.plain",), recordings=tmp_path)
    for rows in (1, 2):
        [started] = start_recorders("vllm", switches)
        started.recorder.waits = False
        norm()(torch.randn(rows, SIZE))
        started.remove()
    files = [read_recording(each, load_op("rms_norm").contract)[1] for each in tmp_path.iterdir()]
    assert sorted(call.inputs["input"].shape[0] for [call] in files) == [1, 2]


def test_recordings_that_cannot_be_written_leave_no_point_replaced(
    tmp_path: Path, config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from patcher.integrate.vllm.plugin import VllmPlugin

    blocked = tmp_path / "blocked"
    blocked.write_text("a file in place of the folder")
    names = ("norm.plain", "linear")
    switches = Switches("off", True, None, recorded=names, recordings=blocked)
    plugin = VllmPlugin()
    plugin.recorders = start_recorders("vllm", switches)
    points = [each.point for each in plugin.recorders]
    for each in plugin.recorders:
        each.recorder.waits = False
    layer, rows = norm(), torch.randn(TOKENS, SIZE)
    recorded = layer(rows)
    plugin.leave()
    assert torch.equal(layer(rows), recorded)
    assert caplog.text.count("cannot write") == len(names)
    for point in points:
        point.find()  # the engine's own code is there again


def test_a_worker_records_what_its_environment_asks_for_once_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    from vllm import envs
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    import patcher.integrate.vllm as plugin
    from patcher.integrate.vllm.plugin import FACTOR

    for name, value in {
        "PATCHES": "off",
        "STRICT": "1",
        "HOME": str(tmp_path / "home"),
        "RECORD": str(tmp_path / "recordings"),
        "RECORD_POINTS": "norm.plain, linear",
        "RANK": "",  # so that it is put back
    }.items():
        monkeypatch.setenv(f"PATCHER_{name}", value)
    own, started = norm(), WorkerWrapperBase.init_device
    other = norm()
    other.forward_native = lambda x, *_: 2 * RMSNorm.forward_native(other, x)
    plugin.register()
    hooked: Any = WorkerWrapperBase.init_device
    worker = WorkerWrapperBase.__new__(WorkerWrapperBase)
    worker.vllm_config, worker.global_rank = config, 0
    model = torch.nn.ModuleList([own, other])
    worker.worker = inner = SimpleNamespace(
        init_device=lambda: None,
        load_model=lambda: None,
        compile_or_warm_up_model=lambda: own(torch.randn(TOKENS, SIZE)),
        get_model=lambda: model,
        model_runner=SimpleNamespace(get_model=lambda: model, model=model),
    )
    worker._worker_extension_cls = None
    try:
        worker.init_device()
        assert envs.environment_variables[FACTOR]()
        inner.load_model()
        inner.compile_or_warm_up_model()
        rows = torch.randn(TOKENS, SIZE)
        expected = own(rows)
        other(rows)
    finally:
        hooked.plugin.remove()
    assert WorkerWrapperBase.init_device is started
    assert FACTOR not in envs.environment_variables
    assert torch.equal(own(rows), expected)
    files = sorted((tmp_path / "recordings").iterdir())
    assert [file.name.split("-")[1] for file in files] == ["linear", "norm.plain"]
    recording, [call] = read_recording(files[1], load_op("rms_norm").contract)
    assert recording.seen == 1, "neither warm-up nor a layer that computes something else"
    assert call.inputs["input"].equal(rows)
    assert call.outputs["output"].equal(expected)
