"""The page of docs that says which role of which model a patch can take, by version of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from patcher.integrate.vllm import sources
from patcher.integrate.vllm.families import Architecture, architectures
from patcher.integrate.vllm.places import LAYERS, RoleLayers
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.tree import Tree

FAMILIES: Mapping[str, str] = {
    "Llama 2, 3": "LlamaForCausalLM",
    "Mistral": "MistralForCausalLM",
    "Qwen 2": "Qwen2ForCausalLM",
    "Qwen 3": "Qwen3ForCausalLM",
    "Qwen 3 MoE": "Qwen3MoeForCausalLM",
    "Qwen 3 Next": "Qwen3NextForCausalLM",
    "Mixtral": "MixtralForCausalLM",
    "Gemma 3": "Gemma3ForCausalLM",
    "Phi 3": "Phi3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "Granite 4 hybrid": "GraniteMoeHybridForCausalLM",
    "Nemotron-H": "NemotronHForCausalLM",
    "GLM 4.5": "Glm4MoeForCausalLM",
    "DeepSeek V3": "DeepseekV3ForCausalLM",
    "DeepSeek V3.2": "DeepseekV32ForCausalLM",
    "DeepSeek V4": "DeepseekV4ForCausalLM",
    "Kimi K3": "KimiK3ForConditionalGeneration",
    "MiniMax M3": "MiniMaxM3SparseForConditionalGeneration",
    "Step 5": "Step5ForCausalLM",
}
"""Families that the page shows, and their architecture."""
_HEAD = """# vLLM by role, version and model

`python -m patcher.integrate.vllm.points --tree FOLDER --table docs/reference/vllm.md` writes this
page from unpacked wheels, a `--tree` for each version; `make engines` fetches those.

A patch point is of a layer's role, not of a model. It serves a version of vLLM if the code that it
replaces or relies on is, part by part, code for which it was written. The number of the version
does not matter: a release in which those parts are the same is served untouched. Any other is
refused when a worker starts, with what is new in it, and the engine runs without the patch.
"""
_PASSES = """## Passes of vLLM's compiler

They look for vLLM's own operators, and that of a patch is opaque to them. Where one of these is on
and has something to fuse, the patch is refused. `fuse_norm_quant` and `fuse_act_quant` have nothing
to fuse in a model without quantised weights. No pass looks for what the other roles replace, or the
log warns of it: [passes that lose it](features.md#passes-that-lose-what-a-patch-replaces).
"""
_MODELS = """## Models

Read from the files of models, not from a run: *yes* says that an architecture refers to the layer.
Quantised weights, LoRA or a parallel layout may still leave it to vLLM. `patcher receipts` says
what took a layer and what refused, and why. *if mxfp4*: the role is that of checkpoints with such
weights; *if silu*: of models whose config.json names that activation. What small models ran is in
[another table](models.md).

A *flat* model (`vllm/models/`) is written for its own checkpoint and often passes a layer's weight
to a kernel of its own. There *partly* says that some layers of the role may not be reached.
"""


def page(points: Mapping[str, type[VllmPoint]], trees: Sequence[Tree]) -> str:
    """The page as Markdown.

    Args:
        points: the patch points by name.
        trees: the versions, the oldest first.
    """
    versions = [tree.version() for tree in trees]
    known = [architectures(tree) for tree in trees]
    lines = [_HEAD, "## Roles", "", *_header(["role", "op", "weights", *versions])]
    for name, point in points.items():
        states = [_state(point.parts, tree) for tree in trees]
        lines.append(_row([f"`{name}`", f"`{point.op}`", LAYERS[name].weights or "plain", *states]))
    lines += ["", "Architectures that refer to the layer, and flat ones among them:", ""]
    lines += _header(["role", *versions])
    for name in points:
        built = [[one for one in all_.values() if one.builds(LAYERS[name].names)] for all_ in known]
        lines.append(_row([f"`{name}`", *map(_count, built)]))
    lines.append(_row(["all", *(_count(all_.values()) for all_ in known)]))
    lines += ["", _PASSES]
    for name, point in points.items():
        if point.fused_by:
            lines.append(f"- `{name}`: {', '.join(f'`{each}`' for each in point.fused_by)}")
    lines += ["", _MODELS, *_header(["model", *(f"`{name}`" for name in points)])]
    for family, architecture in FAMILIES.items():
        found = {
            v: all_[architecture]
            for v, all_ in zip(versions, known, strict=True)
            if architecture in all_
        }
        if found:
            cells = [_cell(LAYERS[name], found) for name in points]
            lines.append(_row([_family(family, found, versions), *cells]))
    return "\n".join([*lines, ""])


def _state(parts: tuple[str, ...], tree: Tree) -> str:
    unread = sources.unread(parts, tree)
    return f"refused: {len(unread)} of {len(parts)} parts are new" if unread else "yes"


def _count(found: Iterable[Architecture]) -> str:
    some = list(found)
    flat = sum(one.is_flat for one in some)
    return f"{len(some)}, {flat} flat" if flat else str(len(some))


def _family(family: str, found: Mapping[str, Architecture], versions: Sequence[str]) -> str:
    """The name, with where it is flat and since when it exists, if that differs by version."""
    flat = [version for version, one in found.items() if one.is_flat]
    notes = [] if list(found) == list(versions) else [f"in {', '.join(found)}"]
    if flat:
        notes.append("flat" if flat == list(found) else f"flat in {', '.join(flat)}")
    return f"{family} ({'; '.join(notes)})" if notes else family


def _cell(layers: RoleLayers, found: Mapping[str, Architecture]) -> str:
    """Whether the family has the role: one word if all versions agree, else a word a version."""
    words = {}
    for version, one in found.items():
        word = "partly" if one.is_flat else "yes"
        if needs := layers.weights or " or ".join(layers.activations):
            word = f"{word}, if {needs}" if one.is_flat else f"if {needs}"
        words[version] = word if one.builds(layers.names) else "no"
    first = next(iter(words.values()))
    others = [f"{word} in {version}" for version, word in words.items() if word != first]
    return "; ".join([first, *others])


def _header(cells: Sequence[str]) -> list[str]:
    return [_row(cells), _row(["---"] * len(cells))]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
