"""What the text of a forward says of residual additions and of the norms around them.

A layer is taken by its text: it keeps its input, normalises it, computes, adds what it kept, and
so on. Between these statements it may do anything that reads neither what is kept nor, after an
addition, what was added: a kernel writes into both. Only the standard library is used.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STEPS = "patcher_steps"
"""The name, in a rewritten forward, of what does the additions with the norms after them."""

_FORM = ("shape", "dtype", "device")


@dataclass(frozen=True)
class LayerText:
    """A layer's forward, and what the rewritten one calls."""

    norms: tuple[str, ...]
    """The names of its norms: of its input, then of each sum but the last."""
    forward: ast.FunctionDef
    """The forward in which `patcher_steps` adds and normalises."""
    hands_on: bool
    """Whether it returns its last sum, and does nothing else with it."""


@dataclass(frozen=True)
class BodyText:
    """A forward that hands the output of each of its layers to the next, and to nothing else."""

    layers: str
    """The name of the list of layers."""
    norm: str | None
    """The name of the norm that takes the output of the last layer."""


def layer_text(forward: ast.FunctionDef) -> LayerText | str | None:
    """How a layer adds to its residual and normalises; or why that is not what a patch replaces.

    Args:
        forward: the layer's own forward.

    Returns:
        None for a forward that keeps its input for no sum.
    """
    start = next(_entries(forward), None)
    if start is None:
        return None
    index, kept, state = start
    statements = forward.body
    sums = [at for at, each in enumerate(statements) if _sum(each, kept, state) is not None]
    if not sums:
        return "it adds to its residual in another way"
    norms = [_norm_of(statements[index + 1], state)]
    for at in sums[:-1]:
        copied = _is_copy(statements[at + 1], kept, state)
        norms.append(_norm_of(statements[at + 2], state) if copied else None)
    names = tuple(name for name in norms if name is not None)
    if len(names) < len(norms):
        return "no norm of the sum follows an addition"
    if why := _unsafe(forward, index, kept, state, sums):
        return why
    hands_on = all(_only_returns(each, state) for each in statements[sums[-1] + 1 :])
    return LayerText(names, _rewritten(forward, index, kept, state, sums), hands_on)


def body_text(forward: ast.FunctionDef) -> BodyText | None:
    """The layers that a forward runs one after the other; None if it may do more with a state."""
    for at, loop in enumerate(forward.body):
        found = _loop(loop)
        if found is None:
            continue
        layers, state = found
        if sum(_own(each) == layers for each in ast.walk(forward)) > 1:
            return None  # elsewhere it may run them and keep what they give
        after = [each for each in forward.body[at + 1 :] if state in _loads(each)]
        return BodyText(layers, _norm_of(after[0], state) if after else None)
    return None


def _loop(loop: ast.stmt) -> tuple[str, str] | None:
    """The list of layers that a loop runs, and the state that they hand on."""
    if not isinstance(loop, ast.For) or loop.orelse:
        return None
    target, over = loop.target, loop.iter
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name):
        pair = isinstance(target, ast.Tuple) and len(target.elts) == 2
        if over.func.id != "enumerate" or not pair or not over.args:
            return None
        target, over = target.elts[1], over.args[0]  # type: ignore[attr-defined]  # a pair
    if isinstance(over, ast.Subscript):
        over = over.value
    name = _own(over)
    if name is None or not isinstance(target, ast.Name):
        return None
    calls = [each for each in loop.body if _calls_layer(each, target.id)]
    if len(calls) != 1 or _moves(loop):
        return None
    output, state = _target(calls[0]), _given_state(calls[0])
    if output is None or state is None:
        return None
    mentions = Counter(_names(loop))
    if output == state:
        return (name, state) if mentions[state] == 2 else None
    # `outputs = layer(state); state = outputs[0]`
    out = f"{state} = {output}[0]"
    taken = [each for each in loop.body if ast.unparse(each) == out]
    fits = len(taken) == 1 and mentions[state] == 2 and mentions[output] == 2
    return (name, state) if fits else None


def _target(statement: ast.stmt) -> str | None:
    """The only name that a statement assigns to."""
    [target, *more] = statement.targets if isinstance(statement, ast.Assign) else [None]
    return target.id if isinstance(target, ast.Name) and not more else None


