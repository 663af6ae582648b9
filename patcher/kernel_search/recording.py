"""A finished loop as a folder that others can read and replay: what was asked and answered, what
the judge said, and a table.

`recording.json` (what was searched, where it was judged, every attempt), `replies.jsonl` (each
question whole, and its answer), `evaluations.jsonl` (each verdict), `README.md` (the table). A
replay runs the loop again on the recorded replies and verdicts: no model, no compiler, no GPU. It
must come to the same end.

Many recordings take little room in one archive: `tar -cJf recordings.tar.xz FOLDER...`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from patcher.agent import StopRules, recorded_stop, run_loop
from patcher.attempts import Attempt, LoopResult
from patcher.attempts.history import RequestRound
from patcher.bench import (
    SCHEMA_VERSION,
    Candidate,
    Environment,
    Evaluation,
    Language,
    Op,
    Record,
    Sweep,
    UsageError,
    VerificationError,
    content,
    load_op,
)
from patcher.hotspot import Profile
from patcher.judges.languages import judge_device_kind
from patcher.kernel_search.stage import Hardware, op_share_pct, unadvised
from patcher.models import PROMPT_TOKENS, ModelCall, Role
from patcher.models.replay import RecordingEndedError, ReplayModel, export_recording
from patcher.prompting.room import CHARACTERS_PER_TOKEN
from patcher.runs.run import Run, journal_name
from patcher.strategies.search import Search
from patcher.visible import one_line

ABOUT, REPLIES, EVALUATIONS, TABLE = (
    "recording.json",
    "replies.jsonl",
    "evaluations.jsonl",
    "README.md",
)
FILES = (ABOUT, REPLIES, EVALUATIONS, TABLE)
_RESTORE = "restore the recording from a copy"


class LoopRecording(Record):
    """What was searched, and what came of it."""

    schema_version: int = SCHEMA_VERSION
    op: str
    contract: str
    """`Op.digest` then."""
    language: Language
    search: Search
    hardware: str
    """What the agents were told of it."""
    environment: Environment | None
    """Where the judge worked; None: no reply held a source."""
    sweep: Sweep
    iterations: int
    """At most."""
    rules: StopRules
    prompt_tokens: int = Field(gt=0)
    without: frozenset[Role] = frozenset()
    """Advisers that were switched off."""
    reading: int = 0
    """How replies were read: `RequestRound.reading`, of the first round."""
    optimisation: LoopResult
    tokens: tuple[tuple[int, int], ...]
    """In and out, by iteration, all its questions together: as the provider counted, else estimated
    by length."""


def record(run_dir: Path, folder: Path) -> LoopRecording:
    """Write the recording of a finished loop.

    Raises:
        UsageError: not a run, its loop is not finished, or the folder is there.
        VerificationError: the run was changed.
    """
    run = Run.open(run_dir, read_only=True)
    plan = run.config.settings.get("plan") or {}
    found_in = sorted(run.path.glob(f"ops/{plan.get('op') or '*'}/optimisation.json"))
    if not found_in:
        raise UsageError(f"the loop of run {run.id} is not finished", f"patcher resume {run.id}")
    path = found_in[0]  # a run searches one op
    op = load_op(path.parent.name)
    if folder.exists():
        raise UsageError(f"{folder} is there", "name a new folder")
    result = LoopResult.model_validate_json(path.read_text(encoding="utf-8"))
    ended = recorded_stop(run, op.name, final=run.done("patch"))
    if ended is None or (ended.reason, ended.iterations) != (
        result.stopped,
        len(result.iterations),
    ):  # given more, or judged anew: the file is of the end before
        raise UsageError(f"the loop of run {run.id} goes on", f"patcher resume {run.id}")
    found = [
        run.load(name, Evaluation)
        for name, data in run.state.results.items()
        if data["record"] == journal_name(Evaluation)
    ]
    place = next((one.environment for one in found if one.environment is not None), None)
    if found and place is None:
        raise UsageError(
            f"the verdicts of run {run.id} do not say where the judge worked", "judge them anew"
        )
    settings = run.config.settings
    given = {name: settings.get(name) for name in StopRules.model_fields}
    if run.done("profile"):
        given["share_pct"] = op_share_pct(run.load("profile", Profile), op.name)
    rules = {name: value for name, value in given.items() if value is not None}
    first = f"{op.name}/round-0"
    made = LoopRecording(
        op=op.name,
        contract=op.digest,
        language=result.language,
        search=Search.model_validate(plan["search"]),
        hardware=run.load("hardware", Hardware).words,
        environment=place,
        sweep=op.sweep(
            place.device_kind if place else judge_device_kind(settings["judge"], result.language),
            _sweep_of(found) or plan.get("sweep"),
        ),
        iterations=settings["iterations"],
        rules=StopRules.model_validate(rules),
        prompt_tokens=settings.get("prompt_tokens", PROMPT_TOKENS),
        without=frozenset(unadvised(settings)),
        reading=run.load(first, RequestRound).reading if run.done(first) else 0,
        optimisation=result,
        tokens=tuple(_tokens(run, op.name, one.iteration) for one in result.iterations),
    )
    folder.mkdir(parents=True)
    export_recording(run_dir, folder / REPLIES)
    lines = "".join(evaluation.model_dump_json() + "\n" for evaluation in found)
    (folder / EVALUATIONS).write_text(lines, encoding="utf-8")
    (folder / ABOUT).write_text(made.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (folder / TABLE).write_text(table(made), encoding="utf-8")
    return made


def read(folder: Path) -> LoopRecording:
    """Raises:
    UsageError: no recording there, or a file of it is a pipe or too large.
    """
    try:
        return LoopRecording.model_validate_json(content(folder / ABOUT))
    except (OSError, ValidationError) as error:
        raise UsageError(
            f"{folder} holds no recording", "give a folder that `patcher record` wrote"
        ) from error


def recorded_op(folder: Path, made: LoopRecording) -> Op:
    """The op that was searched, as it is here now.

    Raises:
        UsageError: it is not here.
    """
    try:
        return load_op(made.op)
    except UsageError as error:
        raise UsageError(f"{folder.name} needs its op: {error.message}", error.hint) from None


def _sweep_of(evaluations: list[Evaluation]) -> str | None:
    """The sweep that was timed, whose sizes may be a served model's."""
    return next((one.sweep for one in evaluations if one.sweep), None)


