"""A user's own measure of candidates: a script that reads an evaluation and says a score.

It ranks what the judge found right and makes nothing right. A run's scores come from one script:
the text that gave the first is kept with the run, and a resumed run goes on with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from pydantic import Field, ValidationError

from patcher.bench import SCHEMA_VERSION, Evaluation, Record, UsageError, VerificationError, problem
from patcher.bench.machine.environment import engine_environment
from patcher.levers.record import ScoreLever
from patcher.runs.run import Run

LONGEST_ANSWER = 64 << 10
"""Bytes that a script may print."""
_NOTE = "score"


class ScriptAnswer(Record):
    """What a script prints."""

    score: float = Field(allow_inf_nan=False, strict=True)
    """Higher is better."""
    note: str = Field("", max_length=500)


class Score(Record):
    """One candidate's score."""

    schema_version: int = SCHEMA_VERSION
    score: float
    note: str = ""
    script: str
    """sha256 of the script."""


class Scorer:
    """The script of one run."""

    def __init__(self, run: Run, lever: ScoreLever) -> None:
        self._run, self._lever = run, lever

    @classmethod
    def of(cls, run: Run, settings: Mapping[str, Any]) -> Scorer | None:
        """The script that a run's settings name, if they do."""
        lever = settings.get("score")
        return cls(run, ScoreLever.model_validate(lever)) if lever else None

    def __call__(
        self, iteration: int, evaluation: Evaluation, artefacts: Mapping[str, str]
    ) -> float:
        """What a right candidate is worth: a step of the run, so asked once.

        Args:
            artefacts: files of the run that the script may read, by what they are, relative to it.

        Raises:
            UsageError: the script is missing, fails, takes too long, or prints no score.
            VerificationError: the script that the run keeps was changed.
        """
        step = f"{evaluation.op}/{iteration}/score"
        found = self._run.step(step, lambda: self._ask(evaluation, iteration, artefacts), Score)
        return found.score

    def _ask(self, evaluation: Evaluation, iteration: int, artefacts: Mapping[str, str]) -> Score:
        text, digest, first = self._script()
        name = self._lever.script.name
        file = f"levers/{digest[:12]}-{name}"
        self._run.write(file, text)
        told = {
            "schema_version": SCHEMA_VERSION,
            "op": evaluation.op,
            "iteration": iteration,
            "evaluation": evaluation.model_dump(mode="json"),
            "artefacts": {
                what: str((self._run.path / path).resolve()) for what, path in artefacts.items()
            },
        }
        printed = run_script(
            (self._run.path / file).resolve(), text, json.dumps(told), self._lever.timeout_s, name
        )
        try:
            answer = ScriptAnswer.model_validate_json(printed)
        except ValidationError as error:
            raise UsageError(
                f"the score script {name} printed no score: {problem(error)}",
                'it must print one JSON object: {"score": NUMBER}',
            ) from error
        if first:
            self._run.note(_NOTE, script=digest, file=file)
        return Score(score=answer.score, note=answer.note, script=digest)

    def _script(self) -> tuple[str, str, bool]:
        """Its text, its digest, and whether no score came from it yet."""
        for event in self._run.state.notes:
            if event.step == _NOTE:
                digest = str(event.data["script"])
                text = _text(self._run.path / str(event.data["file"]))
                if hashlib.sha256(text.encode()).hexdigest() != digest:
                    raise VerificationError(
                        f"the score script of run {self._run.id} was changed", "start a new run"
                    )
                return text, digest, False
        text = _text(Path(os.path.expanduser(self._lever.script)))
        return text, hashlib.sha256(text.encode()).hexdigest(), True


def run_script(file: Path, text: str, told: str, timeout_s: float, name: str) -> str:
    """Run a script in a session of its own, without keys in its environment; what it prints.

    Raises:
        UsageError: it cannot be started, fails, or takes too long.
    """
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(told.encode())
        given.seek(0)
        try:
            process = subprocess.Popen(
                [*_interpreter(file, text, name), str(file)],
                stdin=given,
                stdout=out,
                stderr=err,
                env=engine_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(
                f"the score script {name} cannot be started: {error.strerror}", _MEND
            ) from error
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise UsageError(
                f"the score script {name} did not answer in {timeout_s:g} s",
                "make it faster, or set timeout_s under [score]",
            ) from error
        finally:
            # with whatever it started; its own end may have come first
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code != 0:
            last = _read(err).strip().rpartition("\n")[2][:300]
            raise UsageError(
                f"the score script {name} failed with exit code {code}{': ' * bool(last)}{last}",
                _MEND,
            )
        return _read(out)


_MEND = "correct the script, then go on with: patcher resume"


def _interpreter(file: Path, text: str, name: str) -> list[str]:
    if file.suffix == ".py":
        return [sys.executable]
    if file.suffix == ".sh":
        return ["/bin/sh"]
    first = text.partition("\n")[0]
    if not first.startswith("#!"):
        raise UsageError(
            f"how to run the score script {name} is not said",
            "name it .py or .sh, or begin it with #!",
        )
    return shlex.split(first[2:])


def _read(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read(LONGEST_ANSWER).decode(errors="replace")


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UsageError(
            f"cannot read the score script {path}: {error.strerror}", "correct [score]"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the score script {path} is not UTF-8 text", "correct [score]") from error
