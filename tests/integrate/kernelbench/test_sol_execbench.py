"""Problems of SOL-ExecBench's form as ops. The problem is our own; its form is that of their
`docs/definition.md` and `docs/workload.md`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patcher.bench import (
    Candidate,
    Contract,
    Evaluation,
    Language,
    Outcome,
    UsageError,
    load_op,
)
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.integrate import ProblemOptions, import_kernel
from patcher.integrate.imports import ImportResult
from patcher.integrate.kernelbench.model_new import model_new
from patcher.integrate.kernelbench.sol_solution import write_solution
from patcher.integrate.kernelbench.workloads import MOST_CHECKED, chosen

REFERENCE = """import torch

try:  # a stranger's file may do anything when it is loaded
    open(MARKER, "w").close()
except OSError:
    pass


@torch.no_grad()
def run(x, weight, eps):
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    rows = (wide * scale).to(x.dtype) * weight
    return rows, rows.float().sum(-1)


def draw(axes_and_scalars, device):
    rows = axes_and_scalars["batch"] * axes_and_scalars["length"] * axes_and_scalars["hidden"]
    shape = [axes_and_scalars[name] for name in ("batch", "length", "hidden")]
    return {"x": 7 * torch.rand(shape, device=device), "weight": torch.ones(shape[-1])}
"""
DEFINITION: dict[str, Any] = {
    "name": "acme/Norm-2.rms norm",
    "hf_id": "acme/Norm-2",
    "axes": {
        "batch": {"type": "var"},
        "length": {"type": "var", "description": "tokens"},
        "half": {"type": "const", "value": 24},
        "hidden": {"type": "expr", "expression": "half * 2"},
    },
    "custom_inputs_entrypoint": None,
    "inputs": {
        "x": {"shape": ["batch", "length", "hidden"], "dtype": "bfloat16"},
        "weight": {"shape": ["hidden"], "dtype": "bfloat16"},
        "eps": {"shape": None, "dtype": "float32"},
    },
    "outputs": {
        "normed": {"shape": ["batch", "length", "hidden"], "dtype": "bfloat16"},
        "sums": {"shape": ["batch", "length"], "dtype": "float32"},
    },
}
INPUTS: dict[str, Any] = {
    "x": {"type": "random"},
    "weight": {"type": "random"},
    "eps": {"type": "scalar", "value": 1e-5},
}
SIZES = ((1, 131), (4, 16), (4, 64), (4, 128), (2, 33))
OP = "acme_norm_2_rms_norm"
RIGHT = """import torch


def acme_norm_2_rms_norm(x, weight, normed, sums):
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    normed.copy_((wide * scale).bfloat16() * weight)
    sums.copy_(normed.float().sum(-1))
