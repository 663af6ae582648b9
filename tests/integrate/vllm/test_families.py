"""Which layers an architecture builds, by files; a small package stands for vLLM's models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from patch_sample import CANDIDATE, OP, evaluation
from vllm_here import needs_vllm

from patcher import bench
from patcher.bench.engines.architecture import published_config
from patcher.integrate import Patch, verify
from patcher.integrate.layers import StepCalls
from patcher.integrate.places import calls_in_step
from patcher.integrate.vllm import families
from patcher.integrate.vllm.places import LAYERS, RoleLayers, must_fit, of_model
from patcher.integrate.vllm.points import POINTS
from patcher.integrate.vllm.table import FAMILIES, page
from patcher.integrate.vllm.tree import Tree

FILES = {
    "vllm/model_executor/models/registry.py": """
_TEXT = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "OlderForCausalLM": ("llama", "OlderForCausalLM"),
    "SeesForConditionalGeneration": ("sees", "SeesForConditionalGeneration"),
    "Step5ForCausalLM": ("vllm.models.step5", "Step5ForCausalLM"),
}
_ALL = {**_TEXT}
""",
    "vllm/model_executor/models/parts.py": """
from vllm.model_executor.layers.linear import RowParallelLinear as Row

def project(size):
    return Row(size, size)
""",
    "vllm/model_executor/models/llama.py": """
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from .parts import project

class Layer:
    norm_class = RMSNorm

class LlamaForCausalLM:
    def __init__(self, size):
        self.layers = [Layer() for _ in range(2)]
        self.output = project(size)

class OlderForCausalLM:
    norm = GemmaRMSNorm
""",
    "vllm/model_executor/models/sees.py": """
class SeesForConditionalGeneration:
    def __init__(self, build): self.language_model = build(architectures=["LlamaForCausalLM"])
""",
    "vllm/models/step5/__init__.py": """
if True:
    from .nvidia.model import Step5ForCausalLM
else:
    from .amd.model import Step5ForCausalLM
""",
    "vllm/models/step5/nvidia/model.py": """
from vllm.model_executor.layers.linear import ReplicatedLinear
class Step5ForCausalLM:
    def __init__(self): self.output = ReplicatedLinear(1, 1)
""",
    "vllm/models/step5/amd/model.py": """
from vllm.model_executor.layers.layernorm import RMSNorm
class Step5ForCausalLM:
    def __init__(self): self.norm = RMSNorm(1)
