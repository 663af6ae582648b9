"""An exported program as plain data."""

from __future__ import annotations

import inspect
import itertools
import operator
import re
from collections.abc import Iterator
from typing import Any

from .trials import OwnAxes, tried
from .values import Unfit, drawn, literal

SYMBOLIC = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.truediv: "/",
    operator.mod: "%",
    operator.pow: "**",
}
SELECTING = re.compile(
    "select|slice|split|chunk|narrow|unbind|index|gather|take|embedding|max|min|any|all|topk|sort|"
    "median|kthvalue|diagonal|unfold|as_strided|new_"
)
"""In the names of operators whose result has fewer elements, none of them a sum of others."""
NAMES = re.compile(r"[\w.+-]{1,200}")


def _form(spec: Any, count: Iterator[int]) -> Any:
    """How the result holds its tensors: see `results.py`, which reads it. Named tuples are
    tuples."""
    if spec.is_leaf():
        return next(count)
    inside = [_form(each, count) for each in spec.children()]
    if issubclass(spec.type, dict):
        return {
            "dict": [[literal(key), each] for key, each in zip(spec.context, inside, strict=True)]
        }
    return {"list" if spec.type is list else "tuple": inside}


class Graph:
    """An exported program as plain data."""

    def __init__(
        self, program: Any, module: Any, inputs: list[Any], own: OwnAxes | None = None
    ) -> None:
        self.own = own
        self.program, self.module, self.inputs = program, module, inputs
        self.forward = list(inspect.signature(module.forward).parameters)
        self.symbols: dict[str, dict[str, Any]] = {}
        self.sums: set[str] = set()
        self.flops: list[str] = []
        self.notes: list[str] = []

    def told(self) -> dict[str, Any]:
        from torch.export.graph_signature import InputKind, OutputKind

        signature = self.program.graph_signature
        if mutated := list(signature.user_inputs_to_mutate.values()):
            raise Unfit(f"it writes to its input {mutated[0]}")
        if signature.buffers_to_mutate:
            names = ", ".join(sorted(set(signature.buffers_to_mutate.values())))
            self.notes.append(f"the module also updates {names}, which the op does not")
        nodes = {node.name: node for node in self.program.graph.nodes}
        results = [
            spec.arg.name for spec in signature.output_specs if spec.kind == OutputKind.USER_OUTPUT
        ]
        if not nodes.keys() >= set(results):
            raise Unfit("it returns something other than tensors")
        used = self._used([nodes[name] for name in results])
        tensors, arguments = [], []
        position = 0
        for spec in signature.input_specs:
            name = spec.arg.name
            node = nodes.get(name)
            value = node.meta.get("val") if node is not None else None
            if spec.kind == InputKind.USER_INPUT:
                given, label = self.inputs[position], self.forward[position]
                position += 1
                if not hasattr(value, "dtype"):
                    arguments.append({"value": literal(given)})
                    continue
                arguments.append({"tensor": label})
                tensors.append(self._tensor(node, "input", label, label, given))
            elif node is not None and name in used:
                kind = "parameter" if spec.kind == InputKind.PARAMETER else "buffer"
                state = {  # weights that modules share have several names
                    **dict(self.module.named_buffers(remove_duplicate=False)),
                    **dict(self.module.named_parameters(remove_duplicate=False)),
                }
                sample = state.get(spec.target)
                if sample is None:
                    kind, sample = "constant", self.program.constants[spec.target]
                tensors.append(self._tensor(node, kind, spec.target, spec.target, sample))
        steps = [
            self._step(node)
            for node in self.program.graph.nodes
            if node.op == "call_function" and node.name in used
        ]
        outputs = [self._output(nodes[name]) for name in results]
        sizes = tried(self.program, self.module, self.inputs, self.symbols, self.notes, self.own)
        return {
            "tensors": tensors,
            "arguments": arguments,
            "steps": steps,
            "outputs": outputs,
            "result": _form(self.program.call_spec.out_spec, itertools.count()),
            "symbols": self.symbols,
            "sums": sorted(self.sums),
            "flops": self.flops,
            "notes": self.notes,
            "sizes": sizes,
        }

    def _used(self, results: list[Any]) -> set[str]:
        """Nodes that the results depend on; running statistics of a batch are no such thing."""
        used: set[str] = set()
        waiting = list(results)
        while waiting:
            node = waiting.pop()
            if node.name not in used:
                used.add(node.name)
                unread = node.args[3:5] if by_batch(node) else ()
                waiting += [each for each in node.all_input_nodes if each not in unread]
        return used

    def _tensor(self, node: Any, kind: str, name: str, target: str, sample: Any) -> dict[str, Any]:
        value = node.meta["val"]
        if not NAMES.fullmatch(target):
            raise Unfit(f"its {kind} {target[:40]!r} has a name with other than letters, . + -")
        if value.dtype.is_complex:
            raise Unfit(f"{target} is {value.dtype}; an op of this import has real numbers")
        if sample.numel() == 0:
            raise Unfit(f"its {kind} {target} is empty, as a cache that holds nothing yet")
        return {
            "node": node.name,
            "kind": kind,
            "name": name,
            "target": target,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [self._size(size) for size in value.shape],
            **drawn(sample, kind),
        }

    def _output(self, node: Any) -> dict[str, Any]:
        value = node.meta["val"]
        if not hasattr(value, "dtype"):
            raise Unfit("it returns something other than tensors")
        return {
            "node": node.name,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [self._size(size) for size in value.shape],
        }

    def _size(self, size: Any) -> str:
        if isinstance(size, int):
            return str(size)
        return self._expression(size.node.expr)

    def _expression(self, expression: Any) -> str:
        """A size as `+ - * //` over symbols."""
        kind = type(expression).__name__
        if expression.is_Symbol:
            name = str(expression)
            if name not in self.symbols:
                limits = self.program.range_constraints.get(expression)
                low, high = (str(limits.lower), str(limits.upper)) if limits else ("0", "")
                bounded = high.isdecimal() and int(high) < 1 << 40
                self.symbols[name] = {
                    "least": int(low) if low.isdecimal() else 0,
                    "most": int(high) if bounded else None,
                }
            return name
        if expression.is_Integer:
            number = int(expression)
            return str(number) if number >= 0 else f"(0 - {-number})"
        parts = [self._expression(each) for each in expression.args]
        if kind == "Add":
            return f"({' + '.join(parts)})"
        if kind == "Mul":
            return f"({' * '.join(parts)})"
        if kind in ("FloorDiv", "CleanDiv"):
            return f"({parts[0]} // {parts[1]})"
        if kind == "Pow" and expression.args[1].is_Integer and int(expression.args[1]) > 0:
            return f"({' * '.join([parts[0]] * int(expression.args[1]))})"
        raise Unfit(f"the size {expression} is no sum, product or quotient")

    def _step(self, node: Any) -> dict[str, Any]:
        target = node.target
        if target in SYMBOLIC:
            name = f"sym {SYMBOLIC[target]}"
        elif target is operator.getitem:
            name = "getitem"
        else:
            name = str(target)
            self._count(node, name)
        return {
            "node": node.name,
            "target": name,
            "arguments": [self._argument(each) for each in node.args],
            "keywords": {key: self._argument(each) for key, each in node.kwargs.items()},
        }

    def _argument(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.fx.Node):
            return {"node": value.name}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return {"float": repr(value)}
        if isinstance(value, list | tuple):
            return {"list": [self._argument(each) for each in value]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": ""}
        if isinstance(value, torch.memory_format | torch.layout):
            return {"constant": str(value).removeprefix("torch.")}
        raise Unfit(f"an argument of its graph is a {type(value).__name__}")

    def _count(self, node: Any, name: str) -> None:
        """Arithmetic of matrix products and convolutions, and the lengths of sums."""
        values = [each.meta["val"] for each in node.args if hasattr(each, "meta")]
        shapes = [each.shape for each in values if hasattr(each, "shape")]
        result = _first(node.meta.get("val"))
        kind = name.split(".")[1]
        if kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            self._recurrent(shapes[0], [each for each in node.args if isinstance(each, list)][-1])
            return
        if kind == "einsum":
            self._einsum(node.args[0], [each.meta["val"].shape for each in node.args[1]])
            return
        if terms := _normalised(node, kind, shapes):
            self.sums.add(f"({self._product(terms)})")
            return
        if not hasattr(result, "shape") or not shapes:
            return
        if kind in ("linear", "mm", "matmul", "bmm", "mv", "dot"):
            self._products(result.shape, [shapes[0][-1]])
        elif kind in ("addmm", "baddbmm"):
            self._products(result.shape, [shapes[1][-1]])
        elif kind == "scaled_dot_product_attention":
            keys = shapes[1][-2]
            self._products([*result.shape[:-1], keys], [shapes[0][-1]])
            self._products(result.shape, [keys])
        elif kind in ("cumsum", "logcumsumexp"):
            self.sums.add(f"({self._size(shapes[0][node.args[1]])})")
        elif "conv_transpose" in kind:
            groups = node.args[6] if len(node.args) > 6 else 1
            length = self._product([shapes[1][0] // groups, *shapes[1][2:]])
            self._products(shapes[0], shapes[1][1:], length)
        elif kind.startswith("conv"):
            self._products(result.shape, shapes[1][1:])
        elif "softmax" in kind:
            self.sums.add(f"({self._size(shapes[0][node.args[1]])})")
        elif kind.startswith("avg_pool"):
            self.sums.add(f"({self._product(node.args[1])})")
        elif not SELECTING.search(kind):
            self._summed(shapes[0], result.shape)

    def _summed(self, given: Any, left: Any) -> None:
        """Elements of `given` for each that is left: the length of a sum, a mean, a pool."""
        import sympy

        every, fewer = (
            sympy.Mul(*(size if isinstance(size, int) else size.node.expr for size in each))
            for each in (given, left)
        )
        if not fewer.is_zero:
            length, beside = (every / fewer).as_numer_denom()
            if beside == 1 and length != 1:
                try:
                    self.sums.add(f"({self._expression(length)})")
                except Unfit:
                    self.notes.append(f"a sum of {length} elements is counted as one of 1")

    def _recurrent(self, shape: Any, weights: list[Any]) -> None:
        for each in weights:
            matrix = each.meta["val"].shape
            if len(matrix) == 2:
                self._products([*shape[:-1], matrix[0]], [matrix[1]])

    def _einsum(self, equation: str, shapes: list[Any]) -> None:
        given, _, kept = equation.replace(" ", "").partition("->")
        if "." in equation or "->" not in equation:
            return
        sizes: dict[str, Any] = {}
        for letters, shape in zip(given.split(","), shapes, strict=True):
            sizes |= zip(letters, shape, strict=True)
        if summed := [size for letter, size in sizes.items() if letter not in kept]:
            self._products([sizes[letter] for letter in kept], summed)

    def _products(self, each: Any, terms: Any, summed: str = "") -> None:
        length = self._product(terms)
        self.sums.add(f"({summed or length})")
        self.flops.append(f"2 * {self._product(each)} * {length}")

    def _product(self, sizes: Any) -> str:
        return " * ".join(map(self._size, sizes))


def _first(result: Any) -> Any:
    """The first of several results, as those of `var_mean`."""
    return result[0] if isinstance(result, list | tuple) and result else result


def _normalised(node: Any, kind: str, shapes: list[Any]) -> list[Any]:
    """Sizes over which a norm sums; none of another operator."""
    if kind in ("layer_norm", "rms_norm"):
        return list(node.args[1])
    if kind == "group_norm":
        return [shapes[0][1] // node.args[1], *shapes[0][2:]]
    if kind == "instance_norm":
        return list(shapes[0][2:])
    return [shapes[0][0], *shapes[0][2:]] if by_batch(node) else []


def by_batch(node: Any) -> bool:
    """Whether it is a norm by the batch's own statistics, which only updates the running ones."""
    return "batch_norm" in str(node.target) and len(node.args) > 5 and node.args[5] is True
