"""A module's result keeps its form on the way out and back in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from command_line import patcher
from torch.utils import _pytree as pytree

from patcher.bench import UsageError
from patcher.integrate.formats.foreign_contract import Refused
from patcher.integrate.kernelbench.model_new import candidate_of
from patcher.integrate.kernelbench.results import form_of, is_flat, packed, unpacked

PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return {result}

def get_inputs():
    return [torch.randn(8, 16)]

def get_init_inputs():
    return []
"""
RESULTS = {
    "1_number": "x.sum()",
    "2_one": "(torch.relu(x),)",
    "3_named": '{"low": x - 1, "high": x + 1}',
    "4_inside": '{"out": torch.relu(x), "more": (x.sum(), [x.mean(-1)])}',
    "5_several": "(x.sum(), x + 1)",
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("problems")
    (folder / "p").mkdir()
    for name, result in RESULTS.items():
        (folder / "p" / f"{name}.py").write_text(PROBLEM.replace("{result}", result))
    done = patcher("import", "p", "--out", "ops", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def module_of(text: str, name: str) -> ModuleType:
    found = ModuleType(name)
    exec(compile(text, name, "exec"), found.__dict__)
    return found


def kernel(op: str, result: str) -> str:
    """The module again, as a candidate."""
    count = len(pytree.tree_leaves(eval(result, {"torch": torch, "x": torch.ones(2, 2)})))
    names = ["output"] if count == 1 else [f"output_{index}" for index in range(count)]
    return (
        "import torch\nfrom torch.utils import _pytree\n\n"
        f"def {op}(x, {', '.join(names)}):\n"
        f"    values = _pytree.tree_leaves({result})\n"
        f"    for out, value in zip(({', '.join(names)},), values):\n"
        "        out.copy_(value.reshape(out.shape))\n"
    )


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_has_the_form_of_the_modules(
    name: str, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHER_OPS", str(problems / "ops"))
    op, file = f"p_{name}", problems / "p" / f"{name}.py"
    source = problems / f"{op}.py"
    source.write_text(kernel(op, RESULTS[name]))
    out = problems / f"new_{name}.py"
    done = patcher(
        *("export", str(source), "--to", "kernelbench", "--op", op),
        *("--problem", str(file), "--out", str(out)),
        env={"PATCHER_OPS": str(problems / "ops")},
        cwd=problems,
    )
    assert done.returncode == 0, done.stderr
    problem, answer = module_of(file.read_text(), "problem"), module_of(out.read_text(), "answer")
    [x] = problem.get_inputs()
    right, found = problem.Model()(x), answer.ModelNew()(x)
    wanted, form = pytree.tree_flatten(right)
    given, same = pytree.tree_flatten(found)
    assert same == form
    for one, other in zip(wanted, given, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, atol=1e-4)

    entry = module_of(candidate_of(op, out.read_text()).source, "candidate").__dict__[op]
    made = [torch.empty(each.shape or (1,)) for each in wanted]
    entry(x, *made)
    for one, other in zip(wanted, made, strict=True):
        assert torch.allclose(one.reshape(other.shape), other, atol=1e-4)


FORGED: list[Any] = [
    1,
    True,
    "output",
    {"tuple": [0, 0]},
    {"tuple": [1, 0]},
    {"dict": [["a", 0], [{"call": "exit"}, 1]]},
    {"dict": [["a", 0, 1]]},
    {"set": [0, 1]},
]


@pytest.mark.parametrize("form", FORGED)
def test_a_forged_form_is_refused(
    form: Any, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refused):
        packed(form, ["output_0", "output_1"])
    library = tmp_path / "ops"
    shutil.copytree(problems / "ops" / "p_5_several", library / "p_5_several")
    file = library / "p_5_several" / "problem.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "result": form}))
    monkeypatch.setenv("PATCHER_OPS", str(library))
    with pytest.raises(UsageError, match="is damaged"):
        candidate_of("p_5_several", "class ModelNew: ...")


def test_records_of_earlier_versions_have_no_form() -> None:
    assert packed(form_of(None, 1), ["a"]) == "a"
    assert packed(form_of(None, 2), ["a", "b"]) == "(a, b,)"
    assert unpacked({"list": [0, {"tuple": [1]}]}, "v") == ["v[0]", "v[1][0]"]
    assert is_flat(form_of(None, 2))
    assert not is_flat({"dict": [["a", 0]]})
