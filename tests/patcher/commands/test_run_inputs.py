"""A run that cannot start leaves nothing behind, and one that began from a file keeps it."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT

from patcher import pipeline
from patcher.bench import MissingError, UsageError
from patcher.cli import main
from patcher.hotspot import Profile, read
from patcher.kernel_search.context import MACHINE_INDEPENDENT
from patcher.places import places_in
from patcher.plan import RunPlan
from patcher.runs.run import Run
from patcher.settings import resolve
from patcher.workloads import workload_for

TRACE = ROOT / "tests/data/nsys/decode.sqlite"
OP = "fused_add_rms_norm"
DEMO = ("--model", "replay:demo")


def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, dict[str, Any]]:
    """Exit code and error of a command."""
    monkeypatch.setattr(sys, "argv", ["patcher", *words, "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["error"]
    return int(caught.value.code or 0), found


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("run", "gpt-oss-tiny", "--from", "typo.sqlite", *DEMO), 2, "typo.sqlite"),
        (("run", "gpt-oss-tiny", "--model", "anthropic"), 3, "no key"),
        pytest.param(
            *(("run", "gpt-oss-tiny", "--engine", "vllm", *DEMO), 3, "vllm is not installed"),
            marks=pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is here"),
        ),
        (("run", "gpt-oss-tiny", "--op", OP, "--sweep", "nope", *DEMO), 2, "no sweep nope"),
        (("run", "gpt-oss-20b", "--device", "cpu", *DEMO), 3, "does not fit"),
        (("optimize", OP, "--model", "replay:nowhere"), 2, "nowhere"),
        (("optimize", OP, "--analyst", "anthropic", *DEMO), 3, "no key"),
        (("optimize", OP, "--judge", "nobody", *DEMO), 2, "unknown judge"),
    ],
)
def test_a_wrong_input_leaves_no_run(
    words: tuple[str, ...],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    found, error = command(capsys, monkeypatch, *words)
    assert found == code
    assert said in error["message"]
    assert not (tmp_path / "patcher-runs").exists()


def begin(file: Path) -> Run:
    workload = workload_for("gpt-oss-tiny", "cpu")
    settings = resolve({"model": "replay:demo"})
    return pipeline.start(settings, "run", "gpt-oss-tiny", workload, RunPlan(op=OP), file)


def test_a_run_keeps_the_profile_that_it_starts_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "given.sqlite"
    file.write_bytes(TRACE.read_bytes())
    with begin(file) as run:
        assert run.config.settings["plan"]["profile_file"] == "given.sqlite"
    file.unlink()

    def reached(run: Run, *_: object, profile: Profile, **__: object) -> None:
        raise UsageError(profile.source, "stop here")

    monkeypatch.setattr(pipeline, "search_kernel", reached)
    expected = read(TRACE, "gpt-oss-tiny", places=places_in("gpt-oss-tiny", "transformers"))
    with Run.open(run.path) as again:
        again.start_over({}, MACHINE_INDEPENDENT)
        monkeypatch.setattr(pipeline, "same_machine", lambda *_: [])
        with pytest.raises(UsageError, match="sqlite"):
            pipeline.execute(again, lambda *_: None, lambda _: None)
        kept = again.load("profile", Profile)
    assert kept.hotspots == expected.hotspots
    assert kept.kernels == expected.kernels


def test_a_run_without_its_copy_captures_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begin(TRACE) as run:
        run.start_over(run.config.machine or {}, ())
        with pytest.raises(UsageError, match=r"no copy of the profile decode\.sqlite"):
            pipeline.execute(run, lambda *_: None, lambda _: None)


def test_a_key_that_is_gone_is_told_before_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-test-0000")
    workload = workload_for("gpt-oss-tiny", "cpu")
    settings = resolve({"model": "anthropic"})
    with pipeline.start(settings, "run", "gpt-oss-tiny", workload, RunPlan()) as run:
        monkeypatch.delenv("ANTHROPIC_API_KEY")
        monkeypatch.setattr(pipeline, "capture", lambda *_: pytest.fail("it was profiled"))
        with pytest.raises(MissingError, match="no key") as caught:
            pipeline.execute(run, lambda *_: None, lambda _: None)
    assert f"patcher resume {run.id}" in caught.value.hint
