"""The layers of a model that add to a residual, by the text of their classes and by their norms."""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from patcher.integrate.transformers.copied_forward import with_text
from patcher.integrate.transformers.parts import kind_of, written_by_transformers
from patcher.integrate.transformers.roles.norm import holds_norm
from patcher.integrate.transformers.roles.residual_text import (
    STEPS,
    BodyText,
    LayerText,
    body_text,
    layer_text,
)
from patcher.integrate.transformers.swap import Forward


@dataclass(frozen=True)
class DecoderBody:
    """A module that runs layers one after the other."""

    module: Any
    text: BodyText
    """Without a last norm where that is not of the op."""
    first_norms: dict[int, str]
    """By the number of a layer that is taken, the name of the norm that it begins with."""
    handing: frozenset[int]
    """The numbers of those whose last addition goes with the norm that comes next."""

    def following(self, index: int) -> Any:
        """The norm that the model has after a layer now; None if none is known, or if the layer
        does not hand on its sum."""
        layers = getattr(self.module, self.text.layers)
        if index not in self.handing:
            return None
        if index + 1 >= len(layers):
            return self.last_norm()
        name = self.first_norms.get(index + 1)
        return None if name is None else getattr(layers[index + 1], name, None)

    def last_norm(self) -> Any:
        """The norm after the last layer; None if none is known."""
        return None if self.text.norm is None else getattr(self.module, self.text.norm)


@dataclass
class Layers:
    """The layers of one model."""

    calls: dict[torch.nn.Module, int] = field(default_factory=dict)
    """Of each layer that is taken, how often its forward calls the kernel."""
    refused: dict[torch.nn.Module, str] = field(default_factory=dict)
    """Of each other layer with a residual, why it keeps the model's own code."""
    places: dict[torch.nn.Module, tuple[DecoderBody, int]] = field(default_factory=dict)
    """Where layers are of which a body is known."""
    bodies: list[DecoderBody] = field(default_factory=list)
    norms: dict[torch.nn.Module, torch.nn.Module] = field(default_factory=dict)
    """The norms that are taken with the addition before them, with the layer that adds."""


def find_layers(model: Any, is_norm: Callable[[Any], bool]) -> Layers:
    """Find the layers of a model that add to a residual.

    Args:
        model: the model.
        is_norm: whether a module, which holds what a norm does, computes what the op does.
    """
    found = Layers()
    fitting: dict[torch.nn.Module, tuple[str, ...]] = {}
    listed = (each for part in model.modules() for each in _listed(part))
    for layer in dict.fromkeys(listed):
        text = text_of(kind_of(layer))
        if text is None or isinstance(text, str):
            # of other modules with a residual, those with such a norm are told
            if text is not None and any(map(holds_norm, layer.children())):
                found.refused[layer] = text
        elif not all(_fits(layer, name, is_norm) for name in text.norms):
            found.refused[layer] = "its norms are of another kind"
        else:
            fitting[layer] = text.norms
    for module in model.modules():
        if (body := _body_of(module, fitting, is_norm)) is not None:
            found.bodies.append(body)
            for index, layer in enumerate(getattr(module, body.text.layers)):
                if layer in fitting:
                    found.places.setdefault(layer, (body, index))
    for layer, names in fitting.items():
        place = found.places.get(layer)
        if calls := len(names) - 1 + (place is not None and place[1] in place[0].handing):
            found.calls[layer] = calls
            taken = [getattr(layer, name) for name in names[1:]]
            if place is not None and place[1] in place[0].handing:
                taken.append(place[0].following(place[1]))
            found.norms |= dict.fromkeys(taken, layer)
        else:
            found.refused[layer] = "no norm of its sum is known to follow"
    return found


def norm_names(layer: Any) -> tuple[str, ...]:
    """The names of the norms of a layer whose text is known, in the order of their calls."""
    text = text_of(kind_of(layer))
    assert isinstance(text, LayerText), "its text is known"
    return text.norms


def text_forward(layer: Any, steps: object) -> Forward:
    """A copy of a layer's forward in which `steps` adds and normalises."""
    kind = kind_of(layer)
    text = text_of(kind)
    assert isinstance(text, LayerText), "its text is known"
    made: Forward = with_text(kind.forward, text.forward, STEPS, steps)
    return made


