"""What agents read of an op's folder: the reference, and a baseline as far as it holds it."""

from __future__ import annotations

import ast

from patcher.bench import Op


def reference_source(op: Op) -> str:
    """The reference and what it uses of its file: the control beside it, which must fail, is not
    for the agents.
    """
    text = (op.folder / "reference.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    defined = _defined(tree)
    if "reference" not in defined:
        raise ValueError(f"{op.name}: reference.py defines no reference")
    return _text(text, tree, [defined["reference"], *_used(defined["reference"], defined)])


def baseline_source(op: Op, name: str) -> str | None:
    """The factory of that baseline in `baselines.py` and what it uses of that file; None where
    there is no such baseline.

    Of a kernel that lies in a library the call is shown: what is called, and how.
    """
    text = (op.folder / "baselines.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    defined = _defined(tree)
    table = defined.get("BASELINES")
    value = table.value if isinstance(table, (ast.Assign, ast.AnnAssign)) else None
    if not isinstance(value, ast.Dict):
        return None
    for key, factory in zip(value.keys, value.values, strict=True):
        if isinstance(key, ast.Constant) and key.value == name:
            return _text(text, tree, _used(factory, defined))
    return None


def _defined(tree: ast.Module) -> dict[str, ast.stmt]:
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {one.id: node for one in node.targets if isinstance(one, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined[node.target.id] = node
    return defined


def _text(text: str, tree: ast.Module, chosen: list[ast.stmt]) -> str:
    """These statements of it, in its order."""
    ordered = [node for node in tree.body if any(node is one for one in chosen)]
    return "\n\n".join(ast.get_source_segment(text, node) or "" for node in ordered)


def _used(start: ast.AST, defined: dict[str, ast.stmt]) -> list[ast.stmt]:
    """What it names of the file, and what that names, ..."""
    found: list[ast.stmt] = []
    todo: list[ast.AST] = [start]
    while todo:
        for node in ast.walk(todo.pop()):
            one = defined.get(node.id) if isinstance(node, ast.Name) else None
            if one is not None and not any(one is known for known in found):
                found.append(one)
                todo.append(one)
    return found
