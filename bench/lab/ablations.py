"""What each part of the agent loop brings: the same problems, model and seeds, one part changed.

`python -m patcher.bench.lab.ablations OP... --model M --out FOLDER` makes a run for each problem,
seed and variant, and prints the table. The same command goes on where it was stopped, and prints
the table of what is there. `PATCHER_OPS` names folders of ops of your own.

Every variant but one has memory on; its memory is a folder of its own for each seed, empty at the
beginning, so that it knows what the problems before taught. Where the model's entry in
`patcher.toml` has a `seed` among its `sampling`, the seed of the run takes its place; else seeds
are repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from pydantic import Field, ValidationError

from patcher.bench import Language, PatcherError, Record, UsageError, WaitingError, load_op
from patcher.bench.lab.loop_runs import Estimated, LoopRow, geomean_of, loop_row, mean_known
from patcher.plan import RunPlan
from patcher.runs.run import Run
from patcher.settings import OFF, resolve
from patcher.strategies.search import Search

BASE = "all parts"
PLAN, TABLE, FIGURES = "ablations.json", "ablations.md", "table.json"


@dataclass(frozen=True)
class AblationVariant:
    """What differs from `BASE`."""

    settings: Mapping[str, str] = field(default_factory=dict)
    strategy: str = "refine"
    rounds: bool = False
    """Whether the strategy asks several candidates together, so that it takes a width."""
    counters: bool = True
    memory: bool = True


VARIANTS = {
    BASE: AblationVariant(),
    "no analyst": AblationVariant({"analyst": OFF}),
    "no diagnoser": AblationVariant({"diagnoser": OFF}),
    "no counters": AblationVariant(counters=False),
    "no memory": AblationVariant(memory=False),
    "beam": AblationVariant(strategy="beam", rounds=True),
    "evolve": AblationVariant(strategy="evolve", rounds=True),
}


class AblationPlan(Record):
    """What is compared: kept in the folder, so that it cannot change between two commands."""

    ops: tuple[str, ...] = Field(min_length=1)
    language: Language
    model: str
    iterations: int = Field(ge=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    variants: tuple[str, ...]
    threads: int | None = None
    judge: str = "local"
    sweep: str | None = None
    width: int | None = None
    """Candidates a round, where a variant's strategy asks several together."""


class AblationRow(Record):
    """One variant against `BASE`."""

    variant: str
    runs: int
    """Ended."""
    partial: tuple[str, ...]
    """Cells that have not: why, or where they wait."""
    right: int
    """Runs that ended with something right."""
    gain: Estimated | None
    """Geometric mean of what a user would apply: 1 where nothing is right and faster."""
    pairs: int
    """Problems and seeds that ended here and in `BASE`."""
    against: Estimated | None
    """Ratio of the gains, over those pairs; below 1, the part that is missing helps."""
    only_here: int
    only_base: int
    """Pairs of which one side alone has something right."""
    tokens: float | None
    usd: float | None
    judge_s: float | None
    """Means over the ended runs."""


Cell = tuple[str, int, str]
"""AblationVariant, seed, op."""


def cells(plan: AblationPlan) -> Iterator[Cell]:
    """In the order in which they are run: what is learned in one goes on to the next op."""
    yield from product(plan.variants, plan.seeds, plan.ops)


def slug(cell: Cell) -> str:
    variant, seed, op = cell
    return f"{variant.replace(' ', '-')}/seed-{seed}/{op}"


def run_cell(
    plan: AblationPlan, folder: Path, cell: Cell, report: Callable[[str, int, int], None]
) -> None:
    """Begin a run, or do what is left of it.

    Raises:
        PatcherError: as `pipeline.execute`.
    """
    from patcher import pipeline

    root = folder / "runs" / slug(cell)
    with seeded(plan.model, cell[1]):
        run = _open(plan, folder, cell, root)
        with run:
            pipeline.execute(run, report, lambda _: None)


