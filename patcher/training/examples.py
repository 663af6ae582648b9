"""Examples for a warm-up: prompts with replies whose kernel the judge found right.

They come from recordings and runs of the agent loop, from what `patcher train evaluate` and
`reinforce` sampled, and from the library's solutions, which are judged anew. Everything else is
left out: that is rejection fine-tuning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from patcher.bench import (
    SCHEMA_VERSION,
    Candidate,
    Evaluation,
    Language,
    Record,
    UsageError,
    load_ops,
)
from patcher.judges.languages import judge_device_kind
from patcher.kernel_search.recording import (
    EVALUATIONS,
    REPLIES,
    read,
    read_evaluations,
)
from patcher.kernel_search.recording_archive import recordings
from patcher.models import ModelCall
from patcher.models.replay import read_recording
from patcher.prompting.extract import extract_source
from patcher.runs import durable
from patcher.runs.run import Run, journal_name
from patcher.training.environment import EnvironmentOptions, KernelEnvironment
from patcher.training.folder import SAMPLES, Deadline, TrainingFolder
from patcher.training.replies import JudgedReply
from patcher.training.reply_judges import AskedReply, ReplyJudges, Told

EXAMPLES = "examples.jsonl"
SOLUTIONS = "solutions"
"""As a source: the library's."""


class Example(Record):
    """One prompt and reply: a line of `examples.jsonl`."""

    schema_version: int = SCHEMA_VERSION
    prompt: str
    reply: str
    op: str
    language: Language
    digest: str
    """Of the candidate."""
    geomean_speedup: float | None = None
    """Over the baseline that it was judged against."""
    source: str
    """Where it is from."""


class CollectedExamples(Record):
    """What was found."""

    schema_version: int = SCHEMA_VERSION
    examples: int
    replies: int
    """Looked at."""
    sources: dict[str, int]
    """Examples by the source that was named."""
    too_long: int = 0
    """Left out of training since prompt and reply have too many tokens; nothing is cut off."""


class _Exchange(NamedTuple):
    prompt: str
    reply: str


def collect_examples(
    sources: Iterable[str],
    environment: EnvironmentOptions,
    judges: ReplyJudges,
    into: Path,
    told: Told,
    deadline: Deadline,
    ops: Sequence[str] | None = None,
) -> CollectedExamples:
    """Write `examples.jsonl`, each candidate once.

    Args:
        sources: folders of `patcher record`, archives of them, runs, folders of `patcher train`,
            or `solutions`.
        environment: the language, and the prompts of solutions.
        judges: judge the solutions.
        into: the file, which is written whole at the end.
        deadline: of judging; what was judged is kept by `judges`.
        ops: nothing of others; None: of all.

    Raises:
        BudgetError: the time limit came first.
        UsageError: a source is none of these, or nothing right was found.
        PatcherError: the judge cannot judge here.
    """
    kept: dict[str, Example] = {}
    seen: Counter[str] = Counter()
    by_source: dict[str, int] = {}
    for source in sources:
        before = len(kept)
        found = (
            _solutions(environment, judges, told, deadline, ops)
            if source == SOLUTIONS
            else _from_path(Path(source), environment.language)
        )
        for each in found:
            seen["replies"] += 1
            if each is not None and (ops is None or each.op in ops):
                kept.setdefault(each.digest, each)
        by_source[source] = len(kept) - before
    if not kept:
        raise UsageError(
            f"no right {environment.language} kernel among {seen['replies']} replies",
            "name other sources by --from, or another --language",
        )
    durable.write_whole(into, "".join(f"{each.model_dump_json()}\n" for each in kept.values()))
    return CollectedExamples(examples=len(kept), replies=seen["replies"], sources=by_source)


def _from_path(path: Path, language: Language) -> Iterator[Example | None]:
    """An example, or None, for each reply; the file says what it is."""
    if (path / SAMPLES).is_file():
        yield from _samples(path, language)
    elif (path / "journal.jsonl").is_file():
        yield from _run(path, language)
    elif path.suffix == ".xz" or (path / REPLIES).is_file():
        with recordings(path) as folders:
            for folder in folders:
                made = read(folder)
                if made.language is language:
                    yield from _recording(folder, made.op, language)
    else:
        raise UsageError(
            f"{path} is no source of examples",
            "give a folder of `patcher record`, an archive of them, a run, a folder of `patcher "
            f"train`, or {SOLUTIONS}",
        )


