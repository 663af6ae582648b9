"""Other sizes and values of a module's inputs, at which its graph has to be the module."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

from .values import Unfit, quiet

OwnAxes = dict[str, dict[int, str]]
"""What the free axes of inputs are: a name, or arithmetic over names that other axes have alone."""
DRAWS = 4
"""Of a module's integers, since one draw may be fit by chance: offsets that begin with 0."""


def tried(
    program: Any,
    module: Any,
    inputs: list[Any],
    symbols: dict[str, Any],
    notes: list[str],
    own: OwnAxes | None = None,
) -> list[dict[str, int]]:
    """Other sizes of the symbols at which the module itself gives what the graph gives.

    Each symbol is given its size in the file; the first, which is swept, what it is a multiple of.

    Args:
        own: what the file says of its axes. Those of one name have one size; sizes of 1 are tried,
            too, and each axis is swept.
    """
    trials = Trials(program, module, inputs, own)
    for name, symbol in symbols.items():
        if name not in trials.symbols:
            raise Unfit("its sizes depend on values")
        symbol["size"] = trials.symbols[name]
    trials.tie(symbols)
    kept = trials.smaller(notes)
    if own is not None and kept:
        trials.at_one(symbols, notes)
    for name in list(trials.now) if own is not None else list(trials.now)[:1]:
        kept = trials.swept(name, kept, symbols, notes) if kept else []
    return [trials.of_symbols(sizes) for sizes in kept] if kept else trials.none()


