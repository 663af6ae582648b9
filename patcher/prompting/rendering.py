"""From an op's contract and what the judge said to the text that the agents read. Templates:
`templates/*.md.j2`; what is optional is cut to the room of a prompt (`room.py`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jinja2 import ChoiceLoader, DictLoader, Environment, PackageLoader, StrictUndefined

from patcher.attempts import Attempt, Diagnosis, KnownKernel, Recommendation, ReplyFailure
from patcher.attempts.structure import structure
from patcher.bench import (
    Candidate,
    Evaluation,
    Language,
    Op,
    Outcome,
    Sweep,
    comment_mark,
    header_form,
)
from patcher.bench.toolchains import toolchain
from patcher.models import PROMPT_TOKENS, Role
from patcher.prompting.expectations import expectations, verdict
from patcher.prompting.op_source import baseline_source, reference_source
from patcher.prompting.quoting import clip, quote
from patcher.prompting.room import characters, fitted
from patcher.prompting.tables import counters_table, roofline, timing_table

SHOWN_EXPECTATIONS = 10
"""Of the analyst, the latest; its average is over all."""

_CPP_TYPES = {"float": "double", "int": "int64_t"}


class Prompts:
    """The prompts for one op in one language on one device.

    `extra` is text of the caller's for one question: memory of earlier runs, what a user adds.
    """

    def __init__(
        self,
        op: Op,
        language: Language,
        device: str,
        sweep: Sweep,
        *,
        tokens: int = PROMPT_TOKENS,
        known_kernels: Sequence[KnownKernel] = (),
    ) -> None:
        self.op = op
        self.language = language
        self.sweep = sweep
        rules = {f"rules_{language}.md.j2": toolchain(language).hints}
        self.room = characters(tokens)
        self._environment = Environment(
            loader=ChoiceLoader(
                [PackageLoader("patcher.prompting", "templates"), DictLoader(rules)]
            ),
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
            tag=language.traits.tags[0],
            reference=reference_source(op),
            cpp_signature=f"void {contract.name}({tensors}{scalars})",
            header=header_form(contract, comment_mark(language.in_python)),
            python_signature=f"def {contract.name}({', '.join(names)}{hints}) -> None",
        )
        # of the same language: nothing is to be translated, something to be beaten
        same = all(kernel.language == language for kernel in known_kernels)
        self._to_beat = len(known_kernels) if same else 0
        self._known = self._part("known_kernels", kernels=known_kernels, beaten=self._to_beat)

    def head(self, prompt: str) -> int:
        """Characters at a prompt's beginning that all questions on this op have."""
        task = self._template("task.md.j2")
        head = f"{task}\n{self._template(f'rules_{self.language}.md.j2')}"
        return len(head) if prompt.startswith(head) else 0

    def system(self, role: Role) -> str:
        return self._template("system.md.j2", role=role)

    def generate(
        self,
        failure: ReplyFailure | None,
        *,
        draw: int | None = None,
        unlike: Sequence[tuple[Attempt, str]] = (),
        extra: str = "",
    ) -> str:
        """A question that begins anew; `failure` says why the reply before could not be used.

        Args:
            draw: which of several independent answers this is.
            unlike: attempts and sources of known designs; another one is wanted.
        """
        designs = [(one, self._features(source)) for one, source in unlike]
        parts = {
            "known_kernels": self._known,
            "baseline": self._baseline(self.op.accuracy_baseline),
            "unlike": self._part("unlike", designs=designs),
            "extra": extra,
        }
        return self._render(
            "generate.md.j2",
            parts,
            failure=failure,
            draw=draw,
            beat=self._to_beat,
            translate=bool(self._known),
        )

    def repair(
        self,
        source: str,
        evaluation: Evaluation,
        failure: ReplyFailure | None,
        *,
        diagnosis: Diagnosis | None = None,
        again: bool = False,
        extra: str = "",
    ) -> str:
        """A candidate that is not right, what the judge said of it, and what is at its root;
        `again`: an earlier reply had this very source, too.
        """
        parts = {"log": self._log(evaluation), "known_kernels": self._known, "extra": extra}
        return self._render(
            "repair.md.j2",
            parts,
            source=source,
            evaluation=evaluation,
            diagnosis=diagnosis,
            again=again,
            failure=failure,
        )

    def optimize(
        self,
        source: str,
        evaluation: Evaluation,
        recommendation: Recommendation | None,
        history: Sequence[Attempt],
        failure: ReplyFailure | None,
        *,
        extra: str = "",
    ) -> str:
        """A candidate that is right, its timings, and the one change to make."""
        return self._render(
            "optimize.md.j2",
            self._measured(evaluation, history, extra),
            source=source,
            evaluation=evaluation,
            table=self.table(evaluation),
            recommendation=recommendation,
            failure=failure,
        )

    def combine(
        self,
        kernels: Sequence[tuple[str, Evaluation]],
        history: Sequence[Attempt],
        failure: ReplyFailure | None,
        *,
        extra: str = "",
    ) -> str:
        """Sources and verdicts of several right candidates, of which one is to be made."""
        shown = [(source, one, self.table(one)) for source, one in kernels]
        parts = self._measured(kernels[0][1], history, extra)
        return self._render("combine.md.j2", parts, kernels=shown, failure=failure)

    def analyse(
        self,
        source: str,
        evaluation: Evaluation,
        history: Sequence[Attempt],
        *,
        pictures: int = 0,
        extra: str = "",
    ) -> str:
        """The question to the performance analyst; `pictures` go with it."""
        found = expectations(history)
        return self._render(
            "analyse.md.j2",
            self._measured(evaluation, history, extra),
            source=source,
            evaluation=evaluation,
            table=self.table(evaluation),
            roofline=roofline(self.op, self.sweep, evaluation),
            expectations=found[-SHOWN_EXPECTATIONS:],
            verdict=verdict(found),
            pictures=pictures,
        )

    def skill(self, **context: object) -> str:
        """`SKILL.md` of a workspace for an agent from outside; the language's rules come last."""
        return self._template("skill.md.j2", **context)

    def diagnose(self, source: str, evaluation: Evaluation, *, extra: str = "") -> str:
        """The question to who judges failures."""
        parts = {"log": self._log(evaluation), "extra": extra}
        return self._render("diagnose.md.j2", parts, source=source, evaluation=evaluation)

    def table(self, evaluation: Evaluation) -> str:
        """Timings as a Markdown table."""
        return timing_table(self.op, self.sweep, evaluation)

    def _measured(
        self, evaluation: Evaluation, history: Sequence[Attempt], extra: str
    ) -> dict[str, str]:
        counters = counters_table(evaluation.counters)
        return {
            "history": self._part("history", history=history),
            "baseline": self._baseline(evaluation.baseline),
            "counters": f"# Hardware counters (Nsight Compute)\n{counters}\n" if counters else "",
            "extra": extra,
        }

    def _log(self, evaluation: Evaluation) -> str:
        head = evaluation.outcome is Outcome.COMPILATION_FAILURE
        log = clip(evaluation.log, head=head)
        return f"Output:\n{quote(log)}\n" if log else ""

    def _baseline(self, name: str | None) -> str:
        source = baseline_source(self.op, name) if name else None
        return self._part("baseline", baseline=name, source=source) if source else ""

    def _features(self, source: str) -> list[str]:
        candidate = Candidate(op=self.op.name, language=self.language, source=source)
        return sorted(structure(candidate).features)

    def _part(self, name: str, **context: object) -> str:
        return self._template(f"{name}.md.j2", **context) if any(context.values()) else ""

    def _render(self, template: str, parts: Mapping[str, str], **context: object) -> str:
        return fitted(
            lambda kept, cut: self._template(template, parts=kept, cut=cut, **context),
            parts,
            self.room,
        )

    def _template(self, template: str, **context: object) -> str:
        text = self._environment.get_template(template).render(context)
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
