"""The gated MLPs in an architecture's files, read and not imported."""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from pathlib import Path

_PRODUCT = r"self\.down_proj\(self\.act_fn\(self\.gate_proj\(\1\)\) \* self\.up_proj\(\1\)\)"
_FORWARD = re.compile(
    r"def forward\(self, (\w+)(?:: [\w.]+)?\)(?: -> [\w.]+)?:\n"
    rf"    (?:return {_PRODUCT}|(\w+) = {_PRODUCT}\n    return \2)"
)
_ACTIVATION = re.compile(r"self\.act_fn = ACT2FN\[config\.(\w+)\]")


def is_product(forward: str) -> bool:
    """Whether the source of a forward is `down(act(gate(x)) * up(x))`, and nothing else."""
    try:
        [node] = ast.parse(textwrap.dedent(forward)).body
    except (SyntaxError, ValueError):
        return False
    return _FORWARD.fullmatch(ast.unparse(node)) is not None


@cache
def mlp_classes(file: Path) -> dict[str, str]:
    """By class of a file whose forward is `down(act(gate(x)) * up(x))`: the setting that names its
    activation.
    """
    found = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            parts = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
            activation = _ACTIVATION.search(ast.unparse(node))
            forward = parts.get("forward")
            if activation and forward and is_product(ast.unparse(forward)):
                found[node.name] = activation[1]
    return found


@cache
def stated_activation(folder: Path, setting: str) -> str | None:
    """The default of a setting in an architecture's configuration; None if it states none."""
    file = folder / f"configuration_{folder.name}.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.search(rf'^    {setting}: [^=\n]*= "(\w+)"', text, re.MULTILINE)
    return None if found is None else found[1]