def _given_state(statement: ast.stmt) -> str | None:
    """The name that a call `layer(state, ...)` is given first."""
    call = statement.value if isinstance(statement, ast.Assign) else None
    first = call.args[0] if isinstance(call, ast.Call) and call.args else None
    return first.id if isinstance(first, ast.Name) else None


def _calls_layer(statement: ast.stmt, layer: str) -> bool:
    """Whether a statement is `output = layer(...)`."""
    call = statement.value if isinstance(statement, ast.Assign) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == layer


def _entries(forward: ast.FunctionDef) -> Iterator[tuple[int, str, str]]:
    """Where a forward keeps its state: the index of `kept = state`, and both names."""
    arguments = [each.arg for each in (*forward.args.posonlyargs, *forward.args.args)]
    state = arguments[1] if len(arguments) > 1 else ""
    for index, each in enumerate(forward.body[:-1]):
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Name):
            target = _target(each)
            if target is not None and each.value.id == state:
                yield index, target, state


def _unsafe(
    forward: ast.FunctionDef, index: int, kept: str, state: str, sums: Sequence[int]
) -> str | None:
    """Why the kernel may not write into what is kept and what is added; None if it may: nothing
    else holds these, and nothing reads them later."""
    body = forward.body
    before = [name for each in body[:index] for name in _names(each)]
    if state in before or Counter(_values(forward))[kept] != 2 * len(sums):
        return "it reads its residual elsewhere"
    if any(isinstance(each, ast.Return) for at in body[: sums[-1]] for each in ast.walk(at)):
        return "it returns before its last addition"
    if any("__" in each.attr for each in ast.walk(forward) if isinstance(each, ast.Attribute)):
        return "it reads a private field"
    if any(_stores(each) for each in ast.walk(forward)):
        return "it may keep a state elsewhere"
    # what others hold: arguments and fields of the module, by whatever name
    foreign = {each.arg for each in ast.walk(forward.args) if isinstance(each, ast.arg)}
    foreign -= {"self", state}
    made = set[str]()
    for first, last in zip([index, *sums], [*sums, len(body)], strict=True):
        part = body[first + 1 : last + 1]
        if again := sorted(made & {name for each in part for name in _loads(each)}):
            return f"it reads {again[0]} again after an addition"
        made |= {name for each in part for name in _outputs(each)} - {kept, state}
        for each in (node for statement in part for node in ast.walk(statement)):
            if isinstance(each, ast.Assign) and _is_held(each.value, foreign):
                foreign |= {*_outputs(each)}
        added = _sum(body[last], kept, state) if last < len(body) else None
        # what is computed in the addition itself is a new tensor
        if added is None or isinstance(added, ast.BinOp):
            continue
        if _is_held(added, foreign) or foreign & {*_names(added)}:
            return "it adds what it was given"
    return None


def _only_returns(statement: ast.stmt, state: str) -> bool:
    """Whether a statement does no more with a state than to return it, in a tuple or not."""
    if state not in _names(statement):
        return True
    value = statement.value if isinstance(statement, ast.Return) else None
    given = value.elts if isinstance(value, ast.Tuple) else [value]
    return isinstance(given[0], ast.Name) and [*_names(statement)].count(state) == 1


def _stores(statement: ast.AST) -> bool:
    """Whether a statement puts a value elsewhere than under a name, or calls what may."""
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(
            isinstance(e, ast.Attribute | ast.Subscript) for t in targets for e in ast.walk(t)
        )
    return isinstance(statement, ast.NamedExpr)


def _is_held(value: ast.AST, foreign: set[str]) -> bool:
    """Whether a value is, or is a part or a view of, an argument or a field of the module."""
    calls = False
    while isinstance(value, ast.Attribute | ast.Subscript | ast.Call):
        calls = calls or isinstance(value, ast.Call)
        value = value.func if isinstance(value, ast.Call) else value.value
    if not isinstance(value, ast.Name):
        return False
    return value.id in foreign or (value.id == "self" and not calls)


