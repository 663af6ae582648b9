"""What the doctor warns of: what somebody on this machine is likely to want, and the fix."""

from __future__ import annotations

import compileall
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patcher import doctor
from patcher.bench import Language, UsageError
from patcher.bench.selftest.scorecard import corpus_folder
from patcher.bench.toolchains import compilers
from patcher.commands.console import app
from patcher.doctor import Machine, examine
from patcher.finding import Finding

PLAIN = Machine(nvidia=False, amd=False, mac=False, serving=False)
HOPPER = replace(PLAIN, nvidia=True)


def on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    """The findings where nothing is installed beside Python's packages and g++."""
    monkeypatch.setattr(Machine, "here", classmethod(lambda _: machine))
    return {one.name: one for one in examine()}


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own, no key, nothing of NVIDIA's tools."""
    for name in (
        "ANTHROPIC_API_KEY",
        "OPENAI_API_KEY",
        "PATCHER_PATCHES",
        "PATCHER_NSYS",
        "PATCHER_NCU",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATCHER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("bare")
def test_a_plain_cpu_machine_gets_three_warnings_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    if compilers.find("g++") is None:
        pytest.skip("no g++ here")
    found = on(PLAIN, monkeypatch)
    told = [one for one in found.values() if one.shown and one.status != "ok"]
    assert {one.name for one in told} <= {"model key", "sandbox", "patch switches"}
    assert all(one.fix for one in told)
    assert found["model key"].status == "warn"
    for one in found.values():
        assert one.fix or one.status == "ok", one.name


@pytest.mark.parametrize(
    ("machine", "name", "wanted"),
    [
        (HOPPER, "nsys", True),
        (HOPPER, "ncu", True),
        (HOPPER, "clocks", True),
        (HOPPER, "toolchain triton", True),
        (HOPPER, "engine vllm", True),
        (HOPPER, "toolchain cutedsl", False),
        (HOPPER, "toolchain metal", False),
        (replace(HOPPER, serving=True), "toolchain cutedsl", True),
        (replace(HOPPER, serving=True), "engine vllm", False),
        (replace(PLAIN, serving=True), "engine vllm", False),
        (replace(PLAIN, amd=True), "toolchain hip", True),
        (replace(PLAIN, mac=True), "toolchain metal", True),
        (PLAIN, "nsys", False),
        (PLAIN, "toolchain cuda", False),
        (PLAIN, "toolchain cpp", True),
        (PLAIN, "sandbox", True),
    ],
)
def test_what_is_wanted_follows_from_the_machine(
    machine: Machine, name: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PATCHER_NSYS", raising=False)
    assert machine.wants(name) is wanted


def test_every_language_and_engine_has_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that names no finding would be dead."""
    names = {one.name for one in examine()}
    assert {f"toolchain {language}" for language in Language} <= names
    assert {"engine vllm", "engine sglang", "engine tensorrt-llm"} <= names
    assert {"baseline flashinfer", "clocks"} <= names
    assert {"nsys", "ncu", "compute-sanitizer"} <= names


def test_an_engine_that_every_process_compiles_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for vLLM, unpacked where Python may keep no bytecode, as in many containers."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    info = tmp_path / "vllm-0.33.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def said(keeps: bool) -> Finding:
        monkeypatch.setattr(sys, "dont_write_bytecode", not keeps)
        return doctor._bytecode()

    assert said(keeps=True).status == "ok"
    assert said(keeps=False).status == "warn"
    assert f"compileall -q {tmp_path}" in said(keeps=False).fix
    compileall.compile_dir(package, quiet=1)
    assert said(keeps=False).status == "ok"


@pytest.mark.usefixtures("bare")
def test_a_tool_that_is_named_is_wanted_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHER_NSYS", "/no/such/nsys")
    assert on(PLAIN, monkeypatch)["nsys"].shown


@pytest.mark.usefixtures("bare")
def test_a_key_is_not_asked_for_where_the_model_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATCHER_MODEL", "exchange:prompts")
    assert on(PLAIN, monkeypatch)["model key"].status == "ok"


@pytest.mark.usefixtures("bare")
def test_all_of_them_are_shown_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", classmethod(lambda _: PLAIN))
    few = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    whole = json.loads(CliRunner().invoke(app, ["doctor", "--all", "--json"]).stdout)
    assert few["left_out"] + len(few["findings"]) == len(whole["findings"]) == len(examine())
    assert whole["left_out"] == 0
    assert "doctor --all" in CliRunner().invoke(app, ["doctor"]).stdout or not few["left_out"]


def test_a_driver_without_a_cuda_build_of_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cuda_works", lambda: False)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "nvidiactl" or exists(path))
    found = doctor._gpu()
    assert (found.status, bool(found.fix)) == ("warn", True)
    assert Machine.here().nvidia


def test_the_corpus_of_the_self_test_is_chosen_or_that_of_the_checkout(tmp_path: Path) -> None:
    ours = corpus_folder()
    assert corpus_folder(ours) == ours
    with pytest.raises(UsageError, match="holds no self-test cases"):
        corpus_folder(tmp_path)
    told = CliRunner().invoke(app, ["selftest", "--corpus", str(tmp_path)])
    assert isinstance(told.exception, UsageError)
