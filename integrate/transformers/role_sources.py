"""What the files of an architecture alone say of its roles: read, not imported.

An import of transformers takes seconds. So forwards and functions that were tried before, by the
digests in `roles.json`, are not tried again where no setting of a model chooses among them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from patcher.integrate.source_parts import definitions
from patcher.integrate.transformers.residual_text import LayerText, layer_text

_ROTATION = ["q", "k", "cos", "sin"]
_OF_ROUTER = {"weight", "bias", "top_k", "hidden_dim"}
"""Fields of a router that say nothing of how it chooses."""
_GIVEN = {"position_embeddings", "position_ids", "attention_mask"}
"""What an attention that is tried alone is given beside its states."""
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.Match, ast.BoolOp)


def says(point: str, file: Path) -> bool | None:
    """Whether a model of a file has what a point takes; None where only a built one tells."""
    if point == "add_norm":
        return _adds(file)
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
    calls = [
        (function, may or not _is_called_alone(node))
        for name, node, _ in definitions(file)
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
    """False where no forward of a file adds and normalises; its norms are not in its text."""
    forwards = (node for name, node, _ in definitions(file) if name.endswith(".forward"))
    if any(isinstance(layer_text(each), LayerText) for each in forwards):
        return None
    return None if re.search(r"import \w*Layer\b", file.read_text(encoding="utf-8")) else False


@cache
def adding_norms(file: Path) -> frozenset[str]:
    """The classes of the norms in the only class of a file that adds and normalises; none where
    there are several, or where its constructor does not name them."""
    methods = {name: node for name, node, _ in definitions(file)}
    texts = {
        name.removesuffix(".forward"): text
        for name, node in methods.items()
        if name.endswith(".forward") and isinstance(text := layer_text(node), LayerText)
    }
    if len(texts) != 1:
        return frozenset()
    [(kind, text)] = texts.items()
    made: dict[str, set[str]] = {name: set() for name in text.norms}
    for each in ast.walk(methods.get(f"{kind}.__init__", ast.Pass())):
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Attribute):
            called = each.value.func if isinstance(each.value, ast.Call) else None
            if each.targets[0].attr in made:
                made[each.targets[0].attr].add(ast.unparse(called) if called else "")
    return frozenset().union(*made.values()) if all(made.values()) else frozenset()


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
