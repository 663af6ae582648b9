"""What the files of an architecture alone say of its roles: read, not imported.

An import of transformers takes seconds. So forwards and functions that were tried before, by the
digests in `roles.json`, are not tried again where no setting of a model chooses among them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

from patcher.integrate.source_parts import definitions
from patcher.integrate.transformers.norm_sources import norm_classes
from patcher.integrate.transformers.roles.residual_text import LayerText, layer_text

_ROTATION = ["q", "k", "cos", "sin"]
_OF_ROUTER = {"weight", "bias", "top_k", "hidden_dim"}
"""Fields of a router that say nothing of how it chooses."""
_GIVEN = {"position_embeddings", "position_ids", "attention_mask"}
"""What an attention that is tried alone is given beside its states."""
_EXPERTS = re.compile(r"^@use_experts_implementation\b.*\n(?:@.*\n)*class (\w+)", re.MULTILINE)
"""Classes of experts that a function of transformers' registry runs."""
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.Match, ast.BoolOp)


def says(point: str, file: Path) -> bool | None:
    """Whether a model of a file has what a point takes; None where only a built one tells."""
    if point == "add_norm":
        return _adds(file)
    if point.startswith("experts"):
        return _has_experts(point, file)
    return _rotates(file) if point == "rotation" else _routes(file)


def rotations(file: Path) -> Iterator[tuple[str, str]]:
    """The functions of a file that take query, key, cosines and sines, each with the digest of its
    code and of those that it calls."""
    functions = {
        name: (node, digest) for name, node, digest in definitions(file) if "." not in name
    }
    for name, (node, digest) in functions.items():
        if [each.arg for each in node.args.args][:4] == _ROTATION:
            called = dict.fromkeys(each for each, _ in _calls(node, functions, False))
            yield name, "+".join([digest, *(functions[each][1] for each in called)])


def routers(file: Path) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """The classes of a file whose forward chooses the top k, with that and its digest."""
    for name, node, digest in definitions(file):
        kind, _, method = name.partition(".")
        takes_one = len(node.args.args) == 2
        if method == "forward" and takes_one and {"topk", "top_k"} <= _names_in(node):
            yield kind, node, digest


def _rotates(file: Path) -> bool | None:
    here = dict(rotations(file))
    if not here:
        return None if "import apply_rotary" in file.read_text(encoding="utf-8") else False
    known = {name: node for name, node, _ in definitions(file)}
    calls = [
        (function, may or not (_is_called_alone(node) and _keeps_config(known, name)))
        for name, node in known.items()
        if name.endswith(".forward")
        for function, may in _calls(node, here, False)
    ]
    if not calls:
        return False
    return True if all(not may and here[name] in _tried() for name, may in calls) else None


def _is_called_alone(forward: ast.FunctionDef) -> bool:
    """Whether an attention needs no more than what it is tried with alone."""
    taken = forward.args
    first = [each.arg for each in (*taken.posonlyargs, *taken.args)][2:]
    needed = {*first[: len(first) - len(taken.defaults)]} if first else set()
    only = zip(taken.kwonlyargs, taken.kw_defaults, strict=True)
    needed |= {each.arg for each, default in only if default is None}
    return "position_embeddings" in first and needed <= _GIVEN


def _adds(file: Path) -> bool | None:
    """False where no forward of a file adds and normalises. True where a layer that each of its
    models has does so, with norms that were read before; what else they are has to be built."""
    known = {name: node for name, node, _ in definitions(file)}
    texts = {
        name.removesuffix(".forward"): text
        for name, node in known.items()
        if name.endswith(".forward") and isinstance(text := layer_text(node), LayerText)
    }
    if not texts:
        own = file.read_text(encoding="utf-8")
        return None if re.search(r"import \w*Layer\b", own) else False
    right, always = {*norm_classes(file)}, built_always(file)
    for kind, text in texts.items():
        fields = _made_fields(known.get(f"{kind}.__init__"))
        if kind in always and all(fields.get(norm) in right for norm in text.norms):
            return True
    return None


def _made_fields(made: ast.FunctionDef | None) -> dict[str, str]:
    """The classes of the fields that a constructor sets, whatever its settings."""
    found: dict[str, str] = {}
    for each in made.body if made is not None else ():
        match each:
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id="self"), attr=field)],
                value=ast.Call(func=ast.Name(id=kind)),
            ):
                found[field] = kind
    return found


def _has_experts(point: str, file: Path) -> bool | None:
    """False where no class of a file has its experts run by a function of transformers' registry.
    True where each of its models has such; what a module of experts computes, only trying tells."""
    kinds = {*_EXPERTS.findall(file.read_text(encoding="utf-8"))}
    if not kinds:
        return False
    return True if point == "experts.sum" and kinds <= built_always(file) else None


def built_always(file: Path) -> set[str]:
    """The classes that each model of a file builds, whatever its settings."""
    made = {
        name.removesuffix(".__init__"): node
        for name, node, _ in definitions(file)
        if name.endswith(".__init__")
    }
    parts = {
        kind: {part for part, may in _calls(node, made.keys(), False) if not may}
        for kind, node in made.items()
    }
    bodies = [kind for kind in made if kind.endswith("Model") and parts[kind]]
    return set[str].intersection(*(_below(kind, parts) for kind in bodies)) if bodies else set()


def _below(kind: str, parts: Mapping[str, set[str]]) -> set[str]:
    found = {kind}
    while further := set[str]().union(*(parts[each] for each in found)) - found:
        found |= further
    return found


def _keeps_config(known: Mapping[str, ast.FunctionDef], forward: str) -> bool:
    """Whether an attention has its model's configuration, by which it and its angles are tried."""
    made = known.get(forward.removesuffix("forward") + "__init__")
    stores = (node for node in ast.walk(made) if isinstance(node, ast.Attribute)) if made else ()
    return any(each.attr == "config" and isinstance(each.ctx, ast.Store) for each in stores)


def _routes(file: Path) -> bool | None:
    found = list(routers(file))
    if not found:
        return False
    plain = all(digest in _tried() and has_no_settings(node) for _, node, digest in found)
    return True if plain else None


def has_no_settings(forward: ast.AST) -> bool:
    """Whether the forward of a router reads no field that says how it chooses."""
    return _fields(forward) <= _OF_ROUTER


def _calls(node: ast.AST, names: Collection[str], may: bool) -> Iterator[tuple[str, bool]]:
    """The calls of some functions below a node, and whether a branch decides about each."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
        yield node.func.id, may
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, names, may or isinstance(node, _BRANCHES))


def _names_in(node: ast.AST) -> set[str]:
    return {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def _fields(node: ast.AST) -> set[str]:
    """The fields of the module itself that a forward reads."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


@cache
def _tried() -> frozenset[str]:
    """The digests of what does as an op does: of rotations and of forwards of routers."""
    kept = json.loads(Path(__file__).with_name("roles.json").read_text(encoding="utf-8"))
    return frozenset(digest for digests in kept.values() for digest in digests)
