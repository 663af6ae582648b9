"""From an op's contract and what the judge said to the text that the agents read. Templates:
`prompts/*.md.j2`."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from jinja2 import ChoiceLoader, DictLoader, Environment, PackageLoader, StrictUndefined

from bench import Evaluation, Language, Op, Outcome, Point, Sweep
from bench.toolchains import toolchain
from patcher.attempts import Attempt, Recommendation
from patcher.extract import TAGS, Failure
from patcher.models import Role

LOG_LIMIT = 6000
"""Characters of compiler or run-time output that a prompt quotes: profiles and logs are long,
signal is sparse."""

_CPP_TYPES = {"float": "double", "int": "int64_t"}


class Prompts:
    """The prompts for one op in one language on one device."""

    def __init__(self, op: Op, language: Language, device: str, sweep: Sweep) -> None:
        self.op = op
        self.sweep = sweep
        rules = {f"rules_{language}.md.j2": toolchain(language).hints}
        self._environment = Environment(
            loader=ChoiceLoader([PackageLoader("patcher", "prompts"), DictLoader(rules)]),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,
        )
        self._environment.filters["quote"] = quote
        contract = op.contract
        tensors = ", ".join(f"tvm::ffi::TensorView {tensor.name}" for tensor in contract.tensors)
        scalars = "".join(
            f", {_CPP_TYPES[scalar.type]} {scalar.name}" for scalar in contract.scalars
        )
        names = [tensor.name for tensor in contract.tensors]
        hints = "".join(f", {scalar.name}: {scalar.type}" for scalar in contract.scalars)
        self._environment.globals.update(
            contract=contract,
            device=device,
            sweep=sweep,
            language=str(language),
            tag=TAGS[language][0],
            reference=reference_source(op),
            cpp_signature=f"void {contract.name}({tensors}{scalars})",
            python_signature=f"def {contract.name}({', '.join(names)}{hints}) -> None",
        )

    def system(self, role: Role) -> str:
        return self._render("system.md.j2", role=role)

    def generate(self, failure: Failure | None) -> str:
        """The first question; `failure` says why the reply before could not be used."""
        return self._render("generate.md.j2", failure=failure)

    def repair(self, source: str, evaluation: Evaluation, failure: Failure | None) -> str:
        """A candidate that is not right, and what the judge said of it."""
        return self._render(
            "repair.md.j2",
            source=source,
            evaluation=evaluation,
            log=clip(evaluation.log, head=evaluation.outcome is Outcome.COMPILATION_FAILURE),
            failure=failure,
        )

    def optimise(
        self,
        source: str,
        evaluation: Evaluation,
        recommendation: Recommendation | None,
        history: Sequence[Attempt],
        failure: Failure | None,
    ) -> str:
        """The best candidate so far, its timings, and the one change to make."""
        return self._render(
            "optimise.md.j2",
            source=source,
            evaluation=evaluation,
            table=self.table(evaluation),
            recommendation=recommendation,
            history=history,
            failure=failure,
        )

    def analyse(self, source: str, evaluation: Evaluation, history: Sequence[Attempt]) -> str:
        """The question to the performance analyst."""
        return self._render(
            "analyse.md.j2",
            source=source,
            evaluation=evaluation,
            table=self.table(evaluation),
            history=history,
        )

    def table(self, evaluation: Evaluation) -> str:
        """Timings as a Markdown table; bandwidth counts the bytes that any implementation must
        move."""
        rows = [
            "| point | candidate us | baseline us | speedup (95 % interval) | candidate GB/s |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for timing in evaluation.timings:
            point = Point(axes=timing.axes, dtypes=self.sweep.dtypes)
            axes = " ".join(f"{name}={size}" for name, size in timing.axes.items())
            gb_s = self.op.contract.bytes_moved(point) / timing.candidate_us / 1e3
            rows.append(
                f"| {axes} | {timing.candidate_us:.2f} | {timing.baseline_us:.2f} "
                f"| {timing.speedup:.3f} ({timing.speedup_low:.3f} to {timing.speedup_high:.3f}) "
                f"| {gb_s:.1f} |"
            )
        return "\n".join(rows)

    def _render(self, template: str, **context: object) -> str:
        return (
            re.sub(
                r"\n{3,}", "\n\n", self._environment.get_template(template).render(context)
            ).strip()
            + "\n"
        )


def reference_source(op: Op) -> str:
    """The reference function alone: the control beside it, which must fail, is not for the
    agents."""
    text = (op.folder / "reference.py").read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == "reference":
            return ast.get_source_segment(text, node) or ""
    raise ValueError(f"{op.name}: reference.py defines no reference")


def clip(text: str, limit: int = LOG_LIMIT, *, head: bool) -> str:
    """Shorten a log: of a compiler the head tells most, of a traceback the tail."""
    text = text.strip()
    if len(text) <= limit:
        return text
    left = f"[... {len(text) - limit} characters left out ...]"
    first = limit * 3 // 4 if head else limit // 4
    return f"{text[:first]}\n{left}\n{text[len(text) - (limit - first) :]}"


def quote(text: str, tag: str = "text") -> str:
    """A fenced block that nothing in the text can close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{tag}\n{text.rstrip()}\n{fence}"