def _recording(folder: Path, op: str, language: Language) -> Iterator[Example | None]:
    asked = [
        _Exchange(f"{each.system}\n{each.prompt}", each.reply.text)
        for each in read_recording(folder / REPLIES)
        if each.role == "generate"
    ]
    verdicts = {each.digest: each for each in read_evaluations(folder / EVALUATIONS)}
    yield from _right(asked, op, language, verdicts, f"{folder.name}/{REPLIES}")


def _run(path: Path, language: Language) -> Iterator[Example | None]:
    run = Run.open(path, read_only=True)
    stored: dict[str, list[str]] = {}
    for name, data in run.state.results.items():
        stored.setdefault(data["record"], []).append(name)
    calls = [run.load(name, ModelCall) for name in stored.get(journal_name(ModelCall), [])]
    found = [run.load(name, Evaluation) for name in stored.get(journal_name(Evaluation), [])]
    verdicts = {each.digest: each for each in found if each.language == language}
    for op in sorted({each.op for each in verdicts.values()}):
        asked = [
            _Exchange(f"{each.request.system}\n{each.request.prompt}", each.reply.text)
            for each in calls
            if each.request.role == "generate" and each.request.step.startswith(f"{op}/")
        ]
        yield from _right(asked, op, language, verdicts, f"run {run.id}")


def _right(
    asked: Iterable[_Exchange],
    op: str,
    language: Language,
    verdicts: Mapping[str, Evaluation],
    source: str,
) -> Iterator[Example | None]:
    for each in asked:
        verdict = verdicts.get(_digest(each.reply, op, language) or "")
        if verdict is None or not verdict.right:
            yield None
            continue
        yield Example(
            prompt=each.prompt,
            reply=each.reply,
            op=op,
            language=language,
            digest=verdict.digest,
            geomean_speedup=verdict.geomean_speedup,
            source=source,
        )


def _digest(reply: str, op: str, language: Language) -> str | None:
    source = extract_source(reply, language, op)
    if not isinstance(source, str):
        return None
    return Candidate(op=op, language=language, source=source).digest


def _samples(path: Path, language: Language) -> Iterator[Example | None]:
    for sample in TrainingFolder(path).samples.read():
        same = sample.judged.digest == _digest(sample.reply, sample.judged.op, language)
        source = f"{path.name}/{SAMPLES}"
        yield (
            _judged(sample.prompt, sample.reply, sample.judged, language, source) if same else None
        )


def _judged(
    prompt: str, reply: str, judged: JudgedReply, language: Language, source: str
) -> Example | None:
    if not judged.right or judged.digest is None:
        return None
    speedups = judged.reward.milestone.speedups if judged.reward.milestone else {}
    return Example(
        prompt=prompt,
        reply=reply,
        op=judged.op,
        language=language,
        digest=judged.digest,
        geomean_speedup=next((each.geomean for each in speedups.values()), None),
        source=source,
    )


def _solutions(
    environment: EnvironmentOptions,
    judges: ReplyJudges,
    told: Told,
    deadline: Deadline,
    ops: Sequence[str] | None,
) -> Iterator[Example | None]:
    """Of these ops, in the language, for the kind of device that judges it."""
    language = environment.language
    device = judge_device_kind(environment.judge, language)
    asked: dict[str, AskedReply] = {}
    for op in load_ops().values():
        for info, candidate in op.solutions():
            wanted = ops is None or op.name in ops
            if wanted and (info.language, info.device) == (language, device):
                block = f"```{language.traits.tags[0]}\n{candidate.source}```\n"
                asked[f"{op.name}/{info.name}"] = AskedReply(op.name, block)
    found = judges.judge(list(asked.values()), told, deadline)
    prompts = KernelEnvironment(environment)
    for (name, each), judged in zip(asked.items(), found, strict=True):
        prompt = prompts.reset(each.op)
        yield _judged(prompt, each.reply, judged, language, f"solution {name}")
