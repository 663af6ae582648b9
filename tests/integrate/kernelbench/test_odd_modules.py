"""Modules that are legal and odd: right all the way, or refused with their reason."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from command_line import patcher

from patcher.bench import Candidate, Language, UsageError
from patcher.bench.judge.drawing import drawn_points
from patcher.bench.judge.op_calls import checked_results
from patcher.bench.lab.own_check import OwnCheck, own_check, with_changes
from patcher.bench.ops.op import Op
from patcher.integrate.formats.foreign_contract import Refused
from patcher.integrate.kernelbench.imports import own_problem_op
from patcher.integrate.kernelbench.model_new import candidate_of, model_new
from patcher.integrate.kernelbench.problem import read_problem
from patcher.integrate.kernelbench.runner.graph import Graph

PROBLEM = """from __future__ import annotations
import torch
import torch.nn as nn
N = 32
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        INIT
    def forward(self, TAKEN):
        return RESULT
def get_inputs(): return INPUTS
def get_init_inputs(): return []
"""
N = 32
X = "[torch.randn(64, N)]"
LINEAR = "nn.Linear(N, N)"
COUNTER = "self.n = []; self.step = lambda: self.n.append(1) or len(self.n)"


def text_of(module: tuple[str, ...]) -> str:
    taken, result, inputs, init = (*module, *(X, "pass")[len(module) - 2 :])
    text = PROBLEM.replace("TAKEN", taken).replace("RESULT", result).replace("INIT", init)
    return text.replace("INPUTS", inputs)


def imported(
    folder: Path,
    patch: pytest.MonkeyPatch,
    module: tuple[str, ...],
    precision: str = "fp32",
) -> tuple[Path, Op]:
    file = folder / "p_odd.py"
    file.write_text(text_of(module))
    name, files = own_problem_op(file, precision, "a test")
    for path, data in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(data)
    patch.setenv("PATCHER_OPS", str(folder))
    return file, Op(folder / name)


def judged(op: Op) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    point = op.contract.sweeps[0].points()[-1]
    values: dict[str, torch.Tensor] = op.inputs.make(point, torch.Generator(), "normal")
    return values, checked_results(op, "reference.py", "reference", op.reference(**values))


def run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "text"}
    exec(compile(text, "text", "exec"), names)
    return names


@pytest.mark.parametrize(
    "module",
    [
        ("x, state, shape", "state * 2 + x, shape + 1", X + " * 3"),
        ("zip, dict, values", "zip * 2 + dict - values", X + " * 3"),
        ("x, like", "torch.relu(x) if like == 'relu' else x", "[torch.randn(64, N), 'relu']"),
        ("x", "self.a(self.b(x))", X, f"self.a = {LINEAR}; self.b = {LINEAR}; "
         "self.b.weight = self.a.weight"),
        ("x", "self.b(self.a(x))", X, f"self.a = self.b = {LINEAR}"),
        ("x", "x * torch.tensor(0.3) + torch.arange(N) / N"),
        ("x, s", "x * s", "[torch.randn(64, N), torch.tensor(2.0)]"),
        ("x", "(x.argmax(1), x.topk(3)[0])"),
        ("x", "torch.where((x > 0) & (x < 1) | (x > 2) ^ (x > 3), x, -x)"),
        ("x", "self.r(x[None])[0][0]", X, "self.r = nn.LSTM(N, 8, 2, bidirectional=True)"),
        ("x", "self.r(x)[1]", X, "self.r = nn.GRU(N, 8)"),
        ("x", "self.d(x) + nn.functional.rrelu(x)", X, "self.d = nn.Dropout(0.0)"),
    ],
)  # fmt: skip
def test_the_module_itself_is_right_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: tuple[str, ...]
) -> None:
    file, op = imported(tmp_path, monkeypatch, module)
    candidate = candidate_of(op.name, file.read_text().replace("Model(", "ModelNew("))
    values, exact = judged(op)
    run(candidate.source)[op.name](*values.values())
    for name, right in exact.items():
        torch.testing.assert_close(values[name].double(), right, rtol=1e-5, atol=1e-5)
    theirs, ours = run(file.read_text()), run(model_new(candidate, file))
    results = []
    given = theirs["get_inputs"]()
    for kind in (ours["ModelNew"], theirs["Model"]):
        torch.manual_seed(1)
        with torch.no_grad():
            results.append(kind()(*given))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("longest", "flops", "module"),
    [
        (N, 2 * 64 * N * 8, ("x, y", "torch.einsum('ij,jk->ik', x, y)",
         "[torch.randn(64, N), torch.randn(N, 8)]")),
        (9, 2 * 64 * 9 * 9 * (4 + 5), ("q, k, v",
         "nn.functional.scaled_dot_product_attention(q, k, v)",
         "[torch.randn(64, 9, 4), torch.randn(64, 9, 4), torch.randn(64, 9, 5)]")),
        (48, 2 * 64 * 9 * 3 * 48 * (N + 48), ("x", "self.r(x)[0]", "[torch.randn(64, 9, N)]",
         "self.r = nn.GRU(N, 48, batch_first=True)")),
        (N, 0, ("x", "x.cumsum(-1)")),
        (N, 0, ("x", "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)")),
        (64, 0, ("x", "x - x.sum(0, keepdim=True)")),
        (64 * N, 0, ("x", "x.sum() * x.new_ones(()).mean() + x")),
        (8 * N, 0, ("x", "torch.var_mean(x, (1, 2))[0]", "[torch.randn(64, 8, N)]")),
        (N, 0, ("x", "x.softmax(-1)")),
        (N, 0, ("x", "torch.logsumexp(x, 1, keepdim=True)")),
        (4, 0, ("x", "nn.functional.avg_pool1d(x, 4)", "[torch.randn(64, 8, N)]")),
        (1, 0, ("x", "nn.functional.max_pool1d(x[:, ::2], 4)", "[torch.randn(64, 8, N)]")),
        (1, 0, ("x", "x.amax(-1, keepdim=True) + x[:, -1:]")),
        (1, 0, ("x", "x + x.new_ones(())")),
        (N, 0, ("x", "self.m(x)", "[torch.randn(64, 9, N)]", "self.m = nn.LayerNorm(N)")),
        (2 * N, 0, ("x", "self.m(x)", "[torch.randn(64, 8, N)]", "self.m = nn.GroupNorm(4, 8)")),
        (N, 0, ("x", "self.m(x)", "[torch.randn(64, 8, N)]", "self.m = nn.InstanceNorm1d(8)")),
        (4 * 3, 2 * 64 * 8 * N * 2 * 3, ("x", "self.c(x)", "[torch.randn(64, 8, N)]",
         "self.c = nn.ConvTranspose1d(8, 4, 3, groups=2)")),
    ],
)  # fmt: skip
def test_sums_and_products_are_counted_whatever_makes_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    longest: int,
    flops: int,
    module: tuple[str, ...],
) -> None:
    contract = imported(tmp_path, monkeypatch, module)[1].contract
    point = contract.sweeps[0].points()[-1]
    assert (contract.longest_sum(point), contract.flops(point)) == (longest, flops)


def test_a_length_that_no_contract_can_say_is_told() -> None:
    program = SimpleNamespace(range_constraints={})
    graph = Graph(program, SimpleNamespace(forward=lambda x: x), [])
    size = SimpleNamespace(node=SimpleNamespace(expr=sympy.Symbol("s0") % 7))
    graph._summed([size, 2], [2])
    assert graph.sums == set()
    assert graph.notes == ["a sum of Mod(s0, 7) elements is counted as one of 1"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_numbers_that_a_graph_makes_are_as_wide_as_its_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Zeros that are filled, and quotients of whole numbers, are float32 by default."""
    made = "torch.zeros(64, N).index_add(0, torch.arange(64), x / 3) * x"
    module = ("x", made + " + torch.arange(N) / 7 * x + torch.linspace(0, 1, N) / 3")
    _, op = imported(tmp_path, monkeypatch, module, precision)
    values, found = judged(op)
    x, steps = values["x"].double(), torch.arange(32).double()
    right = x / 3 * x + steps / 7 * x + steps / 31 / 3
    torch.testing.assert_close(found["output"], right, rtol=1e-13, atol=1e-13)
    [eager] = op.baselines["eager"]("cpu")(*values.values())
    error = float((eager - right).abs().max())
    assert (1e-9 < error < 1e-5) if precision == "fp32" else (1e-3 < error < 1)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("reason", "module"),
    [
        ("a list for xs", ("xs", "xs[0]", "[[torch.randn(8, 8)]]")),
        ("any number of inputs", ("*xs", "xs[0] + xs[1]", X + " * 2")),
        ("other numbers than the module", ("x", "x * self.step()", X, COUNTER)),
        ("depend on values", ("x", "x[x > 0]")),
        ("random", ("x", "self.r(x)[0]", X, "self.r = nn.LSTM(N, 8, 2, dropout=0.1)")),
        ("random", ("x", "self.d(x)", X, "self.d = nn.Dropout(0.1)")),
        ("other numbers than the module", ("x", "self.r(x)[0] * self.step()", X,
         f"{COUNTER}; self.r = nn.GRU(N, 8)")),
        ("offsets or lengths", ("w, x, o", "nn.functional.embedding_bag(x, w, o)",
         "[torch.rand(9, 8), torch.randint(0, 9, (64,)), torch.arange(0, 64, 4)]")),
    ],
)  # fmt: skip
def test_what_no_op_can_be_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, module: tuple[str, ...]
) -> None:
    with pytest.raises(Refused, match=reason):
        imported(tmp_path, monkeypatch, module)