def text_of(kind: Any) -> LayerText | str | None:
    """What the text of a class of layers says; see `layer_text`."""
    return _layer_text(kind.forward)


def body_text_of(kind: Any) -> BodyText | None:
    """What the text of a class that runs layers says; see `body_text`."""
    return _body_text(kind.forward)


@lru_cache(maxsize=512)
def _layer_text(forward: Any) -> LayerText | str | None:
    read = _read(forward)
    if read is None:
        return None
    found = layer_text(read)
    if isinstance(found, LayerText) and with_text(forward, found.forward, STEPS, None) is None:
        return "a decorator of its forward cannot be copied"
    return found


@lru_cache(maxsize=512)
def _body_text(forward: Any) -> BodyText | None:
    read = _read(forward)
    return None if read is None else body_text(read)


def _body_of(module: Any, fitting: Any, is_norm: Callable[[Any], bool]) -> DecoderBody | None:
    text = body_text_of(kind_of(module))
    layers = getattr(module, text.layers, None) if text is not None else None
    if text is None or not isinstance(layers, torch.nn.ModuleList):
        return None
    first = {at: fitting[layer][0] for at, layer in enumerate(layers) if layer in fitting}
    if not first:
        return None
    if text.norm is not None and not _fits(module, text.norm, is_norm):
        text = replace(text, norm=None)
    followed = {*(index - 1 for index in first), *((len(layers) - 1,) if text.norm else ())}
    handing = {index for index in first if _hands_on(layers[index])}
    return DecoderBody(module, text, first, frozenset(handing & followed))


def _hands_on(layer: Any) -> bool:
    kind = kind_of(layer)
    text = text_of(kind)
    if not (isinstance(text, LayerText) and text.hands_on):
        return False
    # others' code around a forward may change what it returned
    inner = inspect.unwrap(kind.forward)
    calls = kind.__call__
    plain = calls is torch.nn.Module.__call__ or written_by_transformers(calls)
    return plain and written_by_transformers(kind.forward, within=inner)


def _fits(module: Any, name: str, is_norm: Callable[[Any], bool]) -> bool:
    norm = getattr(module, name, None)
    return isinstance(norm, torch.nn.Module) and holds_norm(norm) and is_norm(norm)


def _listed(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    if isinstance(module, torch.nn.ModuleList):
        yield from module


def _read(forward: Any) -> ast.FunctionDef | None:
    """The text of a forward without its decorators; None if what runs has another, or none."""
    function = inspect.unwrap(forward)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return None
    try:
        lines, number = inspect.getsourcelines(function)
        text = "".join(lines)
        # an indented one is of a class, whose texts may have lines that are indented less
        tree = ast.parse(f"if True:\n{text}" if text[:1].isspace() else text)
    except (OSError, SyntaxError):
        return None
    node = tree.body[0]
    if isinstance(node, ast.If):
        node = node.body[0]
        number -= 1
    if not isinstance(node, ast.FunctionDef):
        return None
    ast.increment_lineno(node, number - 1)
    node.decorator_list = []
    return node if _is_text_of(node, code) else None


def _is_text_of(node: ast.FunctionDef, code: CodeType) -> bool:
    """Whether a text is that of a code that runs: its file may have been changed meanwhile."""
    compiled = compile(ast.Module([node], []), code.co_filename, "exec", dont_inherit=True)
    made = [each for each in compiled.co_consts if isinstance(each, CodeType)]
    own = next((each for each in made if each.co_name == code.co_name), None)
    return own is not None and _instructions(own) == _instructions(code)


def _instructions(code: CodeType) -> list[tuple[str, object]]:
    """What a code does. How it calls a function of an imported module, and so how far its jumps
    go, depends on the rest of the file."""
    return [
        (each.opname.replace("LOAD_METHOD", "LOAD_ATTR"), None if jumps else each.argval)
        for each in dis.get_instructions(code)
        if each.opname != "PUSH_NULL"
        for jumps in (each.opcode in (*dis.hasjrel, *dis.hasjabs) or _is_code(each.argval),)
    ]


def _is_code(value: object) -> bool:
    return isinstance(value, CodeType)