def _rewritten(
    forward: ast.FunctionDef, index: int, kept: str, state: str, sums: Sequence[int]
) -> ast.FunctionDef:
    made = copy.deepcopy(forward)
    body, replaced = made.body, dict[int, list[ast.stmt]]()
    before = ast.Name(state, ast.Load())
    replaced[index] = [_step(body[index], (kept, state), "enter", before, _called(body[index + 1]))]
    replaced[index + 1] = []
    for at in sums:
        residual, added = ast.Name(kept, ast.Load()), _sum(body[at], kept, state)
        assert added is not None, "these are sums"
        if at == sums[-1]:
            replaced[at] = [_step(body[at], (state,), "leave", residual, added)]
        else:
            norm = _called(body[at + 2])
            replaced[at] = [_step(body[at], (kept, state), "middle", residual, added, norm)]
            replaced[at + 1] = replaced[at + 2] = []
    made.body = [new for at, old in enumerate(body) for new in replaced.get(at, [old])]
    made.decorator_list, made.returns = [], None
    for each in ast.walk(made.args):
        if isinstance(each, ast.arg):
            each.annotation = None
    # the function is given the defaults of the layer's own
    made.args.defaults = [_none(each) for each in made.args.defaults]
    made.args.kw_defaults = [None if e is None else _none(e) for e in made.args.kw_defaults]
    return ast.fix_missing_locations(made)


def _none(like: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Constant(None), like)


def _step(at: ast.stmt, targets: Sequence[str], step: str, *given: ast.expr) -> ast.stmt:
    stores: list[ast.expr] = [ast.Name(name, ast.Store()) for name in targets]
    target = stores[0] if len(stores) == 1 else ast.Tuple(stores, ast.Store())
    call = ast.Call(ast.Attribute(ast.Name(STEPS, ast.Load()), step, ast.Load()), [*given], [])
    return ast.copy_location(ast.Assign([target], call), at)


def _called(statement: ast.stmt) -> ast.expr:
    assert isinstance(statement, ast.Assign)
    assert isinstance(statement.value, ast.Call)
    return statement.value.func


def _sum(statement: ast.stmt, kept: str, state: str) -> ast.expr | None:
    """What a statement `state = kept + added`, in either order, adds."""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp)):
        return None
    if _target(statement) != state or not isinstance(statement.value.op, ast.Add):
        return None
    left, right = statement.value.left, statement.value.right
    for one, other in ((left, right), (right, left)):
        if isinstance(one, ast.Name) and one.id == kept and kept not in _values(other):
            return other
    return None


def _norm_of(statement: ast.stmt, state: str) -> str | None:
    """The name of a part in a statement `state = self.part(state)`."""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)):
        return None
    call = statement.value
    same = _given_state(statement) == _target(statement) == state
    return _own(call.func) if same and len(call.args) == 1 and not call.keywords else None


def _own(node: ast.AST) -> str | None:
    """The name of a part of the module itself."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id == "self" else None
    return None


def _is_copy(node: ast.AST, target: str, value: str) -> bool:
    """Whether a statement is `target = value`."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)):
        return False
    return _target(node) == target and node.value.id == value


def _moves(loop: ast.For) -> bool:
    return any(isinstance(each, ast.Break | ast.Return | ast.Yield) for each in ast.walk(loop))


def _names(node: ast.AST) -> Iterator[str]:
    return (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def _loads(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
            yield each.id


def _outputs(node: ast.AST) -> Iterator[str]:
    """The names that a statement gives tensors, without those of what a part returns beside its
    output, which is another tensor: all but the first of several."""
    for each in ast.walk(node):
        if isinstance(each, ast.Assign) and not isinstance(each.value, ast.Constant):
            for target in each.targets:
                several = isinstance(target, ast.Tuple) and target.elts
                yield from _names(several[0] if several else target)
        if isinstance(each, ast.AnnAssign | ast.AugAssign | ast.For | ast.withitem):
            named = each.optional_vars if isinstance(each, ast.withitem) else each.target
            yield from () if named is None else _names(named)


def _values(node: ast.AST) -> Iterator[str]:
    """The names that a node mentions, but for what it asks of the form of a tensor."""
    if isinstance(node, ast.Name):
        yield node.id
    elif not (isinstance(node, ast.Attribute) and node.attr in _FORM):
        for child in ast.iter_child_nodes(node):
            yield from _values(child)