def replay(folder: Path) -> list[str]:
    """Run the loop again on the recorded replies and verdicts; what came out otherwise, in words.

    Raises:
        UsageError: no recording there.
        VerificationError: a verdict is missing or is not one.
    """
    made = read(folder)
    op = recorded_op(folder, made)
    verdicts = {one.digest: one for one in read_evaluations(folder / EVALUATIONS)}
    then = made.optimisation
    scores = {one.iteration: one.score for one in then.iterations if one.score is not None}

    def judge(candidate: Candidate) -> Evaluation:
        if candidate.digest in verdicts:
            return verdicts[candidate.digest]
        cause, hint = f"{folder.name} has no verdict on a candidate of its own replies", _RESTORE
        if then.stopped == "budget" and candidate.digest not in {
            one.digest for one in then.iterations
        }:  # a ceiling ended the loop between its reply and its verdict
            raise RecordingEndedError(cause, hint)
        raise VerificationError(cause, hint)

    def score(iteration: int, _evaluation: Evaluation, _files: Mapping[str, str]) -> float:
        if (known := scores.get(iteration)) is None:
            raise VerificationError(
                f"{folder.name} has no score of iteration {iteration}", _RESTORE
            )
        return known

    with (
        tempfile.TemporaryDirectory(prefix="patcher-replay-") as root,
        Run.create(Path(root), command="optimize") as run,
    ):
        again = run_loop(
            run,
            op,
            made.language,
            ReplayModel(folder / REPLIES),
            judge,
            made.iterations,
            made.hardware,
            strategy=made.search.open(),
            rules=made.rules,
            sweep=made.sweep,
            prompt_tokens=made.prompt_tokens,
            without=made.without,
            known_kernels=made.search.known_kernels,
            reading=made.reading,
            score=score if scores else None,
        )
    if (then.stopped, again.stopped) == ("budget", "recording_ended"):
        again = again.model_copy(update={"stopped": "budget"})  # it holds what was paid for
    return _differences(then, again)


