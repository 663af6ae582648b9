"""The structure of an op: operators and topology of its traced graph, without shapes and numbers.

A graph is taken after PyTorch's own decompositions, so that `F.silu(x)` and `x * x.sigmoid()` are
one structure. What only moves or converts values (views, transposes, casts, copies) is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import torch
from torch import fx

from patcher.bench import Op, Record

_MOVES = {
    *("_to_copy", "to", "clone", "detach", "contiguous", "alias", "view", "reshape"),
    *("_unsafe_view", "expand", "unsqueeze", "squeeze", "permute", "transpose", "t", "copy"),
    *("lift_fresh_copy", "slice", "select", "flatten", "unflatten", "getitem", "as_strided"),
    *("split", "split_with_sizes"),
}
_COMMUTES = frozenset(("add", "mul", "maximum", "minimum", "logaddexp", "hypot"))


class GraphStructure(Record):
    """What stays of an op without its sizes."""

    digest: str
    """sha256 over operators and topology; empty where nothing is computed."""
    operators: tuple[str, ...]
    """Names of PyTorch's operators in the graph's order."""
    parts: dict[str, int]
    """How often each operator, and each operator after another (`a>b`), is in the graph."""

    @property
    def family(self) -> str:
        """sha256 over the operators alone, in any order: what a split keeps together."""
        return _sha(sorted(self.operators))

    def likeness(self, other: GraphStructure) -> float:
        """Jaccard similarity of the parts, 0 to 1."""
        ours, theirs = Counter(self.parts), Counter(other.parts)
        return (ours & theirs).total() / max((ours | theirs).total(), 1)


def structure_of(op: Op) -> GraphStructure:
    """Trace an op's reference at the smallest point of its first sweep.

    Raises:
        Exception: as PyTorch's tracing raises it.
    """
    return structure_of_graph(_traced(op))


def _traced(op: Op) -> fx.GraphModule:
    from torch._decomp import core_aten_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    point = op.contract.sweeps[0].points()[0]
    given = op.inputs.make(point, torch.Generator().manual_seed(0), "normal")
    names = [each.name for each in op.contract.scalars]
    scalars = dict(zip(names, op.served_scalars, strict=True))

    def run(*tensors: torch.Tensor) -> list[Any]:
        return list(op.reference(**dict(zip(given, tensors, strict=True)), **scalars).values())

    table: Any = dict(core_aten_decompositions())
    with torch.no_grad():
        try:
            traced = make_fx(run, table, "fake")(*given.values())
        except Exception:  # sizes by values, as lengths: with the values then
            traced = make_fx(run, table, "real")(*given.values())
    traced.graph.eliminate_dead_code()
    return traced


def structure_of_graph(module: fx.GraphModule) -> GraphStructure:
    """The structure of a traced graph."""
    digests: dict[fx.Node, str] = {}
    computed: dict[fx.Node, tuple[str, ...]] = {}
    operators: list[str] = []
    counted: list[str] = []
    """Digests of what computes: a value that is used twice is there once."""
    parts: Counter[str] = Counter()
    read = 0
    for node in module.graph.nodes:
        before = [each for each in node.all_input_nodes if digests[each]]
        name = _name(node)
        if node.op != "call_function":
            digests[node] = "input" if node.op != "output" else _sha([digests[e] for e in before])
            computed[node] = ()
            read += node.op != "output" and bool(node.users)
        elif name in _MOVES and before:
            digests[node] = digests[before[0]]
            computed[node] = tuple(name for each in before for name in computed[each])
        else:
            words = [each for each in [*node.args, *node.kwargs.values()] if isinstance(each, str)]
            inside = [digests[each] for each in before]
            if node.args and len(before) == 1 and node.args.count(before[0]) == 2:
                inside *= 2  # x * x
            digests[node] = _sha([name, words, sorted(inside) if name in _COMMUTES else inside])
            if before:  # constants are no structure
                operators.append(name)
                counted.append(digests[node])
                parts[name] += 1
                parts.update(f"{each}>{name}" for one in before for each in computed[one])
                computed[node] = (name,)
            else:
                computed[node] = ()
    whole = _sha(
        [sorted(counted), [digests[n] for n in module.graph.nodes if n.op == "output"], read]
    )
    return GraphStructure(
        digest=whole if operators else "", operators=tuple(operators), parts=dict(parts)
    )


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet or getattr(node.target, "__name__", node.target)).removeprefix("aten.")


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
