"""How much of a gain is precision and how much is fusion: the kernels of one column in the others.

`python -m patcher.bench.lab.kernelbench_columns RUNS --out FOLDER` writes of each problem's best
right kernel in the `tf32` column, into FOLDER/sources:

- the kernel for each other column, under that op's name; for `fp32` with `tl.dot` in full float32
  (`input_precision="ieee"`), since TF32 is refused there;
- the module in plain PyTorch, which is right in each column: its verdict times the baselines.

FOLDER/columns.toml is a plan for `python -m patcher.bench.lab.gpu_queue`, a verdict a source, over
the sizes that the loop timed. The modules in `fp32` come first: the shares need them. The
other columns have to be imported beside the first: `patcher import LEVEL2 --precision fp32
--precision tf32 --precision bf16`, with the same sizes. `kernelbench_table --columns FOLDER` reads
what comes of it.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from patcher.bench import Language, PatcherError, UsageError, load_op
from patcher.bench.lab.kernelbench_figures import gather
from patcher.bench.lab.kernelbench_shares import KERNEL, MODULE, precision_of
from patcher.integrate.kernelbench.columns import PRECISIONS
from patcher.status import attempts

OTHERS = ("fp32", "bf16")
LIMIT_S = 600
PLAN = """# Verdicts of the kernels of the tf32 column in the other columns, and of the modules
# themselves: `python -m patcher.bench.lab.gpu_queue columns.toml RESULTS --set judge=FILE --set
# ops=FOLDER --set sources=$PWD/sources`. `judge` is an environment that is sourced, `ops` the
# imported ops.
"""
JOB = """
[{name}]
setup = "{{judge}}"
limit_s = {limit_s}
run = "PATCHER_OPS={{ops}} python3 -P -m patcher evaluate {op} {{sources}}/{file} --language \
{language}{sweep} --json > {name}.json || [ -s {name}.json ]"
"""
_ENTRY = """

def {op}({names}):
    values = module({given}, torch.float32)
    for out, value in zip(({written},), values, strict=True):
        out.copy_(value.reshape(out.shape))
"""


def best_sources(folder: Path) -> Iterator[tuple[str, str | None, Language, str]]:
    """Of each problem in the tf32 column: its op, and sweep, language and source of its fastest
    right candidate over all runs.
    """
    best: dict[str, tuple[float, str | None, Language, str]] = {}
    for run, row in gather(folder)[0]:
        if precision_of(row.op)[1] != "tf32":
            continue
        for one in attempts(run):
            speed = one.geomean_speedup
            if speed is None or one.file is None or one.duplicate_of is not None:
                continue
            if row.op not in best or best[row.op][0] < speed:
                source = (run.path / one.file).read_text(encoding="utf-8")
                sweep = run.config.settings["plan"].get("sweep")
                best[row.op] = speed, sweep, Language(row.language), source
    for op, (_, sweep, language, source) in sorted(best.items()):
        yield op, sweep, language, source


def in_column(source: str, op: str, other: str, language: Language, precision: str) -> str:
    """A kernel of `op` under the name of its problem's op in another column.

    Raises:
        UsageError: it is to be in full float32, and the language says that in no known way.
    """
    if precision == "fp32":
        if language is not Language.TRITON:
            raise UsageError(f"{op}: a {language} kernel is not made float32 here", "use Triton")
        source = full_float32(source)
    return re.sub(rf"\b{op}\b", other, source)


def full_float32(source: str) -> str:
    """A Triton source whose `tl.dot` multiply in full float32."""
    tree = ast.parse(source)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in (
            "tl.dot",
            "triton.language.dot",
        ):
            kept = [
                each for each in call.keywords if each.arg not in ("allow_tf32", "input_precision")
            ]
            ieee = ast.keyword(arg="input_precision", value=ast.Constant("ieee"))
            call.keywords = [*kept, ieee]
    return ast.unparse(tree) + "\n"


def plain_module(name: str) -> str:
    """The module of an imported op as a candidate in PyTorch, in float32 as its process has it."""
    op = load_op(name)
    text = (op.folder / "baselines.py").read_text(encoding="utf-8")
    found = [
        ast.get_source_segment(text, each)
        for each in ast.parse(text).body
        if isinstance(each, ast.FunctionDef) and each.name == "module"
    ]
    if len(found) != 1 or found[0] is None:
        raise UsageError(f"{name}: its baselines.py has no module", "import the problem again")
    entry = _ENTRY.format(
        op=name,
        names=", ".join(each.name for each in op.contract.tensors),
        given=", ".join(each.name for each in op.contract.tensors if each.access == "read"),
        written=", ".join(each.name for each in op.contract.written),
    )
    return f"import torch\n\naten = torch.ops.aten\n\n\n{found[0]}\n{entry}"


def write(runs: Path, out: Path) -> int:
    """Write sources and the plan; returns how many verdicts it asks for.

    Raises:
        UsageError: no kernel of the tf32 column is right, or another column was not imported.
    """
    sources = out / "sources"
    sources.mkdir(parents=True, exist_ok=True)
    jobs: list[tuple[int, bool, str]] = []
    for op, sweep, language, source in best_sources(runs):
        problem = precision_of(op)[0]
        for place, precision in enumerate(OTHERS):
            other = problem + PRECISIONS[precision].suffix
            texts = {
                KERNEL: (language, in_column(source, op, other, language, precision)),
                MODULE: (Language.TORCH, plain_module(other)),
            }
            for what, (kind, text) in texts.items():
                name = f"{other}-{what}"
                (sources / f"{name}.py").write_text(text, encoding="utf-8")
                job = {"name": name, "op": other, "file": f"{name}.py", "language": kind.value}
                job["sweep"] = f" --sweep {sweep}" if sweep else ""
                jobs.append((place, what == KERNEL, JOB.format(**job, limit_s=LIMIT_S)))
    if not jobs:
        raise UsageError(f"no run in {runs} has a right kernel with TF32", "give other runs")
    plan = "".join([PLAN, *(text for _, _, text in sorted(jobs))])
    (out / "columns.toml").write_text(plan, encoding="utf-8")
    return len(jobs)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m patcher.bench.lab.kernelbench_columns")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(words)
    try:
        count = write(given.runs, given.out)
    except PatcherError as error:
        print(f"error: {error.message}; {error.hint}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: cannot write {given.out}: {error}; choose another --out", file=sys.stderr)
        return 2
    print(f"{count} verdicts: {given.out / 'columns.toml'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
