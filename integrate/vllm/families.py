"""Which layers each architecture of vLLM builds, read from its files without an import.

From the class that the registry names, the classes and functions that it refers to are followed
through the files of models, and so are architectures that it names in a string, as a multimodal
model names its language model. So a name that is reached may not be called for every checkpoint:
the engine's own survey of a loaded model is exact.

Flat models (`vllm/models/<name>`) are written for one GPU and one checkpoint. They often pass the
weight of a shared layer to a kernel of their own, which no patch point reaches.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from patcher.integrate.vllm.tree import Tree

_MODELS = "vllm.model_executor.models"
_FLAT = "vllm.models"
_OTHER_DEVICES = frozenset(("amd", "cpu", "xpu"))
RAW_WEIGHTS = "renormalize=False"
"""What a definition reaches that makes experts with this argument, and no routing of its own."""


@dataclass(frozen=True)
class Architecture:
    """One entry of vLLM's model registry."""

    name: str
    """As in `architectures` of a checkpoint's `config.json`."""
    module: str
    reaches: frozenset[str]
    """Classes and functions that its class refers to, directly or through other models, and the
    attributes that these set."""

    @property
    def is_flat(self) -> bool:
        return self.module.startswith(f"{_FLAT}.")

    def builds(self, layers: tuple[str, ...]) -> bool:
        """Whether it reaches each of the layers; `A|B` is either of two names."""
        return all(self.reaches.intersection(each.split("|")) for each in layers)


def architectures(tree: Tree, names: Iterable[str] | None = None) -> dict[str, Architecture]:
    """The architectures of a vLLM by name; by default all, which takes 10 to 20 seconds."""
    registry = _registry(tree.folder)
    files = _Files(tree.folder, registry)
    found: dict[str, Architecture] = {}
    for name in registry if names is None else [name for name in names if name in registry]:
        module, cls = registry[name]
        where = _full(module)
        found[name] = Architecture(name, where, frozenset(files.reached(where, cls)))
    return found


def _registry(folder: Path) -> dict[str, tuple[str, str]]:
    """Module and class by architecture; each table of the registry is a literal."""
    path = folder / f"{_MODELS.replace('.', '/')}/registry.py"
    found: dict[str, tuple[str, str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    module, cls = ast.literal_eval(value)
                    found[str(key.value)] = module, cls
    return found


@dataclass(frozen=True)
class _File:
    """A module of models: what it defines and imports."""

    module: str
    tree: ast.Module
    is_package: bool

    @cached_property
    def defined(self) -> dict[str, set[str]]:
        """The names that each definition refers to."""
        found: dict[str, set[str]] = {}
        for node in self.tree.body:
            for name in _names_of(node):
                found.setdefault(name, set()).update(_referred(node))
        return found

    @cached_property
    def imported(self) -> dict[str, list[tuple[str, str]]]:
        """Module and name behind each imported name, under conditions and in functions, too."""
        found: dict[str, list[tuple[str, str]]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                origin = self._origin(node)
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, []).append((origin, alias.name))
        return found

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


class _Files:
    """The files of models, each read once."""

    def __init__(self, folder: Path, registry: Mapping[str, tuple[str, str]]) -> None:
        self._folder, self._registry = folder, registry
        self._read: dict[str, _File | None] = {}

    def reached(self, module: str, name: str) -> set[str]:
        """Every name that a definition refers to through files of models."""
        seen: set[tuple[str, str]] = set()
        waiting = [(module, name)]
        while waiting:
            where, what = waiting.pop()
            if (where, what) in seen:
                continue
            seen.add((where, what))
            file = self._file(where)
            if file is not None:
                waiting += [(where, each) for each in file.defined.get(what, ())]
                waiting += file.imported.get(what, ())
            if what in self._registry and not (file and what in file.defined):
                module, cls = self._registry[what]
                waiting.append((_full(module), cls))
        return {what for _, what in seen}

    def _file(self, module: str) -> _File | None:
        if module not in self._read:
            self._read[module] = self._parse(module)
        return self._read[module]

    def _parse(self, module: str) -> _File | None:
        inside = module.split(".")
        if not module.startswith((f"{_MODELS}.", f"{_FLAT}.")) or _OTHER_DEVICES & set(inside):
            return None
        path = self._folder.joinpath(*inside)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                tree = ast.parse(file.read_text(encoding="utf-8"))
                return _File(module, tree, file.name == "__init__.py")
        return None


def _names_of(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module binds, imports aside."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.If | ast.Try):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield from _names_of(child)


def _referred(node: ast.AST) -> set[str]:
    """Names, what attributes are given, and strings that may name an architecture: a multimodal
    model builds its language model by one."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    given = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    found |= {each.attr for each in given if isinstance(each.ctx, ast.Store)}
    texts = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
    if any(_keeps_weights(each) for each in ast.walk(node) if isinstance(each, ast.Call)):
        found.add(RAW_WEIGHTS)
    return found | {text for text in texts if isinstance(text, str) and text.isidentifier()}


def _keeps_weights(call: ast.Call) -> bool:
    given = {each.arg: each.value for each in call.keywords}
    renormalised = given.get("renormalize")
    raw = isinstance(renormalised, ast.Constant) and renormalised.value is False
    return raw and "custom_routing_function" not in given


def _full(module: str) -> str:
    return module if module.startswith("vllm.") else f"{_MODELS}.{module}"