@pytest.mark.parametrize(
    ("multiple", "module"),
    [
        (4, ("x", "x.view(-1, 4).sum(1)", "[torch.randn(64)]")),
        (0, ("x, i", "x.gather(1, i)", "[torch.randn(64, N), torch.randint(0, N, (64, 8))]")),
        (0, ("x, i", "x[i]", "[torch.randn(64, N), torch.randperm(64)]")),
        (1, ("x", "x.softmax(1)")),
    ],
)
def test_only_sizes_that_the_module_takes_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiple: int, module: tuple[str, ...]
) -> None:
    """A right kernel fails at others, and would be blamed for it."""
    contract = imported(tmp_path, monkeypatch, module)[1].contract
    sweep = contract.sweeps[0]
    guard = contract.guards.axes[sweep.axis]
    assert (guard.minimum == guard.maximum == 64) == (not multiple)
    assert guard.multiple_of == (multiple or 1)
    drawn = [drawn_points(contract, sweep, random.Random(seed)) for seed in range(30)]
    sizes = {each.axes[sweep.axis] for points in drawn for each in points}
    assert all(map(guard.takes, sizes | {*sweep.values}))


@pytest.mark.parametrize(
    ("name", "op"),
    [("37_Größe", "level9_37_gr__e"), ("矩阵", "level9"), ("class", "class_"), ("zip", "zip_")],
)
def test_any_file_name_gives_a_name_of_a_function(tmp_path: Path, name: str, op: str) -> None:
    (tmp_path / "level9").mkdir()
    file = tmp_path / "level9" / f"{name}.py"
    file.write_text("")
    assert read_problem(file, 1, {}).name == op