""",
    "vllm-9.1.dist-info/METADATA": "Name: vllm\nVersion: 9.1\n",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    for name, text in FILES.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = Tree(tmp_path / "tree")
    monkeypatch.setattr(Tree, "installed", lambda: found)
    return found


def test_every_point_has_layers() -> None:
    assert set(POINTS) == set(LAYERS)


def test_names_are_followed_through_the_files_of_models(tree: Tree) -> None:
    known = families.architectures(tree)
    llama, older, sees, step = known.values()
    assert sees.builds(("RMSNorm", "RowParallelLinear")), "of the language model that it names"
    assert llama.builds(("RMSNorm", "ReplicatedLinear|RowParallelLinear"))
    assert not llama.builds(("GemmaRMSNorm",)), "another class of the same file"
    assert llama.builds(("layers", "output")), "what its attributes are called"
    assert older.builds(("GemmaRMSNorm",))
    assert not older.builds(("RMSNorm",))
    assert (llama.is_flat, step.is_flat) == (False, True)
    assert step.builds(("ReplicatedLinear",))
    assert not step.builds(("RMSNorm",)), "what other vendors' GPUs run"
    assert list(families.architectures(tree, ["OlderForCausalLM", "gone"])) == ["OlderForCausalLM"]


def test_a_patch_says_whether_a_model_has_layers_for_it(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patcher.integrate.patch.engine_version", lambda engine: "9.1")
    patch = Patch.create(
        tmp_path / "patch", OP, CANDIDATE, evaluation(), engine="vllm", made_by="test"
    )

    def says(**config: Any) -> tuple[bool, str]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        last = verify(patch, published_config(str(tmp_path))).checks[-1]
        assert last.name == "model"
        return last.passed, last.detail

    assert says(architectures=["LlamaForCausalLM"]) == (
        True,
        "LlamaForCausalLM has layers of add_norm, by vllm.model_executor.models.llama; a step of "
        "decode calls them an unknown number of times until it is loaded",
    )
    passed, why = says(architectures=["Step5ForCausalLM"])
    assert not passed
    assert why.endswith("vllm.models.step5 does not refer to RMSNorm")
    assert says(architectures=["Nobody"]) == (False, "vLLM 9.1 has no model Nobody")
    assert "flat" in of_model("linear", lambda: {"architectures": ["Step5ForCausalLM"]})
    assert [check.name for check in verify(patch).checks][-1] == "kernel"
    with pytest.raises(bench.UsageError, match="there is no folder or file"):
        published_config(str(tmp_path / "nowhere"))
    assert published_config("gpt-oss-20b")["quantization_config"]["quant_method"] == "mxfp4"


@pytest.mark.parametrize(
    ("model", "calls"),
    [  # attention, experts, states; as the models' publishers say
        ("gpt-oss-20b", (24, 24, None)),
        ("qwen3-8b", (36, None, None)),
        ("qwen3-30b-a3b-fp8", (48, 48, None)),
        ("qwen3-next-80b-a3b", (12, 48, 36)),
        ("granite-4.0-h-tiny", (4, 40, 36)),
        ("glm-4.7-flash", (47, 46, None)),
    ],
)
def test_a_config_tells_how_often_a_step_comes_by(
    model: str, calls: tuple[int | None, ...]
) -> None:
    config = published_config(model)
    points = "decode_attention", "experts.fp8_block", "mamba2_decode"
    found = [calls_in_step("vllm", point, config) for point in points]
    told = [each and each.taken for each in found]
    # whether it has layers with a state is for `of_model` to say
    assert tuple(told[: 3 if calls[2] else 2]) == calls[: 3 if calls[2] else 2]
    assert calls_in_step("vllm", "sampler.greedy", config) == StepCalls(1)
    assert calls_in_step("vllm", "add_norm", config) is None, "not by the config alone"
    assert calls_in_step("vllm", "decode_attention", {**config, "model_type": "newest"}) is None


def test_experts_that_are_quantised_are_not_promised_as_plain_ones() -> None:
    must_fit("experts.plain", published_config("granite-4.0-h-tiny"))
    with pytest.raises(bench.VerificationError, match=r"of the experts of this .* are fp8"):
        must_fit("experts.plain", published_config("qwen3-30b-a3b-fp8"))


def test_weights_of_another_format_are_told(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    point = "experts.down.mxfp4"
    monkeypatch.setitem(LAYERS, point, RoleLayers(("RMSNorm",), "mxfp4"))  # type: ignore[arg-type]
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(bench.VerificationError, match="this LlamaForCausalLM are not quantised"):
        of_model(point, lambda: config)
    fp8, mxfp4 = ({**config, "quantization_config": {"quant_method": q}} for q in ("fp8", "mxfp4"))
    with pytest.raises(bench.VerificationError, match="this LlamaForCausalLM are fp8"):
        of_model(point, lambda: fp8)
    assert of_model(point, lambda: mxfp4)
    assert of_model(point, lambda: {**config, "text_config": mxfp4})
    for odd, said in (({"text_config": [1]}, "text_config"), ({"architectures": 7}, "no model")):
        with pytest.raises(bench.PatcherError, match=said):
            of_model(point, lambda changed={**config, **odd}: changed)  # type: ignore[misc]
    # and of another formula, by the text model's own word before an older one
    monkeypatch.setitem(LAYERS, point, RoleLayers(("RMSNorm",), None, ("gelu",)))  # type: ignore[arg-type]
    older = {
        **config,
        "text_config": {"hidden_act": "gelu", "hidden_activation": "GELU_pytorch_tanh"},
    }
    with pytest.raises(bench.VerificationError, match=r"takes gelu, .* is gelu_pytorch_tanh"):
        of_model(point, lambda: older)
    with pytest.raises(bench.VerificationError, match="is gelu_pytorch_tanh"):
        of_model(point, lambda: {**config, "model_type": "gemma3_text"})  # by default
    assert of_model(point, lambda: config)


def test_the_page_says_role_by_role_what_a_version_and_a_family_have(tree: Tree) -> None:
    points = {name: POINTS[name] for name in ("add_norm", "linear")}
    lines = page(points, [tree]).splitlines()
    assert "| `linear` | `linear` | plain | refused: 4 of 5 parts are new |" in lines
    assert "| `add_norm` | 2 |" in lines
    assert "| `linear` | 3, 1 flat |" in lines
    assert "| all | 4, 1 flat |" in lines
    assert "| Llama 2, 3 | yes | yes |" in lines
    assert "| Step 5 (flat) | no | partly |" in lines


@needs_vllm
def test_vllms_own_registry_is_read() -> None:
    from vllm.model_executor.models.registry import _VLLM_MODELS

    tree = Tree.installed()
    registry = families._registry(tree.folder)
    assert registry.keys() >= _VLLM_MODELS.keys()
    assert {name: tuple(registry[name]) for name in _VLLM_MODELS} == _VLLM_MODELS
    shown = families.architectures(tree, FAMILIES.values())
    assert shown["LlamaForCausalLM"].builds(("RMSNorm", "RowParallelLinear", "get_rope"))
    assert not shown["LlamaForCausalLM"].builds(("FusedMoE|FusedMoEFactory",))
    assert shown["Qwen3MoeForCausalLM"].builds(("FusedMoE|FusedMoEFactory",))


_ROUTED = """
from vllm.model_executor.layers.fused_moe import FusedMoE
class ModelForCausalLM:
    def __init__(self, config): self.experts = FusedMoE(1, {arguments})
"""


@pytest.mark.parametrize(
    ("arguments", "stated", "taken"),
    [
        ("renormalize=False", None, True),
        ("renormalize=False, custom_routing_function=own", None, False),
        ("renormalize=config.norm_topk_prob", False, True),
        ("renormalize=config.norm_topk_prob", True, False),
        ("renormalize=config.norm_topk_prob", None, False),
        ("e_score_correction_bias=bias.e_score_correction_bias", True, False),
    ],
)
def test_routers_without_renormalised_weights_are_promised_to_the_point_that_takes_them(
    arguments: str, stated: bool | None, taken: bool, tree: Tree
) -> None:
    models = tree.folder / "vllm/model_executor/models"
    (models / "model.py").write_text(_ROUTED.format(arguments=arguments))
    table = '_MODELS = {"ModelForCausalLM": ("model", "ModelForCausalLM")}\n'
    (models / "registry.py").write_text(table)
    config = {"architectures": ["ModelForCausalLM"]}
    config |= {} if stated is None else {"norm_topk_prob": stated}
    if taken:
        said = of_model("router.grouped_topk", lambda: config)
        assert said.startswith("ModelForCausalLM has layers of router.grouped_topk")
    else:
        with pytest.raises(bench.VerificationError, match=r"has no layer of router\.grouped_topk"):
            of_model("router.grouped_topk", lambda: config)
