"""A person's word on a patch: kept beside the rule's, which stays as it is.

Words on a run's patch are notes in its journal, so that an edit is found; words on a bundle that no
run here made lie in `reviews.jsonl` of `PATCHER_HOME`. The latest word counts, all are kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from patcher.ab.decision import Decision
from patcher.bench import Evaluation, PatcherError, UsageError, VerificationError
from patcher.integrate import Patch, home_store, unpacked
from patcher.runs.patch import RunPatch
from patcher.runs.run import Run
from patcher.verdicts.human_verdict import HumanVerdict, HumanWord
from patcher.visible import visible

_NOTE = "review"
_FILE = "reviews.jsonl"


@dataclass(frozen=True)
class Subject:
    """What a person speaks about."""

    run: Path | None
    """The run that made it, where it is here."""
    bundle: Patch | None
    """None: the run made no patch."""
    decision: Decision | None
    evaluation: Evaluation | None
    source: str = ""
    """Of the bundle, read while it is there: one file is unpacked for a moment only."""

    @property
    def name(self) -> str:
        if self.bundle is not None:
            return self.bundle.manifest.id
        assert self.run is not None
        return self.run.name


def find_subject(root: Path, text: str) -> Subject:
    """The run, the bundle, the applied patch or the patch of a run that a person means.

    Args:
        root: the folder of runs.

    Raises:
        UsageError: nothing, or several runs, of that name.
        VerificationError: the bundle or the run was changed.
    """
    if text == "latest" or (Path(text) / "run.json").is_file():
        return _of_run(Run.find(root, text))
    if Path(text).exists():
        with unpacked(Path(text)) as folder:
            return _of_bundle(root, Patch.load(folder))
    store = home_store()
    for entry in store.applied():
        if entry.id == text:
            return _of_bundle(root, store.load(entry))
    for path in reversed(Run.list(root)):
        try:
            made = _made(path)
        except PatcherError:
            continue  # what cannot be read is not what was named
        if made is not None and made.id == text:
            return _of_run(path)
    try:
        return _of_run(Run.find(root, text))
    except UsageError as error:
        if "several" in error.message:
            raise
        raise UsageError(
            f"{text} is not a run, a bundle, or the id of a patch",
            "give a run's id, `latest`, a bundle, or an id of `patcher patches`",
        ) from None


def words(subject: Subject) -> tuple[HumanVerdict, ...]:
    """All that was said about it, oldest first.

    Raises:
        VerificationError: a record of it is damaged.
    """
    if subject.run is not None:
        return run_words(Run.open(subject.run, read_only=True))
    path = home_store().root / _FILE
    if not path.is_file():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines()
    said = _read(lines, str(path))
    digest = subject.bundle.digest if subject.bundle else None
    return tuple(word for word in said if word.digest == digest)


def run_words(run: Run) -> tuple[HumanVerdict, ...]:
    """All that was said about a run's patch, oldest first."""
    notes = [event for event in run.state.notes if event.step == _NOTE]
    try:
        return tuple(HumanVerdict.model_validate(event.data) for event in notes)
    except ValidationError as error:
        raise VerificationError(
            f"a review in the journal of run {run.id} cannot be read", "start a new run"
        ) from error


def say(
    subject: Subject, word: HumanWord, reason: str | None, by: str | None = None
) -> HumanVerdict:
    """Record a word.

    Raises:
        UsageError: no reason where one is needed, nothing there to accept, a control character in
            a text, or nowhere to write.
    """
    for name, text in (("reason", reason or ""), ("by", by or "")):
        if visible(text) != text or (name == "by" and {"\n", "\t"} & set(text)):
            raise UsageError(f"--{name} {text!r} has control characters", "leave them out")
    rule = subject.decision.verdict if subject.decision else None
    if word == "accept" and subject.bundle is None:
        raise UsageError(f"{subject.name} has no patch to accept", "see `patcher report`")
    if not (reason or "").strip() and (word == "reject" or word != rule):
        hint = "say why with --reason"
        if word == "accept":
            raise UsageError(
                f"the rule said {rule or 'nothing'}, so accepting needs a reason", hint
            )
        raise UsageError("rejecting needs a reason", hint)
    spoken = HumanVerdict(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        word=word,
        reason=(reason or "").strip() or None,
        by=by,
        rule=rule,
        patch_id=subject.bundle.manifest.id if subject.bundle else None,
        digest=subject.bundle.digest if subject.bundle else None,
    )
    if subject.run is not None:
        with Run.open(subject.run) as run:
            run.note(_NOTE, **spoken.model_dump(mode="json"))
    else:
        _append(home_store().root, spoken)
    return spoken


def _of_run(path: Path) -> Subject:
    run = Run.open(path, read_only=True)
    made = _made(path)
    bundle = Patch.load(path / made.folder) if made else None
    if bundle is not None and made is not None and bundle.digest != made.digest:
        raise VerificationError(
            f"the patch of run {run.id} was changed", "restore it from a backup"
        )
    decision = run.load("decision", Decision) if run.done("decision") else None
    evidence = bundle.manifest.evidence if bundle else None
    source = bundle.candidate().source if bundle else ""
    return Subject(path, bundle, decision, evidence, source)


def _of_bundle(root: Path, bundle: Patch) -> Subject:
    """The run that made it decided on it, if it is here and has that very bundle."""
    origin = bundle.manifest.provenance.run
    path = root / origin if origin else None
    if path is not None and (path / "run.json").is_file():
        made = _made(path)
        if made is not None and made.digest == bundle.digest:
            return _of_run(path)
    return Subject(None, bundle, None, bundle.manifest.evidence, bundle.candidate().source)


def _made(path: Path) -> RunPatch | None:
    run = Run.open(path, read_only=True)
    return run.load("patch", RunPatch) if run.done("patch") else None


def _read(lines: Iterable[str], name: str) -> list[HumanVerdict]:
    try:
        return [HumanVerdict.model_validate_json(line) for line in lines if line.strip()]
    except ValidationError as error:
        raise VerificationError(f"{name} is damaged", "restore it from a backup") from error


def _append(root: Path, word: HumanVerdict) -> None:
    line = (word.model_dump_json() + "\n").encode()
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / _FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, line)
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise UsageError(
            f"cannot write {root}: {error.strerror}", "set PATCHER_HOME to another folder"
        ) from error