KERNEL = '''"""A kernel."""
from __future__ import annotations
import torch
N = 7
class Model: ...
def p_odd(x, output): output.copy_(x * N)
'''


def test_the_problem_and_a_kernel_keep_their_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, op = imported(tmp_path, monkeypatch, ("x", "x * 7"))
    candidate = Candidate(op=op.name, language=Language.TORCH, source=KERNEL)
    x = torch.randn(64, 32)
    assert run(model_new(candidate, file))["ModelNew"]()(x).equal(x * 7)


def test_the_own_check_runs_any_result_at_the_sizes_of_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, op = imported(tmp_path, monkeypatch, ("x", "(x * 7, [x.sum(1)])"))
    text = file.read_text()
    candidate = candidate_of(op.name, text.replace("Model(", "ModelNew("))
    assert own_check(candidate, file) == OwnCheck(accepted=True)
    wrong = candidate.model_copy(update={"source": candidate.source.replace("sum", "mean")})
    assert "off by" in own_check(wrong, file).why
    assert "M: int = 16" in with_changes("M: int = 64\n", {"M": "64 -> 16"})
    assert "8, 16" in with_changes("M, K = 64, 16", {"M": "64 -> 8"})
    with pytest.raises(UsageError, match="no value"):
        with_changes(text, {"M": "64 -> 16"})


def test_what_is_left_out_is_named_and_no_name_is_obeyed(tmp_path: Path) -> None:
    parts = "class Model: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ..."
    (tmp_path / "1_red\x1b[31m.py").write_text(parts)
    (tmp_path / "2_cut.py").write_text(parts + "(")
    (tmp_path / "3_latin.py").write_bytes(b"# \xe9\n" + parts.encode())
    (tmp_path / "4_helper.py").write_text("")
    (tmp_path / "5_good.py").write_text(text_of(("x", "x * 2")))
    done = patcher("import", ".", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    refused = [line.split(": ")[1] for line in done.stdout.splitlines() if "refused" in line]
    assert refused == ["1_red<U+001B>[31m.py", "2_cut.py", "3_latin.py"]