class Trials:
    """Runs of a module and its graph on smaller inputs, whose integers are drawn as the op's."""

    def __init__(
        self, program: Any, module: Any, inputs: list[Any], own: OwnAxes | None = None
    ) -> None:
        import torch
        from torch.export.graph_signature import InputKind

        self.module, self.inputs, self.runs = module, inputs, program.module()
        nodes = {node.name: node for node in program.graph.nodes}
        specs = program.graph_signature.input_specs
        named = [spec.arg.name for spec in specs if spec.kind == InputKind.USER_INPUT]
        self.symbols: dict[str, int] = {}
        self.texts: dict[str, str] = {}
        """What each symbol is; without a file's word, itself."""
        self.where: list[tuple[int, int, str]] = []
        labels = list(inspect.signature(module.forward).parameters)
        for index, (name, given) in enumerate(zip(named, inputs, strict=True)):
            for axis, size in enumerate(given.shape if hasattr(given, "dtype") else ()):
                free = nodes[name].meta["val"].shape[axis]
                if not isinstance(free, int) and free.node.expr.is_Symbol:
                    symbol = str(free.node.expr)
                    self.symbols[symbol] = int(size)
                    self.where.append((index, axis, symbol))
                    said = (own or {}).get(labels[index], {}).get(axis, symbol)
                    self.texts.setdefault(symbol, said)
        self.seeded = any(
            torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            and not quiet(str(node.target).split(".")[1], node.args, node.kwargs)
            for node in nodes.values()
        )

    def tie(self, symbols: dict[str, Any]) -> None:
        """Find the axes that sizes are chosen of: several symbols may be of one."""
        texts = {name: self.texts[name] for name in symbols}
        alone = {text for text in texts.values() if text.isidentifier()}
        for name, text in texts.items():
            if not text.isidentifier() and not set(re.findall(r"[A-Za-z_]\w*", text)) <= alone:
                texts[name] = name
        self.texts = texts
        self.now = {text: self.symbols[name] for name, text in texts.items() if text.isidentifier()}
        self.least = {
            text: max(symbols[name]["least"] for name, other in texts.items() if other == text)
            for text in self.now
        }

    def of_symbols(self, sizes: dict[str, int]) -> dict[str, int]:
        """The symbols' sizes at sizes of the axes."""
        return {
            name: sizes[text] if text in sizes else int(eval(text, {"__builtins__": {}}, sizes))
            for name, text in self.texts.items()
        }

    def smaller(self, notes: list[str]) -> list[dict[str, int]]:
        """At most two sizes at which the graph holds."""
        kept: list[dict[str, int]] = []
        # all sizes, else the first alone: labels may not fit fewer classes
        for many, part, more in ((99, 8, 1), (99, 4, 0), (1, 8, 1), (1, 4, 0)):
            sizes = {
                name: min(max(size // part, 2) + more, size) if index < many else size
                for index, (name, size) in enumerate(self.now.items())
            }
            if not sizes or any(sizes[name] < self.least[name] for name in sizes):
                continue
            if sizes in kept or len(kept) == 2:
                continue
            if why := self.fails(sizes):
                notes.append(f"not at other sizes: {why}")
            else:
                kept.append(sizes)
        return kept

    def swept(
        self, first: str, kept: list[dict[str, int]], symbols: dict[str, Any], notes: list[str]
    ) -> list[dict[str, int]]:
        """The sizes again, if an axis alone may have others: the judge draws some."""
        why = ""
        base, most = kept[0][first], self.now[first]
        for step in range(1, base + 1):
            if math.gcd(base, most) % step:
                continue
            near = [each for each in (base + step, base - step) if each <= most]
            near = [each for each in near if each >= max(self.least[first], 1)]
            said = [self.fails({**kept[0], first: each}) for each in near]
            if not any(said):
                for symbol, text in self.texts.items():
                    if text == first:
                        symbols[symbol]["multiple"] = step
                return [sizes for sizes in kept if sizes[first] % step == 0]
            why = why or next(filter(None, said))
        which = f"the size {first}" if first not in self.symbols else "its first size"
        notes.append(f"not where {which} alone is another: {why}")
        return []

    def at_one(self, symbols: dict[str, Any], notes: list[str]) -> None:
        """torch.export says of a free size that it is at least 2: try 1, alone and everywhere."""
        small = {name: min(size, 3) for name, size in self.now.items()}
        if any(self.least[name] > 2 for name in small):
            return
        for sizes in [*({**small, name: 1} for name in small), dict.fromkeys(small, 1)]:
            try:
                why = self.fails(sizes)
            except Unfit as reason:
                why = str(reason)
            if why:
                notes.append(f"not where sizes are 1: {why}")
                return
        self.least = dict.fromkeys(self.least, 1)
        for symbol in symbols.values():
            symbol["least"] = 1

    def none(self) -> list[dict[str, int]]:
        """Check a module of one size there: its graph has to be the module, for any integers."""
        whole = any(map(_whole, self.inputs))
        for _ in range(DRAWS if whole else 1):
            if (why := self.fails(self.now)) and not self.seeded:
                if whole:
                    why = f"its integers cannot be any of their range, as offsets or lengths: {why}"
                raise Unfit(why)
        return []

    def fails(self, sizes: dict[str, int]) -> str:
        """Why the graph does not hold at these sizes; nothing where it does."""
        import torch

        sizes = self.of_symbols(sizes)
        if any(not 0 < sizes[name] <= size for name, size in self.symbols.items() if name in sizes):
            return "a size that is computed of it is none"
        made = [self._smaller(index, given, sizes) for index, given in enumerate(self.inputs)]
        try:
            with torch.no_grad():
                others = [
                    self.module(*(_redrawn(each, scale) for each in made))
                    for scale in (1.0, 0.01)  # a large negative sum may be zero behind a GELU
                ]
                # after others: a first call may be right where a module counts its calls
                theirs, ours = self.module(*_copies(made)), self.runs(*_copies(made))
        except Exception as error:
            return (str(error).splitlines() or [type(error).__name__])[0][:120]
        try:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3, equal_nan=True)
        except AssertionError as error:
            if self.seeded:  # which the op's writer refuses by name
                return str(error).splitlines()[0]
            raise Unfit("its graph gives other numbers than the module: has it a state?") from error
        numbers = any(hasattr(each, "dtype") and each.is_floating_point() for each in made)
        if numbers and all(_alike(theirs, each) for each in others):
            raise Unfit("no input changes its result, so that nothing is to be computed")
        return ""

    def _smaller(self, index: int, given: Any, sizes: dict[str, int]) -> Any:
        import torch

        part = given
        for at, axis, name in self.where:
            if at == index and name in sizes:
                part = part.narrow(axis, 0, sizes[name])
        if not _whole(given):
            return part.contiguous() if hasattr(part, "dtype") else part
        low, high = int(given.min()), int(given.max())
        return torch.randint(low, high + 1, part.shape, dtype=part.dtype)


def _whole(value: Any) -> bool:
    """Whether it is a tensor of integers, which the op draws from their range."""
    return hasattr(value, "dtype") and not value.is_floating_point() and value.element_size() > 1


def _copies(values: list[Any]) -> list[Any]:
    return [each.clone() if hasattr(each, "dtype") else each for each in values]


def _redrawn(given: Any, scale: float) -> Any:
    """Other values, where there are floating-point ones."""
    import torch

    if not hasattr(given, "dtype"):
        return given
    return scale * torch.randn_like(given) if given.is_floating_point() else given.clone()


def _alike(first: Any, second: Any) -> bool:
    """Whether results, a tensor or several, hold numbers, all of them equal to the bit."""
    import torch
    from torch.utils._pytree import tree_leaves

    numbers = [
        (one, other)
        for one, other in zip(tree_leaves(first), tree_leaves(second), strict=True)
        if isinstance(one, torch.Tensor) and one.is_floating_point()
    ]
    return bool(numbers) and all(torch.equal(*pair) for pair in numbers)