def _open(plan: AblationPlan, folder: Path, cell: Cell, root: Path) -> Run:
    from patcher import pipeline

    if known := Run.list(root):
        return Run.open(known[-1])
    name, seed, op = cell
    variant = VARIANTS[name]
    model = plan.model
    if model.startswith("exchange:"):  # the same question in another run is another question
        model += f"/{slug(cell)}"
    memory = folder / "memory" / name.replace(" ", "-") / str(seed)
    settings = resolve(
        {
            "model": model,
            "analyst": model,  # on a CPU nobody analyses unless named
            "iterations": plan.iterations,
            "judge": plan.judge,
            "runs_dir": root,
            "memory": str(memory.absolute()) if variant.memory else OFF,
            **variant.settings,
        }
    )
    known_op = load_op(op)
    width = plan.width if variant.rounds else None
    asked = RunPlan(
        op=known_op.name,
        language=plan.language,
        sweep=plan.sweep,
        whole=False,
        threads=plan.threads,
        search=Search.of(known_op, plan.language, variant.strategy, width=width, seed=seed),
        counters=variant.counters,
    )
    return pipeline.start(settings, "optimize", None, None, asked)


@contextmanager
def seeded(model: str, seed: int) -> Iterator[None]:
    """The entry of the model with this seed, if its server takes one."""
    known = resolve().models
    if "seed" not in (known[model].sampling if model in known else {}):
        yield
        return
    entries = {
        name: each.model_dump(mode="json", exclude_defaults=True) for name, each in known.items()
    }
    entries[model]["sampling"]["seed"] = seed
    before = os.environ.get("PATCHER_MODELS")
    os.environ["PATCHER_MODELS"] = json.dumps(entries)
    try:
        yield
    finally:
        os.environ.pop("PATCHER_MODELS")
        if before is not None:
            os.environ["PATCHER_MODELS"] = before


def run_all(plan: AblationPlan, folder: Path, say: Callable[[str], None]) -> dict[Cell, str]:
    """Do what is left; returns why cells have not ended. One that waits keeps back what learns from
    it, and nothing else."""
    open_cells: dict[Cell, str] = {}
    held: set[tuple[str, int]] = set()
    for cell in cells(plan):
        chain = cell[:2]
        if chain in held:
            open_cells[cell] = "waits for the op before it"
            continue
        say(slug(cell))
        try:
            run_cell(plan, folder, cell, lambda *_: None)
        except PatcherError as error:
            open_cells[cell] = f"{error.kind}: {error.message}"
            if VARIANTS[cell[0]].memory and isinstance(error, WaitingError):
                held.add(chain)
    return open_cells


def rows_of(plan: AblationPlan, folder: Path, open_cells: Mapping[Cell, str]) -> list[AblationRow]:
    """The table, of the runs that have ended."""
    found: dict[Cell, LoopRow] = {}
    for cell in cells(plan):
        known = Run.list(folder / "runs" / slug(cell))
        row = loop_row(Run.open(known[-1], read_only=True)) if known else None
        if row is not None and row.ended is not None:
            found[cell] = row
    return [_row(plan, found, name, open_cells) for name in plan.variants]


def _row(
    plan: AblationPlan, found: Mapping[Cell, LoopRow], name: str, open_cells: Mapping[Cell, str]
) -> AblationRow:
    own = [found[cell] for cell in cells(plan) if cell[0] == name and cell in found]
    sides = [
        (op, found[name, seed, op], found[BASE, seed, op])
        for seed, op in product(plan.seeds, plan.ops)
        if (name, seed, op) in found and (BASE, seed, op) in found
    ]
    ratios = [here.gain / base.gain for _, here, base in sides]
    right = [(here.speedup is not None, base.speedup is not None) for _, here, base in sides]
    missing = [cell for cell in cells(plan) if cell[0] == name and cell not in found]
    return AblationRow(
        variant=name,
        runs=len(own),
        partial=tuple(f"{slug(each)}: {open_cells.get(each, 'not run')}" for each in missing),
        right=sum(each.speedup is not None for each in own),
        gain=geomean_of([each.gain for each in own], [each.op for each in own]) if own else None,
        pairs=len(sides),
        against=geomean_of(ratios, [op for op, _, _ in sides]) if sides and name != BASE else None,
        only_here=sum(here and not base for here, base in right),
        only_base=sum(base and not here for here, base in right),
        tokens=mean_known(each.tokens for each in own),
        usd=mean_known(each.usd for each in own),
        judge_s=mean_known(each.judge_s for each in own),
    )