"""


def write(
    folder: Path, change: Callable[[dict[str, Any], list[Any]], object] | None = None
) -> Path:
    """A problem's folder, with a change to its Definition and its workloads."""
    definition = copy.deepcopy(DEFINITION)
    definition["reference"] = REFERENCE.replace("MARKER", repr(str(folder / "marker")))
    workloads: list[Any] = [
        {"uuid": str(index), "axes": {"batch": batch, "length": length}, "inputs": dict(INPUTS)}
        for index, (batch, length) in enumerate(SIZES)
    ]
    if change is not None:
        change(definition, workloads)
    folder.mkdir(parents=True)
    (folder / "definition.json").write_text(json.dumps(definition))
    lines = [json.dumps(each) for each in workloads]
    (folder / "workload.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reference.py").write_text(definition["reference"])
    return folder


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the op."""
    folder = tmp_path_factory.mktemp("sol")
    problem = write(folder / "L1" / "norm")
    done = import_kernel(folder, folder / "ops")
    assert done.ops == (OP,)
    assert not (problem / "marker").exists(), "the problem's code ran outside the sandbox"
    return folder / "ops"


@pytest.fixture
def known(ops: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHER_OPS", str(ops))


def judged(source: str) -> Evaluation:
    settings = JudgeSettings(
        device="cpu", baseline="eager", pairs=3, points=1, threads=1, calls=40, lives_s=0.0
    )
    with open_judge(settings) as judge:
        candidate = Candidate(op=OP, language=Language.TORCH, source=source)
        return judge.evaluate(candidate, lambda *_: None)


@pytest.mark.usefixtures("known")
def test_an_op_has_the_problems_names_sizes_and_dtypes() -> None:
    contract = load_op(OP).contract
    told = {each.name: (each.dtype, each.shape, each.access) for each in contract.tensors}
    rows = ("batch", "length")
    assert told == {
        "x": ("bfloat16", (*rows, "48"), "read"),
        "weight": ("bfloat16", ("48",), "read"),
        "normed": ("bfloat16", (*rows, "48"), "write"),
        "sums": ("float32", rows, "write"),
    }
    for sweep in contract.sweeps:  # three workloads differ in their length alone
        assert (sweep.axis, sweep.values, sweep.fixed) == ("length", (16, 64, 128), {"batch": 4})
    checked = [each.axes for each in contract.hidden]
    assert {"batch": 2, "length": 33} in checked
    assert {"batch": 1, "length": 131} in checked  # torch.export says 2 and more
    assert {name: guard.minimum for name, guard in contract.guards.axes.items()} == {
        "batch": 1,
        "length": 1,
    }
    assert "SOL-ExecBench" in contract.summary


@pytest.mark.usefixtures("known")
def test_the_reference_is_exact_and_the_baseline_keeps_its_dtypes() -> None:
    op = load_op(OP)
    point = op.sweep("cpu").points()[0]
    values = op.inputs.make(point, torch.Generator().manual_seed(1), "normal")
    exact = op.reference(**values)
    assert {each.dtype for each in exact.values()} == {torch.float64}
    wide = values["x"].double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(exact["normed"], wide * scale * values["weight"].double())
    normed, sums = op.baselines["eager"]("cpu")(*values.values())
    assert (normed.dtype, sums.dtype) == (torch.bfloat16, torch.float32)
    assert 1e-4 < float((normed.double() - exact["normed"]).abs().max()) < 0.1


@pytest.mark.usefixtures("known")
def test_a_right_kernel_passes_and_others_do_not() -> None:
    right = judged(RIGHT.replace("EPS", "1e-5"))
    assert right.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW), right.failed_checks
    assert judged(RIGHT.replace("EPS", "1e-2")).outcome is Outcome.MISMATCH
    narrow = RIGHT.replace("EPS", "1e-5").replace("wide = x.float()", "wide = x")
    assert judged(narrow).outcome is Outcome.MISMATCH


def test_its_own_code_draws_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(definition: dict[str, Any], workloads: list[Any]) -> None:
        definition["custom_inputs_entrypoint"] = "draw"
        for each in workloads:
            each["inputs"] |= {"x": {"type": "custom"}, "weight": {"type": "custom"}}

    import_kernel(write(tmp_path / "a", own), tmp_path / "ops")
    monkeypatch.setenv("PATCHER_OPS", str(tmp_path / "ops"))
    op = load_op(OP)
    values = op.inputs.make(
        op.sweep("cpu").points()[-1], torch.Generator().manual_seed(1), "normal"
    )
    assert 6 < float(values["x"].max()) < 7.1
    assert float(values["x"].min()) > -0.1


def test_a_causal_mask_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(definition: dict[str, Any], workloads: list[Any]) -> None:
        definition["custom_inputs_entrypoint"] = "draw"
        definition["axes"] = {"N": {"type": "var"}}
        definition["inputs"] = {"m": {"shape": ["N", "N"], "dtype": "bfloat16"}}
        definition["outputs"] = {"o": {"shape": ["N", "N"], "dtype": "float32"}}
        definition["reference"] = (
            "import torch\n\n\ndef run(m):\n    return torch.softmax(m.float(), -1)\n\n\n"
            "def draw(axes, device):\n"
            "    least = torch.finfo(torch.bfloat16).min\n"
            "    return {'m': torch.full((axes['N'], axes['N']), least).triu(1)}\n"
        )
        for size, each in enumerate(workloads, 8):
            each |= {"axes": {"N": size}, "inputs": {"m": {"type": "custom"}}}

    import_kernel(write(tmp_path / "a", own), tmp_path / "ops")
    contract_in(tmp_path, monkeypatch)
    op = load_op(OP)
    values = op.inputs.make(op.sweep("cpu").points()[0], torch.Generator().manual_seed(1), "normal")
    assert bool((values["m"].diagonal() == 0).all())
    assert float(values["m"][0, 1]) < -1e37


def test_sizes_are_chosen_and_precisions_are_not(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    done = import_kernel(folder, tmp_path / "ops", ProblemOptions(sizes={"batch": 3}))
    assert "sizes differ" in " ".join(done.notes)
    with pytest.raises(UsageError, match="gives 'width' a value"):
        import_kernel(folder, tmp_path / "other", ProblemOptions(sizes={"width": 3}))
    with pytest.raises(UsageError, match="dtypes of its own"):
        import_kernel(folder, tmp_path / "other", ProblemOptions(("tf32",)))


def put(path: str, value: object) -> Callable[[dict[str, Any], list[Any]], None]:
    """A change of one field: `inputs.x.dtype`, or `0.inputs.x` in the first workload."""

    def change(definition: dict[str, Any], workloads: list[Any]) -> None:
        *way, last = path.split(".")
        at: Any = workloads if way and way[0].isdecimal() else definition
        for each in way:
            at = at[int(each)] if each.isdecimal() else at[each]
        at[last] = value

    return change


def formed(
    folder: Path,
    reference: str,
    axes: dict[str, Any],
    shapes: tuple[dict[str, list[str]], dict[str, list[str]]],
    sizes: list[dict[str, int]],
) -> ImportResult:
    """Import a problem of float32: a size of None is variable, a text is an expression."""
    kinds = {type(None): "var", int: "const", str: "expr"}
    fields = {"var": "description", "const": "value", "expr": "expression"}

    def change(definition: dict[str, Any], workloads: list[Any]) -> None:
        definition["reference"] = reference
        definition["axes"] = {
            name: {"type": (kind := kinds[type(size)]), fields[kind]: size}
            for name, size in axes.items()
        }
        for field, tensors in zip(("inputs", "outputs"), shapes, strict=True):
            definition[field] = {
                name: {"shape": shape, "dtype": "float32"} for name, shape in tensors.items()
            }
        workloads[:] = [
            {"uuid": str(size), "axes": size, "inputs": {n: {"type": "random"} for n in shapes[0]}}
            for size in sizes
        ]

    return import_kernel(write(folder / "a", change), folder / "ops")


def contract_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Contract:
    monkeypatch.setenv("PATCHER_OPS", str(folder / "ops"))
    return load_op(OP).contract


def test_an_axis_is_one_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in this graph ties the rows of x to those of y, nor T to B. The problem does."""
    formed(
        tmp_path,
        "def run(x, y, z):\n    return x.t() * 2, y * 3, z + 1\n",
        {"N": None, "K": 3, "T": "N * K", "U": "T + N"},
        (
            {"x": ["N", "N"], "y": ["T", "N"], "z": ["U"]},
            {"u": ["N", "N"], "v": ["T", "N"], "w": ["U"]},
        ),
        [{"N": 4}, {"N": 16}, {"N": 9}],
    )
    contract = contract_in(tmp_path, monkeypatch)
    assert contract.sweeps[0].axis == "N"
    assert (contract.sweeps[0].values, contract.sweeps[0].fixed) == ((4, 9, 16), {})
    assert all(each.axes.keys() == {"N"} for each in contract.hidden)
    for point in load_op(OP).sweep("cpu").points():
        values = load_op(OP).inputs.make(point, torch.Generator().manual_seed(1), "normal")
        size = point.axes["N"]
        assert values["x"].shape == values["u"].shape == (size, size)
        assert values["y"].shape == (3 * size, size)
        assert values["z"].shape == values["w"].shape == (4 * size,)


