"""The options that a search tries, as the real vLLM lists them."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest
from vllm_here import installed, needs_vllm

from patcher.ab.job import ABJob
from patcher.ab.launcher import loads_beside, with_cache_size
from patcher.bench import PatcherError, Workload
from patcher.bench.ab.tuning import options_for, options_of
from patcher.bench.engines import vllm_options
from patcher.bench.engines.beside import arguments_beside
from patcher.bench.engines.vllm import VllmEngine, _arguments


def workload(model: str) -> Workload:
    return Workload(
        model=model,
        engine="vllm",
        device="cuda",
        dtype="bfloat16",
        batch=8,
        input_len=64,
        output_len=8,
    )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The compute capability that vLLM finds: 9.0."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    found = DeviceCapability(9, 0)
    platform = type(current_platform)
    monkeypatch.setattr(platform, "get_device_capability", classmethod(lambda *_, **__: found))
    return found


def by_name(found: Any) -> dict[str, list[Any]]:
    return {next(iter(ways[0])): [each for way in ways for each in way.values()] for ways in found}


@needs_vllm
def test_names_are_those_of_the_installed_vllm(hopper: Any) -> None:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.config.kernel import LinearBackend, MoEBackend
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    found = by_name(vllm_options.ask(workload("gpt-oss-20b")))
    assert {"triton", "triton_unfused", "marlin", "humming"} <= set(found["moe_backend"])
    assert set(found["moe_backend"]) <= set(get_args(MoEBackend))
    assert {"auto", "emulation", "aiter"}.isdisjoint(found["moe_backend"])
    assert not [name for name in found["moe_backend"] if "b12x" in name or "trtllm" in name]
    assert "cutlass" not in found["moe_backend"], "vLLM has none for MXFP4"
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    assert "cutlass" in vllm_options.of_format(get_args(MoEBackend), fp8)
    assert "triton_unfused" not in vllm_options.of_format(get_args(MoEBackend), fp8)
    other = {"quantization_config": {"quant_method": "a format of tomorrow"}}
    assert vllm_options.of_format(["cutlass", "x"], other) == ["cutlass", "x"]
    assert set(found["attention_backend"]) <= set(AttentionBackendEnum.__members__)
    modes = [each["cudagraph_mode"] for each in found["compilation_config"]]
    assert {"FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE"} <= set(modes)
    assert set(modes) < set(CUDAGraphMode.__members__)
    dense = by_name(vllm_options.ask(workload("qwen3-8b")))
    assert "moe_backend" not in dense
    assert "marlin" not in dense.get("linear_backend", []), "no layer of it is quantised"
    every = vllm_options.linear_backends(
        get_args(LinearBackend), {"quantization_config": {"quant_method": "fp8"}}, hopper
    )
    assert {"cutlass", "marlin", "triton"} <= set(every)
    fields = set(inspect.signature(EngineArgs).parameters)
    assert {*found, *dense, "linear_backend", VllmEngine.cache_argument} <= fields
    assert set(_arguments(workload("gpt-oss-20b").model_copy(update={"weights": "hub"}))) <= fields


@needs_vllm
def test_attention_backends_are_asked_for_their_support(hopper: Any) -> None:
    """Those that need no package of their own; the others say so where they are installed."""
    asked = workload("qwen3-8b")
    latent = {"num_attention_heads": 16, "hidden_size": 2048, "kv_lora_rank": 512}
    plain = vllm_options.attention_backends(asked, {"head_dim": 128}, hopper)
    assert "FLEX_ATTENTION" in plain
    assert not [name for name in plain if "MLA" in name or "ROCM" in name or "DSV4" in name]
    assert "FLEX_ATTENTION" not in vllm_options.attention_backends(asked, latent, hopper)


def test_an_engine_may_list_its_options_for_a_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(options_of("vllm"))
    listed = (({"moe_backend": "new"},),)
    monkeypatch.setattr(VllmEngine, "options", staticmethod(lambda given: listed))
    assert options_for(workload("gpt-oss-20b")) == listed


def test_a_vllm_that_cannot_be_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    with pytest.raises(PatcherError, match=r"list of vLLM's backends failed .*Error"):
        vllm_options.options(workload("gpt-oss-20b").model_copy(update={"model": ""}))


def test_only_an_engine_that_fills_the_memory_gets_a_bound() -> None:
    served = ABJob(workload=workload("llama-3.1-8b"), process_pairs=3)
    assert not loads_beside(served)
    bound = with_cache_size(served)
    assert bound.arguments == {"kv_cache_memory_bytes": VllmEngine.cache_size(served.workload)}
    assert loads_beside(bound)
    unknown = served.model_copy(update={"workload": workload("somewhere/else")})
    assert with_cache_size(unknown) == unknown, "its sizes are on the hub"
    other = workload("qwen3-8b").model_copy(update={"engine": "transformers"})
    assert loads_beside(ABJob(workload=other, process_pairs=3))


def test_an_engine_loads_beside_another_where_it_compiles_the_same_alone() -> None:
    asked = workload("llama-3.1-8b")
    size = VllmEngine.cache_size(asked)
    beside = {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": size}
    assert arguments_beside(asked, (), 0.4, ["0.26.0", "0.33.0rc1"]) == beside
    for versions in (["0.25.1"], ["0.33.0", "0.25.1"], ["0.33.0", None]):
        assert arguments_beside(asked, (), 0.4, versions) == {}


@needs_vllm
def test_versions_that_compile_alike_are_those_whose_hash_leaves_out_memory() -> None:
    from vllm.config import CacheConfig

    beside = CacheConfig(gpu_memory_utilization=0.4, kv_cache_memory_bytes=1 << 30)
    alike = beside.compute_hash() == CacheConfig().compute_hash()
    assert bool(arguments_beside(workload("llama-3.1-8b"), (), 0.4, [installed()])) == alike
