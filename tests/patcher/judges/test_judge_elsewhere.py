"""The judge behind a folder: jobs, workers in real processes, and what is wrong with a folder."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patch_sample import evaluation
from typer.testing import CliRunner

from patcher import bench
from patcher.bench import (
    BaselineTime,
    BusyError,
    Candidate,
    Environment,
    Evaluation,
    Language,
    Outcome,
    PatcherError,
    UsageError,
    VerificationError,
    WaitingError,
)
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.bench.judge.judge import Judge
from patcher.bench.sandbox.process_tree import descendants
from patcher.cli import app
from patcher.judges import worker as worker_
from patcher.judges.exchange import ExchangeJudge
from patcher.judges.jobs import (
    JobFolder,
    JobResult,
    JobSettings,
    WorkerMachine,
    read_job,
    read_result,
)
from patcher.judges.languages import judge_hardware
from patcher.judges.same_device import require_same_device
from patcher.judges.seal import MANIFEST, read_sealed, seal
from patcher.judges.worker import MOST_ATTEMPTS, Worker, WorkerSummary, this_machine
from patcher.runs.run import Run

OP = bench.load_op("fused_add_rms_norm")
GOOD = next(candidate for info, candidate in OP.solutions() if info.name == "cpu_simd").source
QUICK = JudgeSettings(baseline="eager", pairs=3, threads=1, calls=50, lives_s=0.1, points=1)
NO_ENTRY = Candidate(op=OP.name, language=Language.CPP, source="int other;")
"""Judged in no time: the source does not even name the op."""


def cpp(source: str) -> Candidate:
    return Candidate(op=OP.name, language=Language.CPP, source=source)


def submitted(root: Path, candidate: Candidate = NO_ENTRY) -> JobFolder:
    return ExchangeJudge(root, QUICK, "r1").submit(candidate)


def serve(root: Path) -> tuple[list[WorkerSummary], tuple[str, ...]]:
    with Worker(root, lambda *_: None, lambda _: None) as worker:
        shift = worker.serve()
    return list(shift.jobs), shift.incomplete


def start_worker(root: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "patcher", "worker", str(root), "--json", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def until(there: Callable[[], object], worker: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert worker.poll() is None, worker.stderr and worker.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def machine() -> WorkerMachine:
    return this_machine()


def test_a_job_is_self_contained_and_names_nothing_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "planted-key")
    posted = submitted(tmp_path / "exchange")
    folder = tmp_path / "exchange/jobs" / posted.name
    assert {path.name for path in folder.iterdir()} == {
        *("job.json", MANIFEST, "fused_add_rms_norm.cpp"),
    }
    text = "".join(path.read_text() for path in folder.iterdir())
    for secret in ("planted-key", str(tmp_path), os.environ["HOME"], os.environ["PATH"]):
        assert secret not in text
    job = json.loads((folder / "job.json").read_text())
    assert job["op_digest"] == OP.digest
    assert job["settings"]["baseline"] == "eager"
    assert job["settings"]["precision_pct"] == QUICK.precision_pct
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert submitted(tmp_path / "exchange").name == posted.name, "the same question, the same job"
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_job_carries_every_setting_of_the_judge() -> None:
    names = {field.name for field in dataclasses.fields(JudgeSettings)}
    assert set(JobSettings.model_fields) == names
    other = dataclasses.replace(QUICK, sweep="x", sanitize=True, device="cpu")
    assert JobSettings.of(other).settings() == other


def test_what_asks_for_too_much_is_no_job(tmp_path: Path) -> None:
    judge = ExchangeJudge(tmp_path, dataclasses.replace(QUICK, pairs=10**9), "r1")
    with pytest.raises(UsageError, match="this job is not valid"):
        judge.submit(NO_ENTRY)
    with pytest.raises(UsageError, match="bytes at most"):
        ExchangeJudge(tmp_path, QUICK, "r1").submit(cpp("x" * (3 << 20)))


def test_every_job_is_written_before_the_loop_waits_and_then_taken_up(tmp_path: Path) -> None:
    candidates = [NO_ENTRY, cpp("int another;"), NO_ENTRY]
    folder = tmp_path / "an exchange"
    judge = ExchangeJudge(folder, QUICK, "r1")
    with pytest.raises(WaitingError, match="3 of 3") as caught:
        judge.evaluate(candidates)
    assert f"patcher worker '{folder}', then: patcher resume" in caught.value.hint
    assert len(list((folder / "jobs").iterdir())) == 2
    jobs, incomplete = serve(folder)
    assert [job.outcome for job in jobs] == ["generation_failure"] * 2
    assert incomplete == ()
    found = judge.evaluate(candidates)
    assert [each.digest for each in found] == [each.digest for each in candidates]
    assert serve(tmp_path) == ([], ()), "nothing is judged twice"
    with pytest.raises(WaitingError):
        ExchangeJudge(tmp_path, QUICK, "r2").evaluate([NO_ENTRY])


def test_one_judge_is_kept_open_while_jobs_ask_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[JudgeSettings] = []

    def counting(judge_settings: JudgeSettings) -> AbstractContextManager[Judge]:
        opened.append(judge_settings)
        return open_judge(judge_settings)

    monkeypatch.setattr(worker_, "open_judge", counting)
    other = dataclasses.replace(QUICK, pairs=4)
    for number in range(6):
        asked = QUICK if number < 4 else other
        ExchangeJudge(tmp_path, asked, "r1").submit(cpp(f"int other{number};"))
        time.sleep(0.001)  # the oldest is served first
    jobs, _ = serve(tmp_path)
    assert [job.outcome for job in jobs] == ["generation_failure"] * 6
    assert opened == [QUICK, other]


def damaged_copies(folder: Path, into: Path) -> list[Path]:
    """The folder as a copy that stopped half-way may leave it: every file absent or cut off."""
    found = []
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for length in (None, 0, 1, len(whole) // 2, len(whole) - 1):
            copy = into / f"{len(found)}" / folder.name
            shutil.copytree(folder, copy)
            if length is None:
                (copy / path.name).unlink()
            else:
                (copy / path.name).write_bytes(whole[:length])
            found.append(copy)
    return found


def test_what_waits_is_built_side_by_side_before_anything_is_judged(tmp_path: Path) -> None:
    mark = secrets.token_hex(4)
    posted = [submitted(tmp_path, cpp(f"{GOOD}// {mark} {index}\n")) for index in range(2)]
    broken = submitted(tmp_path, cpp(f"void fused_add_rms_norm(int {mark}"))
    stages: list[str] = []
    with Worker(tmp_path, lambda stage, *_: stages.append(stage), lambda _: None) as worker:
        shift = worker.serve()
    assert stages[:3] == ["build"] * 3
    outcomes = {one.job: one.outcome for one in shift.jobs}
    assert outcomes.pop(broken.name) == "compilation_failure"
    assert set(outcomes) == {one.name for one in posted}
    for one in posted:
        result = read_result(tmp_path / "results" / one.name)
        assert result is not None
        assert result.evaluation is not None
        assert result.evaluation.build_s == 0.0, "found built"


def test_a_half_copied_job_is_not_there_yet(tmp_path: Path) -> None:
    posted = submitted(tmp_path / "loop")
    copies = damaged_copies(tmp_path / "loop/jobs" / posted.name, tmp_path / "copies")
    assert len(copies) == 15
    assert {read_sealed(copy, 1 << 20) for copy in copies} == {None}
    root = tmp_path / "host"
    (root / "jobs").mkdir(parents=True)
    shutil.copytree(copies[1], root / "jobs" / posted.name)
    staged = root / "jobs" / f".{posted.name}.1.tmp"
    shutil.copytree(tmp_path / "loop/jobs" / posted.name, staged)
    assert serve(root) == ([], (posted.name,)), "neither judged nor refused"
    shutil.copytree(
        tmp_path / "loop/jobs" / posted.name, root / "jobs" / posted.name, dirs_exist_ok=True
    )
    jobs, incomplete = serve(root)
    assert [job.outcome for job in jobs] == ["generation_failure"]
    assert incomplete == ()


def test_a_half_copied_result_is_not_there_yet(tmp_path: Path) -> None:
    posted = submitted(tmp_path)
    serve(tmp_path)
    whole = tmp_path / "results" / posted.name
    copies = damaged_copies(whole, tmp_path / "copies")
    judge = ExchangeJudge(tmp_path, QUICK, "r1")
    for copy in copies:
        shutil.rmtree(whole)
        shutil.copytree(copy, whole)
        with pytest.raises(WaitingError):
            judge.evaluate([NO_ENTRY])
    assert [job.job for job in serve(tmp_path)[0]] == [posted.name], "and is made again"
    assert judge.evaluate([NO_ENTRY])[0].outcome is Outcome.GENERATION_FAILURE


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def resealed(folder: Path, text: str = "", **changes: object) -> None:
    """The job with other fields, or other text, sealed and named as if it were right."""
    job = text or json.dumps({**json.loads((folder / "job.json").read_text()), **changes})
    source = (folder / "fused_add_rms_norm.cpp").read_text()
    shutil.rmtree(folder)
    seal(folder, {"job.json": job, "fused_add_rms_norm.cpp": source})
    sealed = read_sealed(folder, 1 << 20)
    assert sealed is not None
    folder.rename(folder.with_name(f"fused_add_rms_norm-{sealed.digest[:16]}"))


def outside(folder: Path) -> None:
    secret = folder.parent.parent / "secret.cpp"
    secret.write_text(NO_ENTRY.source)
    source = folder / "fused_add_rms_norm.cpp"
    source.unlink()
    source.symlink_to(secret)


def fifo(folder: Path) -> None:
    (folder / "job.json").unlink()
    os.mkfifo(folder / "job.json")


def linked(folder: Path) -> None:
    moved = folder.parent.parent / "elsewhere"
    folder.rename(moved)
    folder.symlink_to(moved)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "edited source": (
        lambda f: rewrite(f / "fused_add_rms_norm.cpp", "other", "OTHER"),
        "was changed",
    ),
    "longer source": (
        lambda f: rewrite(f / "fused_add_rms_norm.cpp", ";", "; int more;"),
        "longer than",
    ),
    "edited manifest": (lambda f: rewrite(f / MANIFEST, '"size": 10', '"size": 9'), "longer than"),
    "escaping name": (
        lambda f: rewrite(f / MANIFEST, "fused_add_rms_norm.cpp", "../../secret.cpp"),
        "manifest",
    ),
    "absolute name": (
        lambda f: rewrite(f / MANIFEST, "fused_add_rms_norm.cpp", "/etc/passwd"),
        "manifest",
    ),
    "oversized": (
        lambda f: rewrite(f / MANIFEST, '"size": 10', f'"size": {1 << 40}'),
        "larger than",
    ),
    "manifest of another schema": (
        lambda f: rewrite(f / MANIFEST, '"schema_version": 1', '"schema_version": 2'),
        "schema_version",
    ),
    "no manifest but JSON": (lambda f: (f / MANIFEST).write_text("{}\n"), "manifest"),
    "a link to a file": (outside, "not a regular file"),
    "a pipe": (fifo, "not a regular file"),
    "a linked folder": (linked, "no folder"),
    "another schema": (lambda f: resealed(f, schema_version=2), "schema_version"),
    "an unknown field": (lambda f: resealed(f, command="rm"), "command"),
    "an unknown op": (lambda f: resealed(f, op="no_such_op"), "do not belong to a job"),
    "another op's digest": (lambda f: resealed(f, op_digest="0" * 64), "contract, reference"),
    "another candidate's digest": (
        lambda f: resealed(f, candidate_digest="0" * 64),
        "not the job",
    ),
    "endless nesting": (lambda f: resealed(f, "[" * 100_000), "job.json"),
    "no JSON": (lambda f: resealed(f, "void main() {}"), "job.json"),
    "a path for a device": (lambda f: resealed(f, settings={"device": "/dev"}), "settings"),
    "another job's name": (
        lambda f: f.rename(f.with_name("fused_add_rms_norm-" + "0" * 16)),
        "not the job",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_wrong_job_is_refused_with_a_result_that_says_so(case: str, tmp_path: Path) -> None:
    damage, says = DAMAGE[case]
    posted = submitted(tmp_path)
    damage(tmp_path / "jobs" / posted.name)
    jobs, _ = serve(tmp_path)
    assert [job.outcome for job in jobs] == ["refused"]
    assert says in jobs[0].detail
    [folder] = (tmp_path / "results").iterdir()
    told = JobResult.model_validate_json((folder / "result.json").read_text())
    assert told.refusal is not None
    assert says in told.refusal.message
    assert serve(tmp_path) == ([], ()), "and is refused once"


def test_folders_of_other_names_are_nobodys_jobs(tmp_path: Path) -> None:
    for name in ("..x", "a b", "UPPER-0000000000000000", "x-000000000000000g"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
    assert serve(tmp_path) == ([], ())


def test_a_refusal_reaches_the_loop_with_its_reason_and_the_way_on(tmp_path: Path) -> None:
    posted = submitted(tmp_path)
    rewrite(tmp_path / "jobs" / posted.name / "fused_add_rms_norm.cpp", "other", "OTHER")
    serve(tmp_path)
    shutil.rmtree(tmp_path / "jobs" / posted.name)
    judge = ExchangeJudge(tmp_path, QUICK, "r1")
    with pytest.raises(VerificationError, match="refused") as caught:
        judge.evaluate([NO_ENTRY])
    folder = tmp_path / "results" / posted.name
    assert f"remove {folder}" in caught.value.hint
    shutil.rmtree(folder)
    serve(tmp_path)
    assert judge.evaluate([NO_ENTRY])[0].outcome is Outcome.GENERATION_FAILURE


def test_a_worker_of_another_op_library_refuses_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted = submitted(tmp_path / "exchange")
    shutil.copytree(OP.folder, tmp_path / "ops" / OP.name)
    rewrite(tmp_path / "ops" / OP.name / "reference.py", '"""', '""" ')
    with monkeypatch.context() as patch:
        patch.setenv("PATCHER_OPS", str(tmp_path / "ops"))
        [job], _ = serve(tmp_path / "exchange")
    assert (job.job, job.outcome) == (posted.name, "refused")
    with pytest.raises(VerificationError, match="reference, inputs or baselines differ") as caught:
        ExchangeJudge(tmp_path / "exchange", QUICK, "r1").evaluate([NO_ENTRY])
    assert "install the same patcher" in caught.value.hint


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_changed_byte_of_a_job_is_ever_taken(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        posted = submitted(Path(folder))
        job = Path(folder) / "jobs" / posted.name
        path = data.draw(st.sampled_from(sorted(job.iterdir())))
        whole = path.read_bytes()
        at = data.draw(st.integers(0, len(whole) - 1))
        length = data.draw(st.integers(0, 3))
        put = data.draw(st.binary(max_size=4))
        changed = whole[:at] + put + whole[at + length :]
        path.write_bytes(changed)
        try:
            read = read_job(job)
        except PatcherError:
            read = None
        assert read == (posted if changed == whole else None)


def test_an_edited_or_foreign_result_is_refused(tmp_path: Path, machine: WorkerMachine) -> None:
    judge = ExchangeJudge(tmp_path, QUICK, "r1")
    posted, another = submitted(tmp_path), submitted(tmp_path, cpp("int another;"))
    serve(tmp_path)
    folder = tmp_path / "results" / posted.name
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    rewrite(folder / "result.json", "generation_failure", "compilation_failure"[:18])
    with pytest.raises(VerificationError, match="was changed"):
        judge.evaluate([NO_ENTRY])

    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "results" / another.name, folder)
    with pytest.raises(VerificationError, match="of another job"):
        judge.evaluate([NO_ENTRY])

    found = JobResult.model_validate_json((kept / "result.json").read_text()).evaluation
    assert found is not None
    for changed in ({"digest": "0" * 64}, {"op": "rope"}, {"language": "cuda"}):
        evaluation = Evaluation.model_validate({**found.model_dump(), **changed})
        shutil.rmtree(folder)
        seal(folder, JobResult(job=posted.digest, evaluation=evaluation, machine=machine).files())
        with pytest.raises(VerificationError, match="another candidate"):
            judge.evaluate([NO_ENTRY])

    shutil.rmtree(folder)
    text = (kept / "result.json").read_text().replace('"schema_version": 1', '"schema_version": 2')
    seal(folder, {"result.json": text})
    with pytest.raises(VerificationError, match="schema_version"):
        judge.evaluate([NO_ENTRY])


@pytest.mark.parametrize(
    "asked", ["cpu@tokens=2:4,hidden=512", "cpu@hidden=512,tokens=2:4", "cpu@hidden=256", "cpu"]
)
def test_a_sweep_may_be_asked_for_by_another_name(
    asked: str, tmp_path: Path, machine: WorkerMachine
) -> None:
    judge = ExchangeJudge(tmp_path, dataclasses.replace(QUICK, sweep=asked), "r1")
    posted, sweep = judge.submit(NO_ENTRY), OP.sweep("cpu", asked)
    folder = tmp_path / "results" / posted.name

    def seal_result(name: str) -> Evaluation:
        found = evaluation(NO_ENTRY).model_copy(update={"sweep": name, "baseline": "eager"})
        shutil.rmtree(folder, ignore_errors=True)
        seal(folder, JobResult(job=posted.digest, evaluation=found, machine=machine).files())
        return found

    found = seal_result(sweep.name)
    assert judge.evaluate([NO_ENTRY]) == [found]
    seal_result("cpu@hidden=1024")
    with pytest.raises(VerificationError, match="has sweep cpu@hidden=1024"):
        judge.evaluate([NO_ENTRY])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can judge it")
def test_what_this_machine_cannot_judge_is_left_to_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cuda = Candidate(op=OP.name, language=Language.CUDA, source="void fused_add_rms_norm() {}")
    first, second = submitted(tmp_path, cuda), submitted(tmp_path)
    assert app(["worker", str(tmp_path), "--once", "--json"], standalone_mode=False) == 3
    told = json.loads(capsys.readouterr().out)
    outcomes = {job["job"]: job["outcome"] for job in told["jobs"]}
    assert outcomes == {first.name: "left", second.name: "generation_failure"}
    assert [path.name for path in (tmp_path / "results").iterdir()] == [second.name]


def test_what_a_busy_machine_cannot_time_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    posted = submitted(tmp_path)

    def busy(*_: Any) -> Evaluation:
        raise BusyError("this machine is too busy", "stop other programs")

    monkeypatch.setattr(Worker, "_judged", busy)
    assert app(["worker", str(tmp_path), "--once", "--json"], standalone_mode=False) == 3
    [job] = json.loads(capsys.readouterr().out)["jobs"]
    assert (job["job"], job["outcome"]) == (posted.name, "busy")
    assert not any((tmp_path / "results").iterdir())


def test_a_judge_that_fails_at_one_job_serves_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = submitted(tmp_path), submitted(tmp_path, cpp("int another;"))
    judged = Worker._judged

    def fails(self: Worker, posted: JobFolder) -> Evaluation:
        return judged(self, posted) if posted.name == second.name else [][1]

    monkeypatch.setattr(Worker, "_judged", fails)
    assert app(["worker", str(tmp_path), "--once", "--json"], standalone_mode=False) == 1
    said = capsys.readouterr()
    outcomes = {job["job"]: job["outcome"] for job in json.loads(said.out)["jobs"]}
    assert outcomes == {first.name: "failed", second.name: "generation_failure"}
    assert "IndexError" in said.err
    assert [path.name for path in (tmp_path / "results").iterdir()] == [second.name]
    monkeypatch.undo()
    [job], _ = serve(tmp_path)
    assert (job.job, job.outcome) == (first.name, "generation_failure")


def test_what_a_verdict_does_not_stand_against_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(tmp_path)
    said = {
        "eager": BaselineTime(time_us=20.8),
        "vllm": BaselineTime(missing="not here: No module named 'vllm'"),
    }
    found = evaluation(NO_ENTRY).model_copy(update={"baseline": "eager", "baselines": said})
    monkeypatch.setattr(Worker, "_judged", lambda *_: found)
    [job], _ = serve(tmp_path)
    assert job.detail == "2.000 x eager, vllm did not run"


def test_a_job_that_ends_its_workers_is_refused_at_last(tmp_path: Path) -> None:
    posted = submitted(tmp_path)
    claim = tmp_path / "claims" / f"{posted.name}.lock"
    claim.parent.mkdir()
    claim.write_text("1\n" * MOST_ATTEMPTS)
    [job], _ = serve(tmp_path)
    assert (job.outcome, job.detail) == ("refused", "it ended 3 workers that judged it")


def test_two_workers_never_do_one_job_twice(tmp_path: Path) -> None:
    judge = ExchangeJudge(tmp_path, QUICK, "r1")
    candidates = [cpp(f"void fused_add_rms_norm({i}) {{ broken }}") for i in range(4)]
    for candidate in candidates:
        judge.submit(candidate)
    workers = [start_worker(tmp_path, "--once") for _ in range(2)]
    told = [json.loads(worker.communicate(timeout=240)[0])["jobs"] for worker in workers]
    done = [job["job"] for jobs in told for job in jobs]
    assert sorted(done) == sorted(path.name for path in (tmp_path / "jobs").iterdir())
    assert [each.outcome for each in judge.evaluate(candidates)] == ["compilation_failure"] * 4


def test_a_job_outlives_ctrl_c_and_kill_of_its_workers(tmp_path: Path) -> None:
    judge = ExchangeJudge(tmp_path, QUICK, "r1")
    posted = judge.submit(cpp(GOOD))
    claim = tmp_path / "claims" / f"{posted.name}.lock"

    def begun(worker: subprocess.Popen[str]) -> Callable[[], bool]:
        """It has the job, and a process of the judge runs."""
        return lambda: (
            claim.is_file()
            and str(worker.pid) in claim.read_text().split()
            and len(descendants(worker.pid)) > 1
        )

    worker = start_worker(tmp_path)
    until(begun(worker), worker)
    worker.send_signal(signal.SIGINT)
    out, _ = worker.communicate(timeout=60)
    assert worker.returncode == 130
    assert json.loads(out)["jobs"] == []
    assert claim.read_text() == "", "nobody's, and nobody died of it"

    worker = start_worker(tmp_path)
    until(begun(worker), worker)
    below = descendants(worker.pid)
    worker.kill()
    worker.communicate()
    assert claim.read_text() == f"{worker.pid}\n"
    assert not list((tmp_path / "results").iterdir())
    with pytest.raises(WaitingError):
        judge.evaluate([cpp(GOOD)])

    worker = start_worker(tmp_path)
    until(lambda: (tmp_path / "results" / posted.name).is_dir(), worker)
    worker.terminate()
    out, _ = worker.communicate(timeout=60)
    assert worker.returncode == 130
    [evaluation] = judge.evaluate([cpp(GOOD)])
    assert evaluation.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)
    assert evaluation.baseline == "eager"
    alive = [pid for pid in below if descendants(pid)]
    assert not alive, "what the killed worker had started is gone"


def test_the_loop_stops_for_the_judge_and_takes_its_word_up(tmp_path: Path) -> None:
    def patcher(*words: str, form: str = "--json") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "patcher", *words, form]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    words = ("--language", "cpp", "--model", "exchange:letters", "--judge", "exchange:jobs here")
    begun = patcher("optimize", OP.name, *words, form="--iterations=1")
    assert begun.returncode == 6
    told = " ".join(begun.stderr.split())
    assert "has not told yet what it is: a worker that ran once before tells it" in told, told
    [prompt] = (tmp_path / "letters").glob("*.prompt.md")
    assert "another machine, which has not told yet what it is" in prompt.read_text()
    prompt.with_name(prompt.name.replace("prompt", "reply")).write_text(
        "```cpp\nvoid fused_add_rms_norm() { broken }\n```\n"
    )
    waits = patcher("resume")
    assert waits.returncode == 6, waits.stderr
    error = json.loads(waits.stdout)["error"]
    [run] = (tmp_path / "patcher-runs").iterdir()
    assert error["kind"] == "waiting"
    assert error["hint"].endswith(f"patcher resume {run.name}")
    [job] = (tmp_path / "jobs here/jobs").iterdir()
    assert json.loads((job / "job.json").read_text())["ticket"] == run.name

    # the folder goes to the other machine and back, under another name
    shutil.copytree(tmp_path / "jobs here", tmp_path / "host")
    serve(tmp_path / "host")
    shutil.copytree(tmp_path / "host/results", tmp_path / "back/results")
    ended = patcher("resume", "--judge", "exchange:back")
    assert ended.returncode == 1, ended.stderr
    [attempt] = json.loads(ended.stdout)["optimisation"]["iterations"]
    assert attempt["outcome"] == "compilation_failure"


@pytest.mark.parametrize("reward", [False, True])
def test_evaluate_asks_elsewhere_and_the_same_command_takes_the_verdict_up(
    reward: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text(NO_ENTRY.source)
    words = ["evaluate", OP.name, str(source), "--judge", f"exchange:{tmp_path}", "--json"]
    words += ["--reward"] if reward else []
    with pytest.raises(WaitingError, match="waiting for") as caught:
        app(words, standalone_mode=False)
    assert caught.value.hint.endswith("then: the same command again")
    assert len(serve(tmp_path)[0]) == (2 if reward else 1)
    capsys.readouterr()
    assert app(words, standalone_mode=False) == 1
    told = json.loads(capsys.readouterr().out)
    if reward:
        assert told["reward"]["value"] == -1
        assert set(told["evaluations"]) == {"eager"}, "as the local judge, which stops there"
    else:
        assert told["outcome"] == "generation_failure"


def judged_on(device: str, driver: str | None = None, **packages: str) -> Evaluation:
    environment = Environment(
        device=device, device_kind="cuda", python="3", packages=packages, driver=driver
    )
    return Evaluation(
        op=OP.name,
        language="cuda",
        digest="a" * 64,
        outcome=Outcome.RUNTIME_ERROR,
        environment=environment,
    )


def test_a_run_is_judged_on_one_kind_of_device(tmp_path: Path) -> None:
    ours = judged_on("H200", "580")
    nowhere = ours.model_copy(update={"environment": None})
    with Run.create(tmp_path, command="optimize") as run:
        for number, known in enumerate((nowhere, ours, ours)):
            run.step(
                f"x/{number}/evaluate",
                lambda known=known: require_same_device(run, known),
                Evaluation,
            )
        for other in (judged_on("H100", "580"), judged_on("H200", "590")):
            with pytest.raises(VerificationError, match="judged on H200, driver 580, and"):
                require_same_device(run, other)
        assert require_same_device(run, nowhere) == nowhere


def test_a_run_is_judged_beside_one_set_of_packages(tmp_path: Path) -> None:
    """Where vLLM is missing its kernel is no baseline, and a candidate looks better."""
    first = judged_on("H200", torch="2.11.0", vllm="0.25.1")
    another = judged_on("H200", torch="2.13.0", vllm="0.25.1", flashinfer="0.6")
    with Run.create(tmp_path, command="optimize") as run:
        run.step("x/0/evaluate", lambda: require_same_device(run, first), Evaluation)
        assert require_same_device(run, first) == first
        with pytest.raises(VerificationError, match=r"beside vllm none, not 0\.25\.1$"):
            require_same_device(run, judged_on("H200", torch="2.11.0"))
        with pytest.raises(VerificationError, match=r"flashinfer 0\.6, not none, torch 2"):
            require_same_device(run, another)


def test_the_agents_are_told_of_the_machine_that_was_seen_last(
    tmp_path: Path, machine: WorkerMachine
) -> None:
    spec = f"exchange:{tmp_path}"
    assert "has not told" in judge_hardware(spec, Language.CPP)
    (tmp_path / "machines").mkdir()
    for name, seen in (("a", "2026-01-02"), ("b", "2026-01-01")):
        told = machine.model_copy(update={"seen": seen, "words": {"cpu": f"machine {name}"}})
        (tmp_path / f"machines/{name}.json").write_text(told.model_dump_json())
    (tmp_path / "machines/c.json").write_text(machine.model_dump_json()[:100])
    assert judge_hardware(spec, Language.CPP) == "one thread of machine a"
    assert judge_hardware(spec, Language.CPP, 4) == "4 threads of machine a"
    with pytest.raises(UsageError, match="unknown judge"):
        judge_hardware("elsewhere", Language.CPP)


def test_a_mistyped_folder_is_not_made(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["worker", str(tmp_path / "typo"), "--once"])
    assert isinstance(found.exception, UsageError)
    assert "is no folder" in str(found.exception)
    assert not (tmp_path / "typo").exists()


def test_help_has_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("worker", "workspace", "attempt", "evaluate"):
        shown = CliRunner().invoke(app, [name, "--help"]).stdout
        assert f"$ patcher {name}" in shown
