"""Write a trace's graph as Python: a function over `torch.ops.aten` that only computes.

The trace comes from a process that ran a stranger's code. So a name is only taken if it is an
identifier, an operator only if PyTorch's own schema says that it writes nothing and draws no random
number, and an argument only if it is a number, a dtype, a name or a short word.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from patcher.integrate.formats.foreign_contract import Refused
from patcher.integrate.kernelbench.names import identifier
from patcher.integrate.kernelbench.problem import ProblemTrace, TracedStep, literal
from patcher.integrate.kernelbench.runner.values import quiet

FACTORIES = ("full", "zeros", "ones", "empty", "arange", "eye", "scalar_tensor", "linspace")
PRIVATE = ("_to_copy", "_softmax", "_log_softmax", "_unsafe_view", "_assert_tensor_metadata")
"""Operators whose names begin with an underscore and that a graph may hold."""
BATCH_NORM = "_native_batch_norm_legit_functional"
NO_RESULT = "_assert_tensor_metadata"
SIZES = ("sym +", "sym -", "sym *", "sym //", "sym /", "sym %")
"""Arithmetic of sizes."""
EXACT = ("int64", "int32", "bool")
_WORD = re.compile(r"[A-Za-z_,.>\- ]{0,200}")
_TARGET = re.compile(r"aten\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)")


class Body:
    """The statements of `module`, with the names of what they read.

    Args:
        dtypes: `none`: a graph of float32, whose numbers are of the dtype `number`; `number`: so is
            each floating-point dtype of the graph; `own`: it stays as it is.
    """

    def __init__(
        self, trace: ProblemTrace, names: dict[str, str], dtypes: Literal["none", "number", "own"]
    ) -> None:
        self.dtypes = dtypes
        self.names = dict(names)
        """Python's names of the graph's nodes."""
        taken = {text.partition(".")[0] for text in names.values()}
        self.lines: list[str] = []
        for step in trace.steps:
            if step.target == f"aten.{NO_RESULT}.default":
                continue  # a check of dtypes, not a value
            text = self._expression(step)
            self.names[step.node] = identifier(step.node, taken)
            self.lines.append(f"{self.names[step.node]} = {text}")
        self.results = []
        for output in trace.outputs:
            name = self._named(output.node)
            self.results.append(name if output.shape else f"{name}.reshape(1)")

    @property
    def _floats(self) -> tuple[str, ...]:
        return () if self.dtypes == "none" else ("bfloat16", "float16", "float64")

    def _named(self, node: str) -> str:
        if node not in self.names:
            raise Refused("its trace reads a value before it is made")
        return self.names[node]

    def _expression(self, step: TracedStep) -> str:
        if step.target == f"aten.{BATCH_NORM}.default" and len(step.arguments) == 8:
            return self._batch_norm(step)
        arguments = [self._argument(each) for each in step.arguments]
        if step.target in SIZES and len(arguments) == 2:
            return f"({arguments[0]} {step.target[4:]} {arguments[1]})"
        if step.target == "getitem" and len(arguments) == 2 and isinstance(step.arguments[1], int):
            return f"{arguments[0]}[{step.arguments[1]}]"
        name, overload = self._operator(step)
        if (name, overload) == ("sym_size", "int") and len(arguments) == 2:
            return f"{arguments[0]}.shape[{arguments[1]}]"
        words = {key: self._argument(each) for key, each in step.keywords.items()}
        if name in FACTORIES:
            words["device"] = next(iter(self.names.values())) + ".device"
        arguments += [f"{key}={each}" for key, each in words.items() if each != "DEVICE"]
        return f"aten.{name}.{overload}({', '.join(arguments)})"

    def _batch_norm(self, step: TracedStep) -> str:
        """The norm as the module calls it; its running statistics are neither read nor written in
        training, as KernelBench leaves every module."""
        training = step.arguments[5] is True
        names = [
            "None" if training and 2 < index < 5 else self._argument(each)
            for index, each in enumerate(step.arguments)
        ]
        return f"(aten.batch_norm.default({', '.join(names)}, False),)"

    def _operator(self, step: TracedStep) -> tuple[str, str]:
        import torch

        match = _TARGET.fullmatch(step.target)
        packet = getattr(torch.ops.aten, match[1], None) if match else None
        found = getattr(packet, match[2], None) if match and packet else None
        if match is None or not isinstance(found, torch._ops.OpOverload):
            raise Refused(f"its graph calls {step.target[:80]!r}, which is no operator of PyTorch")
        name, overload = match[1], match[2]
        seeded = torch.Tag.nondeterministic_seeded in found.tags
        if seeded and not quiet(name, step.arguments, step.keywords):
            raise Refused(f"it draws random numbers ({name})")
        if found._schema.is_mutable:
            raise Refused(f"its graph writes in place ({step.target})")
        if (name, overload) == ("view", "dtype"):
            raise Refused("it reads the bits of a number, which another dtype has not")
        word = name.startswith("__") and name.endswith("__")  # `&` and the like
        if name.startswith("_") and not word and name not in PRIVATE:
            raise Refused(f"its graph calls PyTorch's private {name}")
        # by its schema, since a size that it is given is a node as well: others write files
        reads = any("Tensor" in str(each.type) for each in found._schema.arguments)
        if not reads and name not in FACTORIES:
            raise Refused(f"its graph calls {name}, which reads no tensor")
        if not found._schema.returns:
            raise Refused(f"its graph calls {name}, which gives nothing")
        return name, overload

    def _argument(self, value: Any) -> str:
        if isinstance(value, str):
            if not _WORD.fullmatch(value):
                raise Refused("its graph has an argument of unusual text")
            return repr(value)
        match value:
            case {"node": str(node)}:
                return self._named(node)
            case {"list": list(items)}:
                return f"[{', '.join(map(self._argument, items))}]"
            case {"dtype": str(dtype)} if dtype in ("float32", *self._floats):
                return "number" if self.dtypes != "own" else f"torch.{dtype}"
            case {"dtype": str(dtype)} if dtype in EXACT:
                return f"torch.{dtype}"
            case {"dtype": str(dtype)}:
                raise Refused(f"it computes in {dtype[:20]}; a module of float32 can be imported")
            case {"device": _}:
                return "DEVICE"
            case {"constant": "contiguous_format" | "preserve_format" | "strided" as constant}:
                return f"torch.{constant}"
        return literal(value)