def table(plan: AblationPlan, rows: Sequence[AblationRow]) -> str:
    head = (
        *("variant", "runs", "right", "gain", f"against *{BASE}* (pairs)"),
        *("right here alone, there alone", "tokens", "$", "judge s"),
    )
    wide = "" if plan.width is None else f", {plan.width} a round of beam and evolve"
    lines = [
        f"{len(plan.ops)} problems, seeds {', '.join(map(str, plan.seeds))}, {plan.model}, "
        f"{plan.language}, {plan.iterations} iterations{wide}; means with 95 % intervals, paired "
        "by problem and seed; 1 where nothing is right and faster.",
        "",
        f"| {' | '.join(head)} |",
        f"| --- |{' ---: |' * (len(head) - 1)}",
    ]
    of = len(plan.ops) * len(plan.seeds)
    for row in rows:
        against = f"{row.against} ({row.pairs})" if row.against else ""
        cells_of = (
            row.variant,
            f"{row.runs} of {of}",
            str(row.right),
            "" if row.gain is None else str(row.gain),
            against,
            f"{row.only_here}, {row.only_base}" if row.variant != BASE else "",
            "" if row.tokens is None else f"{row.tokens:,.0f}",
            "" if row.usd is None else f"{row.usd:.2f}",
            "" if row.judge_s is None else f"{row.judge_s:,.0f}",
        )
        lines.append(f"| {' | '.join(cells_of)} |")
    for row in rows:
        lines += [f"\nNot ended: {each}" for each in row.partial]
    return "\n".join(lines) + "\n"


def _plan(words: argparse.Namespace) -> AblationPlan:
    """The plan of the folder, which the command must not contradict."""
    language = Language(words.language)
    chosen = words.variant or list(VARIANTS)
    if unknown := [name for name in chosen if name not in VARIANTS]:
        raise UsageError(f"no variant {unknown[0]!r}", f"there are: {', '.join(VARIANTS)}")
    if language.traits.device == "cpu" and not words.variant:
        chosen.remove("no counters")  # there are none
    if words.iterations < 1 or words.seeds < 1:
        raise UsageError("--iterations and --seeds are at least 1", "give larger numbers")
    asked = AblationPlan(
        ops=tuple(load_op(op).name for op in words.ops),
        language=language,
        model=words.model,
        iterations=words.iterations,
        seeds=tuple(range(words.seeds)),
        variants=tuple(dict.fromkeys((BASE, *chosen))),
        threads=words.threads,
        judge=words.judge,
        sweep=words.sweep,
        width=words.width,
    )
    file = words.out / PLAN
    if file.is_file():
        try:
            known = AblationPlan.model_validate_json(file.read_text(encoding="utf-8"))
        except ValidationError as error:
            raise UsageError(f"{file} is no plan of ablations", "name a new --out") from error
        if known != asked:
            raise UsageError(f"{file} has another plan", "give the same options, or a new --out")
    else:
        words.out.mkdir(parents=True, exist_ok=True)
        file.write_text(asked.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return asked


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m patcher.bench.lab.ablations")
    parser.add_argument("ops", nargs="+", metavar="OP")
    parser.add_argument("--model", required=True, help="as `patcher optimize --model`")
    parser.add_argument("--out", required=True, type=Path, help="folder of the runs and the table")
    parser.add_argument("--language", default="cpp", choices=[each.value for each in Language])
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variant", action="append", help=f"default: all of {list(VARIANTS)}")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--judge", default="local")
    parser.add_argument("--sweep")
    parser.add_argument("--width", type=int, help="candidates a round of beam and evolve")
    given = parser.parse_args(words)
    try:
        plan = _plan(given)
        unfinished = run_all(plan, given.out, lambda line: print(line, file=sys.stderr))
        rows = rows_of(plan, given.out, unfinished)
    except PatcherError as error:
        print(f"error: {error.message}; {error.hint}", file=sys.stderr)
        return error.exit_code
    text = table(plan, rows)
    (given.out / TABLE).write_text(text, encoding="utf-8")
    document = [row.model_dump(mode="json") for row in rows]
    (given.out / FIGURES).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(text, end="")
    waits = any(why.startswith(WaitingError.kind) for why in unfinished.values())
    return WaitingError.exit_code if waits else int(bool(unfinished))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