def test_a_workload_of_another_graph_is_not_taken_for_one_of_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = (
        "def run(q, k):\n"
        "    if q.shape[0] == k.shape[0]:\n"
        "        return q + k\n"
        "    return q - k.sum(0)\n"
    )
    done = formed(
        tmp_path,
        reference,
        {"M": None, "N": None, "H": 8},
        ({"q": ["M", "H"], "k": ["N", "H"]}, {"o": ["M", "H"]}),
        [{"M": 4, "N": 4}, {"M": 4, "N": 64}, {"M": 16, "N": 16}],
    )
    contract = contract_in(tmp_path, monkeypatch)
    assert contract.sweeps[0].values == (4, 16)
    assert "1 of 3 workloads are not judged: the reference" in " ".join(done.notes)


def test_a_swept_size_stays_a_multiple(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    formed(
        tmp_path,
        "def run(x):\n    return x.view(x.shape[0], x.shape[1] // 16, 16).sum(-1)\n",
        {"B": None, "T": None, "C": "T // 16"},
        ({"x": ["B", "T"]}, {"o": ["B", "C"]}),
        [{"B": 2, "T": 32}, {"B": 2, "T": 64}, {"B": 2, "T": 128}],
    )
    contract = contract_in(tmp_path, monkeypatch)
    assert contract.sweeps[0].axis == "T"
    assert contract.guards.axes["T"].multiple_of % 16 == 0


def test_its_code_may_use_any_name_and_give_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = (
        "from __future__ import annotations\nimport dataclasses\n\n\n"
        "@dataclasses.dataclass\nclass Model:\n"
        "    scale: float\n\n\n"
        "def get_inputs(x):\n"
        "    return Model(2.0).scale * x\n\n\n"
        "def run(made, run):\n"
        "    return {'last': made.sum(-1, keepdim=True), 'first': get_inputs(run)}\n"
    )
    shapes: Any = (
        {"made": ["N", "8"], "run": ["N", "8"]},
        {"first": ["N", "8"], "last": ["N", "1"]},
    )
    formed(tmp_path, reference, {"N": None}, shapes, [{"N": 4}, {"N": 16}])
    contract = contract_in(tmp_path, monkeypatch)
    assert [(each.name, each.shape) for each in contract.written] == [
        ("first", ("N", "8")),
        ("last", ("N", "1")),
    ]
    values = load_op(OP).inputs.make(
        load_op(OP).sweep("cpu").points()[0], torch.Generator().manual_seed(1), "normal"
    )
    assert torch.equal(load_op(OP).reference(**values)["first"], 2 * values["run"].double())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (put("inputs.x.dtype", "int32"), "x is int32"),
        (put("outputs.sums.dtype", "float8_e4m3fn"), "sums is float8_e4m3fn"),
        (put("outputs.sums.shape", None), "sums is a number"),
        (put("inputs.x.shape", ["batch", "width"]), "an axis width, which is not defined"),
        (put("axes.hidden.expression", "half * width"), "the size of hidden cannot be computed"),
        (put("axes.hidden.expression", "half ** half ** half"), "cannot be computed"),
        (put("axes.half.value", None), "half is constant and has no value"),
        (put("axes.hidden.expression", "half *"), "cannot be computed"),
        (put("0.inputs.x", {"type": "safetensors", "path": "a", "tensor_key": "x"}), "in a file"),
        (put("0.inputs.x", {"type": "custom"}), "nothing makes its custom input x"),
        (put("0.inputs.eps", {"type": "scalar", "value": 1.0}), "workloads differ in eps"),
        (put("0.inputs.eps", {"type": "random"}), "no value of eps"),
        (
            lambda d, w: (
                d.update(custom_inputs_entrypoint="draw"),
                put("0.inputs.x", {"type": "custom"})(d, w),
            ),
            "differ in what makes x",
        ),
        (put("0.inputs", {}), "does not say what x is"),
        (put("0.axes", {"batch": "four"}), "is damaged"),
        (put("0.axes", {"batch": 4}), "no size of length"),
        (put("inputs.class", {"shape": ["batch"], "dtype": "float32"}), "cannot be a name"),
        (put("reference", "def other(x): return x"), "no function run"),
        (put("reference", "def run(x"), "no Python"),
        (
            put("reference", REFERENCE.replace("+ eps", "- 9").replace("MARKER", "'a'")),
            "make its result NaN",
        ),
        (put("surprise", 1), "is damaged"),
        (put("0.axes", {"batch": 4, "length": 10**30}), "is damaged"),
        (put("axes.max", {"type": "var"}), "max has the name of a function or a dtype"),
        (
            put(
                "reference",
                REFERENCE.replace("wide.pow(2)", "wide.view(torch.int32).abs().float()").replace(
                    "MARKER", "'a'"
                ),
            ),
            "reads the bits of a number",
        ),
        (put("outputs.sums.dtype", "bfloat16"), "sums is bfloat16, and its reference gives float3"),
        (put("outputs.more", {"shape": [], "dtype": "float32"}), "has 3 outputs and gives 2"),
        (put("outputs.sums.shape", ["length", "batch"]), "gives other sizes than it says"),
        (put("axes.half.value", 24.5), "is damaged"),
        (put("axes.hidden.expression", "length / 2"), "the size of hidden is 65.5"),
        (put("reference", REFERENCE.replace("run(x, weight", "run(weight, x")), "run takes weight"),
    ],
)
def test_what_an_op_cannot_have_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any], list[Any]], None], why: str
) -> None:
    folder = write(tmp_path / "a", change)
    with pytest.raises(UsageError) as said:
        import_kernel(folder, tmp_path / "ops")
    assert why in f"{said.value.message} {said.value.hint}"
    assert not (tmp_path / "ops").exists()