def table(made: LoopRecording) -> str:
    """The recording in Markdown, for a person."""
    found, where = made.optimisation, made.environment
    best = (
        f"best: iteration {found.best_iteration}, {found.best_speedup:.2f}x"
        if found.best_speedup is not None
        else "nothing right and faster"
    )
    judged = "Nothing was judged"
    if where is not None:
        compiler = where.compiler or "no compiler"
        judged = f"Judged on {where.device} ({compiler}; clocks {where.clocks})"
    lines = [
        f"# `{made.op}` in {made.language}, strategy `{found.strategy}`",
        "",
        f"{judged}; {best}; ended: {found.stopped_detail or found.stopped}.",
        "",
        "| # | phase | outcome | speedup | tokens in, out | what was asked for, what came of it |",
        "| ---: | --- | --- | ---: | ---: | --- |",
    ]
    rows = [_row(*each) for each in zip(found.iterations, made.tokens, strict=True)]
    return "\n".join([*lines, *rows, ""])


def _tokens(run: Run, op: str, iteration: int) -> tuple[int, int]:
    steps = [
        name
        for name, data in run.state.results.items()
        if data["record"] == journal_name(ModelCall) and name.startswith(f"{op}/{iteration}/")
    ]
    asked = [run.load(name, ModelCall) for name in steps]
    into = [
        one.reply.usage.input_tokens or _estimate(one.request.system + one.request.prompt)
        for one in asked
    ]
    out = [one.reply.usage.output_tokens or _estimate(one.reply.text) for one in asked]
    return sum(into), sum(out)


def _estimate(text: str) -> int:
    return round(len(text) / CHARACTERS_PER_TOKEN)


def _row(attempt: Attempt, tokens: tuple[int, int]) -> str:
    wanted, detail = attempt.recommendation, attempt.detail
    if wanted is not None:
        hoped = f" (expected {wanted.expected_speedup:.1f}x)" if wanted.expected_speedup else ""
        detail = f"{wanted.change}{hoped}"
    elif attempt.diagnosis is not None:
        detail = attempt.diagnosis.minimal_fix
    speedup = f"{attempt.geomean_speedup:.2f}x" if attempt.geomean_speedup else ""
    sizes = ", ".join(f"{size:,}" for size in tokens)
    said = " ".join(detail.split()).replace("|", "\\|")
    outcome = attempt.outcome.replace("_", " ")
    return f"| {attempt.iteration} | {attempt.phase} | {outcome} | {speedup} | {sizes} | {said} |"


def read_evaluations(file: Path) -> list[Evaluation]:
    """The verdicts of a recording.

    Raises:
        VerificationError: the file holds something else.
    """
    try:
        lines = content(file).decode("utf-8").split("\n")
        return [Evaluation.model_validate_json(line) for line in lines if line]
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise VerificationError(
            f"{file.name} holds something that is no verdict", "restore it from a backup"
        ) from error


def _differences(then: LoopResult, now: LoopResult) -> list[str]:
    said = []
    for name in ("best_digest", "best_iteration", "best_speedup", "stopped"):
        if getattr(then, name) != getattr(now, name):
            old, new = (one_line(str(getattr(each, name)), 120) for each in (then, now))
            said.append(f"{name}: {old} then, {new} now")
    if len(then.iterations) != len(now.iterations):
        said.append(f"{len(then.iterations)} iterations then, {len(now.iterations)} now")
    for one, other in zip(then.iterations, now.iterations, strict=False):
        for name in ("phase", "outcome", "digest", "geomean_speedup", "parents", "recommendation"):
            if getattr(one, name) != getattr(other, name):
                said.append(f"iteration {one.iteration}: another {name}")
    return said
