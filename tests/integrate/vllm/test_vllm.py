"""vLLM's patch points in the real vLLM, as far as its Python code runs without a GPU.

There, FlashAttention and vLLM's C kernels do not exist; what stands for them here is named so.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from patch_sample import CANDIDATE, OP, add_norm_guards, evaluation
from patch_sample import kernel as add_norm
from vllm_here import (
    attribute,
    config,
    dispatcher,
    guards_of,
    installed,
    needs_vllm,
    nothing,
)
from vllm_sample import (
    EXPERTS,
    _reference,
)

from patcher import bench
from patcher.integrate import Patch, Store, unpacked
from patcher.integrate.points import find_point
from patcher.integrate.source_record import Reading, SourceRecord
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.points import POINTS
from patcher.integrate.vllm.roles import experts_sum, router

__all__ = ("config",)  # a fixture of tests here

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted(
    file
    for kind in ("cuda", "triton")
    for file in (ROOT / "kernels").glob(f"*/solutions/{kind}_*/*.[cp][uy]")
)


without_vllm = pytest.mark.skipif(installed() is not None, reason="vLLM is installed")


def python(code: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **env},
    )
    return result.stdout + result.stderr


def test_the_plugin_is_declared_and_does_nothing_unless_it_is_asked() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = project["project"]["entry-points"]["vllm.general_plugins"]
    assert declared == {"patcher": "patcher.integrate.vllm:register"}
    code = (
        "import sys, patcher.integrate.vllm as plugin; plugin.register(); plugin.register();"
        "print([name for name in ('torch', 'vllm', 'scipy') if name in sys.modules])"
    )
    assert python(code).strip() == "[]"
    assert python(code, PATCHER_PATCHES="off").strip() == "[]"


@without_vllm
def test_where_vllm_is_missing_it_says_so() -> None:
    code = "import logging; logging.basicConfig(); import patcher.integrate.vllm as p; p.register()"
    assert "vllm is not installed" in python(code, PATCHER_PATCHES="on")
    strict = python(code, PATCHER_PATCHES="on", PATCHER_STRICT="1")
    assert "MissingError: vllm is not installed" in strict
    for name, point in POINTS.items():
        assert find_point("vllm", name) is point
        with pytest.raises(bench.MissingError, match="vllm is not installed"):
            point.fingerprint()


BLOCKS = "qkv_rope_kv_update", "add_rms_norm_route", "moe_block"
LAUNCHES = {"moe_route": 4, "add_rms_norm_route": 4, "moe_block": 7}
"""Of the kernels that disappear, in a layer."""


def test_the_names_that_the_proof_looks_for_are_those_of_a_real_profile() -> None:
    from patcher.bench.lab.vllm_cases import CASES, counted, matching

    profile = json.loads(bench.content(ROOT / "bench/results/h200-profile/vllm-decode.json.xz"))
    kernels = {kernel["name"]: kernel["instances"] for kernel in profile["kernels"]}
    steps, layers = profile["steps"], profile["layers"]
    for op, case in CASES.items():
        [a_layer] = (
            point.calls_per_layer
            for point in bench.load_op(op).contract.patch_points
            if point.engine == "vllm" and point.calls_per_layer
        )
        launches = LAUNCHES.get(op, a_layer) * layers
        assert matching(case.theirs, kernels) / steps == launches, op
        ours = f"{op}_kernel"
        names = (rf"^{ours}", case.theirs)
        rest = {n: c for n, c in kernels.items() if not matching(case.theirs, {n: c})}
        calls = a_layer * layers * steps
        patched = {"kernels": {**rest, ours: calls}, "calls": {"a": calls}, "fallbacks": {}}
        given = counted(op, names, {"kernels": kernels}, patched, steps, a_layer * layers)
        assert all(check["passed"] for check in given)
        # neither half-replaced, nor more launches than calls
        for wrong in ({**kernels, ours: calls}, {**rest, ours: calls + steps}):
            given = counted(
                *(op, names, {"kernels": kernels}),
                *({**patched, "kernels": wrong}, steps, a_layer * layers),
            )
            assert [check["passed"] for check in given].count(False) == 1
        # an eager engine never calls what is found in compiled graphs
        asked = case.calls_in("eager", a_layer)
        in_graphs = ("rope_kv_update", "reduce_add_rms_norm", *BLOCKS)
        assert asked == (0 if op in in_graphs else a_layer)
        idle = {"kernels": kernels, "calls": {}, "fallbacks": {"outside": 9}}
        told = counted(op, names, {"kernels": kernels}, idle, steps, 0)
        assert all(check["passed"] for check in told)
        told = counted(op, names, {"kernels": kernels}, patched, steps, 0)
        assert not any(check["passed"] for check in told)


@pytest.mark.parametrize("source", SOURCES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_the_kernels_of_a_source_are_those_that_it_marks(source: Path) -> None:
    from patcher.bench.lab.vllm_cases import kernel_names, matching

    text = source.read_text()
    language = "triton" if source.suffix == ".py" else "cuda"
    names = kernel_names(bench.Candidate(op=source.stem, language=language, source=text))
    found = names.removeprefix(r"\b(?:").removesuffix(r")\b").split("|")
    marked = text.count("@triton.jit" if language == "triton" else "__global__")
    assert len(found) == marked or (language == "cuda" and len(found) < marked)  # overloads
    assert all(re.search(rf"\b{name}\b\s*[(<\[,;]", text) for name in found)
    assert matching(names, {f"void (anonymous namespace)::{found[0]}<float, 2>(int)": 3}) == 3
    assert matching(names, {f"un{found[0]}": 3, f"{found[0]}s": 3}) == 0


def test_a_narrowed_patch_differs_in_its_guards_alone(tmp_path: Path) -> None:
    from patcher.bench.lab.vllm_points import narrowed, shipped

    bundles = ROOT / "bench/results/h200-vllm/bundles/together"
    with unpacked(bundles / "linear-cuda-a8e2f6de.zip") as folder:
        patch = Patch.load(folder)
        for _ in range(2):  # again in the place of the first
            few = narrowed(patch, tmp_path / "few", 1)
            assert few.manifest.guards.axes["tokens"].maximum == 1
            axes = {**few.manifest.guards.axes, "tokens": patch.manifest.guards.axes["tokens"]}
            guards = few.manifest.guards.model_copy(update={"axes": axes})
            assert few.manifest.model_copy(update={"guards": guards}) == patch.manifest
            assert few.candidate() == patch.candidate()
    assert shipped(OP).op == OP.name


# ---- from here on: the real vLLM


RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
_ACTIVATION = "vllm.model_executor.layers.activation"
_QUANTISER = "vllm.model_executor.layers.quantization.input_quant_fp8"
_MOE_KERNEL = "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEKernel"
_FP8 = "vllm.model_executor.kernels.linear.scaled_mm"
_V2_SAMPLER = "vllm.v1.worker.gpu.sample.sampler"
PLACES = {
    "norm.plain": ["vllm.model_executor.layers.layernorm:RMSNorm.forward"],
    "norm.gemma": ["vllm.model_executor.layers.layernorm:GemmaRMSNorm.forward"],
    "activation.silu": [f"{_ACTIVATION}:SiluAndMul.forward"],
    "activation.gelu": [f"{_ACTIVATION}:GeluAndMul.forward"],
    "activation.gelu_tanh": [f"{_ACTIVATION}:GeluAndMul.forward"],
    "router.topk": [
        "vllm.model_executor.layers.fused_moe.router.fused_topk_router:"
        "FusedTopKRouter._compute_routing"
    ],
    "router.grouped_topk": [
        "vllm.model_executor.layers.fused_moe.router.grouped_topk_router:"
        "GroupedTopKRouter._compute_routing",
        "vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router:"
        "FusedTopKBiasRouter._compute_routing",
        "vllm.model_executor.layers.fused_moe.router.fused_topk_router:"
        "FusedTopKRouter._compute_routing",
    ],
    "gated_delta": [
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:"
        "fused_recurrent_gated_delta_rule_packed_decode"
    ],
    "mamba2_decode": ["vllm.model_executor.layers.mamba.mamba_mixer2:selective_state_update"],
    "sampler.greedy": [
        "vllm.v1.sample.sampler:Sampler.greedy_sample",
        f"{_V2_SAMPLER}:Sampler.sample",
        f"{_V2_SAMPLER}:gumbel_sample",
    ],
    "lm_head.greedy": [
        "vllm.model_executor.layers.logits_processor:LogitsProcessor.forward",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        "vllm.v1.sample.sampler:Sampler.forward",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample",
        f"{_V2_SAMPLER}:Sampler.sample",
    ],
    "sampler.top_k_top_p": ["vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.__call__"],
    "add_norm": ["vllm.model_executor.layers.layernorm:RMSNorm.forward"],
    "linear": ["vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply"],
    "linear_fp8": [
        f"{_FP8}.{place}.apply_block_scaled_mm"
        for place in (
            "cutlass:CutlassFp8BlockScaledMMKernel",
            "triton:TritonFp8BlockScaledMMKernel",
            "deep_gemm:DeepGemmFp8BlockScaledMMKernel",
            "flashinfer:FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        )
    ],
    "experts.fp8_block": [f"{_MOE_KERNEL}.apply"],
    "experts.plain": [f"{_MOE_KERNEL}.apply"],
    "lm_head": [
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply"
    ],
    "rope_kv": [
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward",
        "vllm.compilation.backends:split_graph",
        "vllm.compilation.passes.utility.fix_functionalization:FixFunctionalizationPass.__call__",
    ],
    "qkv_rope_kv": [
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward",
        "vllm.compilation.backends:split_graph",
    ],
    "qk_norm_rope": [
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward",
        "vllm.compilation.backends:split_graph",
        "vllm.compilation.passes.utility.fix_functionalization:FixFunctionalizationPass.__call__",
    ],
    "embed_norm": ["vllm.compilation.backends:split_graph"],
    "quantize_fp8": [f"{_QUANTISER}:QuantFP8.forward"],
    "rms_norm_quant_fp8": [
        f"{_QUANTISER}:QuantFP8.forward",
        "vllm.compilation.backends:split_graph",
    ],
    "add_norm_route": [
        "vllm.compilation.backends:split_graph",
        "triton_kernels.routing:routing",
        f"{RUNNER}:MoERunner.forward",
    ],
    "moe_block": ["vllm.compilation.backends:split_graph", f"{RUNNER}:MoERunner.forward"],
    "mla_decode": [
        f"vllm.v1.attention.backends.mla.{place}.forward_mqa"
        for place in (
            "flashattn_mla:FlashAttnMLAImpl",
            "flashmla:FlashMLAImpl",
            "triton_mla:TritonMLAImpl",
        )
    ],
    "decode_attention": ["vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward"],
    "decode_attention.fp8": ["vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward"],
    "router.oai": ["triton_kernels.routing:routing"],
    "experts.sum.oai": ["triton_kernels.matmul_ogs:reduce_grouped"],
    "experts.gate_up.mxfp4": [f"{EXPERTS}:matmul_ogs", f"{EXPERTS}:make_routing_data"],
    "experts_to_norm": [
        "vllm.compilation.backends:split_graph",
        "triton_kernels.matmul_ogs:reduce_grouped",
        f"{RUNNER}:MoERunner.forward",
    ],
    "experts.down.mxfp4": [f"{EXPERTS}:matmul_ogs", f"{EXPERTS}:make_routing_data"],
}


@feature("someone else's patch in its place", "refused", *POINTS)
@needs_vllm
@pytest.mark.parametrize("name", POINTS)
def test_a_point_goes_in_and_out_without_a_trace(name: str, config: Any) -> None:
    before = [attribute(place) for place in PLACES[name]]
    kind = POINTS[name]
    fingerprint = kind.fingerprint()
    point = kind()
    assert point.find()
    point.install(dispatcher(kind.op, nothing, add_norm_guards()))
    assert all(attribute(p) is not b for p, b in zip(PLACES[name], before, strict=True))
    assert kind.fingerprint() == fingerprint
    with pytest.raises(bench.VerificationError, match="already patched"):
        kind().find()
    with pytest.raises(bench.VerificationError, match="already patched"):
        point.install(dispatcher(kind.op, nothing, add_norm_guards()))
    point.remove()
    point.remove()
    assert [attribute(place) for place in PLACES[name]] == before

    where, _, path = PLACES[name][0].partition(":")
    owner_name, _, last = path.rpartition(".")
    owner = attribute(f"{where}:{owner_name}") if owner_name else sys.modules[where]
    own = vars(owner).get(last)  # static or not
    point.install(dispatcher(kind.op, nothing, add_norm_guards()))
    setattr(owner, last, nothing)
    try:
        with pytest.raises(bench.VerificationError, match="patched by other code"):
            point.remove()
        assert attribute(PLACES[name][0]) is nothing
    finally:
        delattr(owner, last)
        if own is not None:
            setattr(owner, last, own)
    assert [attribute(place) for place in PLACES[name]] == before


@feature("another version, changed code", "refused", *POINTS)
@needs_vllm
@pytest.mark.parametrize("name", POINTS)
def test_code_that_no_version_read_has_is_refused(
    name: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = sources.record().readings()
    changed = {**known, POINTS[name].parts[-1]: Reading({})}
    monkeypatch.setattr(SourceRecord, "readings", lambda record: changed)
    with pytest.raises(bench.VerificationError, match=f"the adapter of {name} was written for"):
        POINTS[name]().find()


@feature("`enforce_eager`, mode NONE", "right", "add_norm")
@needs_vllm
def test_the_norm_runs_the_kernel_in_place_and_falls_back_to_the_engines_own(config: Any) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    norm = RMSNorm(64, eps=1e-5, dtype=torch.float32)
    norm.weight.data.uniform_(0.5, 2.0)
    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    expected = norm(x.clone(), residual.clone())
    kernel = dispatcher(OP.name, add_norm, add_norm_guards())
    point = POINTS["add_norm"]()
    point.install(kernel)
    try:
        mine = x.clone(), residual.clone()
        given = norm(*mine)
        assert given[0] is mine[0]
        assert given[1] is mine[1]
        torch.testing.assert_close(given, expected)
        assert dict(kernel.book.calls) == {f"{OP.name} tokens=3 hidden=64 float32": 1}

        # another dtype, a layer without residual: the engine's own, bit for bit
        wide = x.double(), residual.double()
        assert torch.equal(norm(*wide)[0], _native(x.double(), residual.double(), norm)[0])
        assert torch.equal(norm(x), _plain(x, norm))
        assert dict(kernel.book.fallbacks) == {"dtype float64/float32": 1}
    finally:
        point.remove()
        kernel.close()
    assert torch.equal(norm(x.clone(), residual.clone())[0], expected[0])


def _native(x: torch.Tensor, residual: torch.Tensor, norm: Any) -> Any:
    from vllm import ir

    return ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, norm.weight.data, 1e-5)


def _plain(x: torch.Tensor, norm: Any) -> Any:
    from vllm import ir

    return ir.ops.rms_norm.impls["native"].impl_fn(x, norm.weight.data, 1e-5)


@feature("compiled in pieces, and from the compile cache", "right", "add_norm")
@needs_vllm
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compilers_leave_the_norm_whole(backend: str, config: Any) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (RMSNorm(64, eps=1e-5, dtype=torch.float32) for _ in range(2))
            self.mix = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> Any:
            x, residual = self.first(self.mix(x), x * 2)
            x, residual = self.second(self.mix(x), residual)
            return x, residual

    block = Block()
    x = torch.randn(5, 64)
    expected = block(x)
    kernel = dispatcher(OP.name, add_norm, add_norm_guards())
    point = POINTS["add_norm"]()
    point.install(kernel)
    try:
        compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected)
        assert sum(kernel.book.calls.values()) == 4
        assert not kernel.book.fallbacks
    finally:
        point.remove()
        kernel.close()
        torch._dynamo.reset()


@needs_vllm
@torch.no_grad()
def test_routing_gives_vllm_what_it_reads() -> None:
    library = attribute("triton_kernels.routing:routing").__globals__
    tokens, experts, top_k = 9, 8, 2
    logits = torch.randn(tokens, experts)
    # the library's own reference, in PyTorch
    expected = _reference(library, logits, top_k)

    def kernel(logits: torch.Tensor, *outputs: torch.Tensor) -> None:
        data, gather, scatter = _reference(library, logits, top_k)
        tables = data.expt_data
        made = (
            *(data.gate_scal, gather.src_indx, scatter.src_indx, data.expt_hist),
            tables.token_offs_raw,
            torch.stack(list(tables.token_offs_pad.values())),
            torch.stack(list(tables.block_pid_map.values())),
        )
        for output, value in zip(outputs, made, strict=True):
            assert output.shape == value.shape
            assert output.dtype == value.dtype
            output.copy_(value)

    guards = guards_of("moe_route", T=torch.float32, I=torch.int32)
    dispatch = dispatcher("moe_route", kernel, guards)
    asked: list[Any] = []
    parts = {"router.oai": router._routing_by(dispatch)}
    routing = router._sharing(lambda *args: asked.append(args), parts)
    data, gather, scatter = routing(logits, top_k, sm_first=False)
    assert (data.n_expts_tot, data.n_expts_act) == (experts, top_k)
    assert torch.equal(data.gate_scal, expected[0].gate_scal)
    assert torch.equal(gather.src_indx, expected[1].src_indx)
    assert torch.equal(gather.dst_indx, expected[1].dst_indx)
    assert torch.equal(scatter.src_indx, expected[2].src_indx)
    assert torch.equal(scatter.dst_indx, expected[2].dst_indx)
    assert list(data.expt_data.block_pid_map) == [16, 32, 64, 128]
    for size in (16, 32, 64, 128):
        for table in ("block_pid_map", "token_offs_pad"):
            mine, theirs = (getattr(d.expt_data, table)[size] for d in (data, expected[0]))
            assert torch.equal(mine, theirs)
    assert not asked

    routing(logits, top_k, True)
    routing(logits.double(), top_k)
    assert [(args[0].dtype, *args[1:3]) for args in asked] == [
        (torch.float32, top_k, True),
        (torch.float64, top_k, False),
    ]
    assert dict(dispatch.book.fallbacks) == {"another kind of routing": 1, "dtype float64/int32": 1}


@needs_vllm
def test_the_sum_over_experts_is_the_kernels_unless_it_is_more_than_a_sum() -> None:
    matmul = attribute("triton_kernels.matmul_ogs:reduce_grouped").__globals__
    rows = torch.randn(1, 1, 8, 16)
    index = torch.randperm(8).to(torch.int32).view(4, 2)
    output = torch.zeros(1, 4, 16)

    def kernel(rows: Any, index: Any, scales: Any, output: Any) -> None:
        assert scales.shape == (0, 2)
        output.copy_(rows[0][index.long()].sum(1))

    float32 = dict.fromkeys("TXS", torch.float32)
    guards = guards_of("moe_reduce", I=torch.int32, **float32)
    dispatch = dispatcher("moe_reduce", kernel, guards)
    asked: list[Any] = []
    parts = {"experts.sum.oai": experts_sum.summing(dispatch)}
    reduce = experts_sum._sharing(lambda *args, **more: asked.append(args), parts)
    plain = matmul["FusedActivation"]()
    epilogue = matmul["Epilogue"](matmul["FnSpecs"].default(), (), (), False)
    flex = {"x_flex": matmul["InFlexData"](), "out_flex": matmul["OutFlexData"]()}
    more = {**flex, "x_mx_scale": None, "out_dtype": torch.float32}
    given, scale = reduce(rows, index, output, None, plain, epilogue, **more)
    assert given is output
    assert scale is None
    torch.testing.assert_close(output[0], rows[0, 0][index.long()].sum(1))
    assert not asked

    reduce(rows, None, output, None, plain, epilogue, **more)
    swiglu = matmul["FusedActivation"](matmul["FnSpecs"]("swiglu", nothing, ()), (), 2)
    reduce(rows, index, output, None, swiglu, epilogue, **more)
    scaled = matmul["OutFlexData"](expected_scale=torch.ones(1))
    reduce(rows, index, output, None, plain, epilogue, **{**more, "out_flex": scaled})
    reduce(rows.double(), index, output, None, plain, epilogue, **more)
    assert len(asked) == 4
    assert dict(dispatch.book.fallbacks) == {
        "more than a sum": 2,
        "dtype float64/int32/float32/float32": 1,
    }


@needs_vllm
def test_vllm_itself_loads_the_plugin() -> None:
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name="patcher"):
        pytest.skip("patcher is not installed here, only on the path")
    code = (
        "import vllm_doubles; from vllm.plugins import load_general_plugins as load;"
        "load(); load();"
        "from vllm.v1.worker.worker_base import WorkerWrapperBase as W;"
        "print('waiting:', hasattr(W.init_device, 'plugin'))"
    )
    # what this process imports, from an unpacked wheel or not
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    assert "waiting: False" in python(code, PYTHONPATH=path)
    assert "waiting: True" in python(code, PYTHONPATH=path, PATCHER_PATCHES="on")
    others = {"PATCHER_PATCHES": "on", "VLLM_PLUGINS": "other"}
    assert "waiting: False" in python(code, PYTHONPATH=path, **others)


@needs_vllm
def test_a_worker_has_what_is_switched_on_and_its_compiled_code_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    from vllm import envs
    from vllm.compilation.caching import aot_compile_hash_factors
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    import patcher.integrate.vllm as plugin
    from patcher.integrate.vllm.plugin import FACTOR, code_digest

    patch = Patch.create(
        tmp_path / "patch", OP, CANDIDATE, evaluation(), engine="vllm", made_by="test"
    )
    monkeypatch.setattr(Patch, "kernel", lambda _: add_norm)
    Store(tmp_path / "home").apply(patch.folder)
    for name, value in {"PATCHES": "on", "HOME": "home", "RECEIPTS": "receipts"}.items():
        monkeypatch.setenv(f"PATCHER_{name}", value if name == "PATCHES" else str(tmp_path / value))
    # the first is the hash of what the environment says
    stock, started = aot_compile_hash_factors(config)[0], WorkerWrapperBase.init_device

    plugin.register()
    plugin.register()
    hooked: Any = WorkerWrapperBase.init_device
    assert hooked is not started
    assert hooked.plugin._swap.original is started
    # what is left of a worker where there is no device: the wrapper itself is the real one
    worker = WorkerWrapperBase.__new__(WorkerWrapperBase)
    worker.vllm_config, worker.global_rank = config, 3
    worker.worker, worker._worker_extension_cls = SimpleNamespace(init_device=lambda: None), None
    monkeypatch.setenv("PATCHER_RANK", "")  # so that it is put back
    # a folder that the user names, which vLLM takes as it is
    named = tmp_path / "patcher-cache"
    monkeypatch.setattr(config.compilation_config, "cache_dir", str(named))
    try:
        worker.init_device()
        worker.init_device()
        assert "forward" in RMSNorm.__dict__
        # the patch, and the code that rewrites graphs for it
        code = code_digest(Path(sources.__file__).parents[1])
        assert envs.compile_factors()[FACTOR] == f"{patch.digest} {code}"
        own = Path(config.compilation_config.cache_dir)
        assert (own.parent, own.name[:8]) == (named, "patcher-")
        assert aot_compile_hash_factors(config)[0] != stock
        norm = RMSNorm(64, eps=1e-5, dtype=torch.float32)
        norm(torch.randn(2, 64), torch.randn(2, 64))
        hooked.plugin.active.writer.write()
        [receipt] = (tmp_path / "receipts").glob("*.json")
        told = json.loads(receipt.read_text())
        assert (sum(told["calls"].values()), told["rank"]) == (1, 3)

        monkeypatch.setenv("PATCHER_PATCHES", "off")
        worker.init_device()
        assert "forward" not in RMSNorm.__dict__
        assert aot_compile_hash_factors(config)[0] == stock
        assert config.compilation_config.cache_dir == str(named)
    finally:
        hooked.plugin.remove()
    assert WorkerWrapperBase.init_device is started


def test_code_compiled_with_another_patcher_is_not_run(tmp_path: Path) -> None:
    from patcher.integrate.vllm.plugin import code_digest

    (tmp_path / "roles").mkdir()
    (tmp_path / "roles" / "graph.py").write_text("fuse = 1\n")
    first = code_digest(tmp_path)
    assert code_digest(tmp_path) == first
    (tmp_path / "roles" / "graph.py").write_text("fuse = 2\n")
    assert code_digest(tmp_path) != first


@needs_vllm
def test_a_patch_whose_code_changed_is_refused_and_the_engine_runs_without_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    config: Any,
) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from patcher.integrate.changes import SourceChangedError
    from patcher.integrate.vllm import sources
    from patcher.integrate.vllm.plugin import FACTOR, VllmPlugin

    patch = Patch.create(
        tmp_path / "patch", OP, CANDIDATE, evaluation(), engine="vllm", made_by="test"
    )
    monkeypatch.setattr(Patch, "kernel", lambda _: add_norm)
    Store(tmp_path / "home").apply(patch.folder)
    for name, value in {"PATCHES": "on", "HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(f"PATCHER_{name}", value)
    known = json.loads(sources.DIGESTS.read_text())
    part = "vllm.model_executor.layers.layernorm:RMSNorm.forward_native"
    # this vLLM's is another, with one statement that it had not
    known[part]["versions"] = {"0" * 16: ["0.1"]}
    known[part]["statements"] = known[part]["statements"].partition(" ")[2]
    monkeypatch.setattr(sources, "DIGESTS", tmp_path / "sources.json")
    sources.DIGESTS.write_text(json.dumps(known))

    worker = WorkerWrapperBase.__new__(WorkerWrapperBase)
    worker.vllm_config, worker.global_rank = config, 0
    worker.worker, worker._worker_extension_cls = SimpleNamespace(init_device=lambda: None), None
    monkeypatch.setenv("PATCHER_RANK", "")  # so that it is put back
    started, plugin = WorkerWrapperBase.init_device, VllmPlugin()
    plugin.install()
    try:
        worker.init_device()
        assert "forward" not in RMSNorm.__dict__
        assert FACTOR not in sources.module("vllm.envs").environment_variables
        assert f"{part} changed" in caplog.text
        assert "@@ line" in caplog.text
        norm = RMSNorm(64, eps=1e-5, dtype=torch.float32)
        x, residual = torch.randn(2, 64), torch.randn(2, 64)
        assert torch.equal(norm(x, residual)[0], _native(x, residual, norm)[0])

        monkeypatch.setenv("PATCHER_STRICT", "1")
        with pytest.raises(SourceChangedError, match="forward_native changed"):
            worker.init_device()
        assert "forward" not in RMSNorm.__dict__
    finally:
        plugin.remove()
    assert WorkerWrapperBase.init_device is started