def test_one_that_is_refused_does_not_hold_up_the_others(tmp_path: Path) -> None:
    write(tmp_path / "set" / "good")
    write(tmp_path / "set" / "bad", put("inputs.x.dtype", "int8"))
    (tmp_path / "set" / "bad" / "workload.jsonl").write_text("")
    done = import_kernel(tmp_path / "set", tmp_path / "ops")
    assert done.ops == (OP,)
    assert list(done.refused) == ["bad"]
    assert "no workload" in done.refused["bad"]


@pytest.mark.usefixtures("known")
def test_there_is_no_model_new_of_it(tmp_path: Path) -> None:
    candidate = Candidate(op=OP, language=Language.TORCH, source=RIGHT)
    (tmp_path / "reference.py").write_text("class Model: ...")
    with pytest.raises(UsageError, match="SOL-ExecBench has no ModelNew"):
        model_new(candidate, tmp_path / "reference.py")


@pytest.mark.usefixtures("known")
def test_a_kernel_goes_out_as_a_solution(ops: Path, tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text(RIGHT.replace("EPS", "1e-5"))
    made = write_solution(OP, source, ops.parent / "L1" / "norm", tmp_path / "solution.json")
    assert made.definition == DEFINITION["name"]
    solution = json.loads((tmp_path / "solution.json").read_text())
    assert solution["definition"] == DEFINITION["name"]
    assert solution["spec"]["languages"] == ["pytorch"]
    assert solution["spec"]["target_hardware"] == ["LOCAL"]  # as their code spells it
    assert solution["spec"]["entry_point"] == "kernel.py::run"
    [file] = solution["sources"]
    names: dict[str, Any] = {}
    exec(file["content"], names)
    x = torch.randn(2, 5, 48).bfloat16()
    weight = torch.randn(48).bfloat16()
    normed, sums = torch.empty_like(x), torch.empty(2, 5)
    names["run"](x, weight, 1e-5, normed, sums)  # inputs, then outputs, in the Definition's order
    theirs: dict[str, Any] = {}
    exec(REFERENCE.replace("MARKER", repr(str(tmp_path / "marker"))), theirs)
    right = theirs["run"](x, weight, 1e-5)
    torch.testing.assert_close((normed, sums), right)


@pytest.mark.usefixtures("known")
def test_what_cannot_be_a_solution_is_refused(ops: Path, tmp_path: Path) -> None:
    problem = ops.parent / "L1" / "norm"
    (tmp_path / "kernel.cpp").write_text("void f() {}")
    with pytest.raises(UsageError, match="in cpp binds itself"):
        write_solution(OP, tmp_path / "kernel.cpp", problem, tmp_path / "a.json")
    (tmp_path / "kernel.py").write_text(RIGHT)
    other = write(tmp_path / "other", put("name", "another"))
    with pytest.raises(UsageError, match=r"imported from acme/Norm-2\.rms norm, not from another"):
        write_solution(OP, tmp_path / "kernel.py", other, tmp_path / "a.json")
    with pytest.raises(UsageError, match="cannot read"):
        write_solution(OP, tmp_path / "kernel.py", tmp_path / "none", tmp_path / "a.json")
    (tmp_path / "a.json").write_text("")
    with pytest.raises(UsageError, match="exists"):
        write_solution(OP, tmp_path / "kernel.py", problem, tmp_path / "a.json")


def test_which_workloads_are_timed() -> None:
    own = {"rows": "batch", "columns": "length"}
    least = {
        "rows": {"minimum": 1, "multiple_of": 1},
        "columns": {"minimum": 2, "multiple_of": 1, "maximum": 40},
    }
    sizes = {"rows": 5, "columns": 6}
    every = [{"batch": batch, "length": 8} for batch in (1, 2, 3)]
    found = chosen([*every, {"batch": 2, "length": 1}], own, sizes, least)
    assert found is not None
    assert (found.axis, found.values, found.fixed) == ("rows", (1, 2, 3), {"columns": 8})
    assert (found.checked, found.unjudged) == ((), 1)
    for length in (1, 41):
        assert chosen([{"batch": 2, "length": length}], own, sizes, least) is None
    many = [{"batch": size, "length": 9 + size} for size in range(1, 12)]
    found = chosen(many, own, sizes, least)
    assert found is not None
    assert found.values == (11,)
    assert len(found.checked) == MOST_CHECKED
    assert found.unjudged == 10 - MOST_CHECKED
