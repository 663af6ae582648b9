"""The role of each launch of a step: by what it computes, and of a matmul by where it stands.

A layer is read between two attentions: the output projection up to the first norm, the MLP or the
experts up to the next norm, and the projections of the next attention. What stands behind the last
layer's MLP is the head. A norm between the projections and attention is one of heads. What prepares
or follows a matmul of experts was launched by their module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise

from patcher.hotspot.classify import classify
from patcher.hotspot.coverage import SCHEDULE, parts_of
from patcher.hotspot.rules import rules
from patcher.hotspot.shipped import op_of_kernel

_MATMULS = ("matmul", "MoE matmul")
_MARKS = (*_MATMULS, "attention", "norm", "activation")
_BESIDE = ("activation", "quantisation", "other")
"""Roles of operations that the module of the experts launches too."""


@cache
def operation_of(kernel: str) -> str:
    """What a kernel computes: by the op, if it is one of ours, else by its name."""
    op = op_of_kernel(kernel)
    known: dict[str, str] = rules("roles")["operation_of"]
    return known[op.name] if op is not None and op.name in known else classify(kernel)[1]


def role_of_operation(operation: str) -> str:
    """The role of a kernel whose position is not known."""
    if operation == "matmul":
        return "matmuls"
    if operation == "MoE matmul":
        return "experts"
    found = (row["name"] for row in rules("roles")["role"] if operation in _operations(row))
    return str(next(found, "other"))


def roles_of_step(kernels: Sequence[str], has_experts: bool, has_shared: bool) -> list[str]:
    """The role of each launch of a step.

    Args:
        kernels: the names in order.
        has_experts: whether the model routes tokens to experts.
        has_shared: whether some experts take every token.
    """
    operations = [operation_of(kernel) for kernel in kernels]
    roles = [role_of_operation(operation) for operation in operations]
    planned = [SCHEDULE in parts_of(kernel) for kernel in kernels]
    marks = [at for at, each in enumerate(operations) if each in _MARKS and not planned[at]]
    anchors = _anchors(operations, marks)
    if not anchors or "norm" not in operations:
        return roles
    before = [at for at in marks if at < anchors[0] and operations[at] == "matmul"]
    for at in before:
        roles[at] = "attention.in"
    ends = [*anchors[1:], len(operations)]
    for begin, end in zip(anchors, ends, strict=True):
        inside = [at for at in marks if begin < at < end]
        last = end == len(operations)
        _layer(roles, operations, inside, "head" if last else "attention.in", has_shared)
    if has_experts and "MoE matmul" not in operations:
        return [role_of_operation(each) for each in operations]  # its experts are plain matmuls
    _norms_of_heads(roles, operations, marks)
    _launched_by_experts(roles, operations, marks)
    return roles


def main_roles(order: Iterable[tuple[str, float]]) -> dict[str, str]:
    """The role of each kernel of a step, the one of most time.

    Args:
        order: the launches, each with its kernel and its time.
    """
    launches = list(order)
    kernels = [kernel for kernel, _ in launches]
    has_experts = any(operation_of(kernel) == "MoE matmul" for kernel in kernels)
    spent: dict[str, dict[str, float]] = {}
    for (kernel, time), role in zip(
        launches, roles_of_step(kernels, has_experts, False), strict=True
    ):
        own = spent.setdefault(kernel, {})
        own[role] = own.get(role, 0.0) + time
    return {kernel: max(own, key=own.__getitem__) for kernel, own in spent.items()}


def _anchors(operations: Sequence[str], marks: Iterable[int]) -> list[int]:
    """Where each layer's attention begins; its kernels follow each other without a matmul."""
    anchors: list[int] = []
    open_anchor = False
    for at in marks:
        if operations[at] == "attention":
            if not open_anchor:
                anchors.append(at)
            open_anchor = True
        elif operations[at] in _MATMULS:
            open_anchor = False
    return anchors


def _layer(
    roles: list[str],
    operations: Sequence[str],
    inside: Sequence[int],
    behind: str,
    has_shared: bool,
) -> None:
    """Give the matmuls from one attention to the next their roles."""
    out: list[int] = []
    block: list[int] = []
    after: list[int] = []
    current = out
    for at in inside:
        operation = operations[at]
        if operation == "norm":
            if current is out and out:
                current = block
            elif current is block and any(operations[i] in _MATMULS for i in block):
                current = after
        elif operation in (*_MATMULS, "activation"):
            current.append(at)
    for at in out:
        if operations[at] == "matmul":
            roles[at] = "attention.out"
    for at in after:
        if operations[at] == "matmul":
            roles[at] = behind
    experts = [at for at in block if operations[at] == "MoE matmul"]
    if experts:
        _experts(roles, operations, block, experts, has_shared)
    else:
        _dense(roles, operations, block)


def _experts(
    roles: list[str],
    operations: Sequence[str],
    block: Sequence[int],
    experts: Sequence[int],
    has_shared: bool,
) -> None:
    half = (len(experts) + 1) // 2
    for number, at in enumerate(experts):
        if len(experts) > 1:  # a single kernel computes both
            roles[at] = "experts.gate_up" if number < half else "experts.down"
    plain = [at for at in block if operations[at] == "matmul"]
    for number, at in enumerate(plain):
        # a split matmul's sum is a launch of its own, so of several the first ones are the router's
        is_router = at < experts[0] and (number == 0 or not has_shared)
        roles[at] = "router" if is_router else "shared" if has_shared else "matmuls"


def _dense(roles: list[str], operations: Sequence[str], block: Sequence[int]) -> None:
    matmuls = [at for at in block if operations[at] == "matmul"]
    acts = [at for at in block if operations[at] == "activation"]
    for number, at in enumerate(matmuls):
        down = at > acts[-1] if acts else number == len(matmuls) - 1 and number > 0
        roles[at] = "mlp.down" if down else "mlp.gate_up"


def _norms_of_heads(roles: list[str], operations: Sequence[str], marks: Sequence[int]) -> None:
    """Give norms between the projections of an attention and it the role of what rotates heads."""
    since: list[int] | None = None
    for at in marks:
        if roles[at] == "attention.in":
            since = []
        elif operations[at] == "norm" and since is not None:
            since.append(at)
        elif operations[at] == "attention" and since is not None:
            for norm in since:
                roles[norm] = "rope_kv"
            since = None
        elif operations[at] in _MATMULS:
            since = None


def _launched_by_experts(roles: list[str], operations: Sequence[str], marks: Sequence[int]) -> None:
    """Give what experts run beside matmuls, routing and sum its role: an activation by the matmul
    before it, anything else by the matmul after it."""
    ends = [at for at in marks if operations[at] in (*_MATMULS, "norm", "attention")]
    for before, after in pairwise(ends):
        for at in range(before + 1, after):
            near = before if operations[at] == "activation" else after
            if operations[near] == "MoE matmul" and roles[at] in _BESIDE:
                roles[at] = "experts.small"


def _operations(row: dict[str, list[str]]) -> list[str]:
    return row.get("operations", [])
