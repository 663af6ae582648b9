"""The command line as a user meets it: exit codes, one JSON document, one clear sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import (
    ROOT,
    error_of,
    patcher,
)

from patcher.runs.journal import read_events

GOOD = ROOT / "kernels/fused_add_rms_norm/solutions/cpu_simd/fused_add_rms_norm.cpp"


def test_help_names_every_command_with_an_example(tmp_path: Path) -> None:
    whole = patcher("--help", cwd=tmp_path)
    assert whole.returncode == 0
    names = (
        "doctor profile evaluate bundle optimize run demo resume throughput report patches apply "
        "verify receipts review accept reject worker workspace attempt memory record replay"
    )
    for name in [*names.split(), "revert", "export", "import", "config", "ops", "models"]:
        assert name in whole.stdout
    for name in ("profile", "evaluate", "throughput", "verify", "receipts", "export", "import"):
        assert f"$ patcher {name}" in patcher(name, "--help", cwd=tmp_path).stdout


VLLM = ["throughput", "gpt-oss-20b", "--engine", "vllm", "--patch", "p"]


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (["bogus", "--json"], 2, "usage"),
        (["evaluate", "--json"], 2, "usage"),
        (["evaluate", "nope", "x.cpp", "--json"], 2, "usage"),
        (["evaluate", "fused_add_rms_norm", "missing.cpp", "--json"], 2, "usage"),
        (["profile", "gpt-oss-tiny", "--from", "missing", "--json"], 2, "usage"),
        (["profile", "nope", "--json"], 2, "usage"),
        (["profile", "gpt-oss-tiny", "--device", "tpu", "--json"], 2, "usage"),
        (["throughput", "gpt-oss-tiny", "--json"], 2, "usage"),
        (["throughput", "gpt-oss-tiny", "--patch", "nowhere", "--json"], 2, "usage"),
        (["throughput", "gpt-oss-tiny", "--patch", "p", "--self-test", "--json"], 2, "usage"),
        (["throughput", "gpt-oss-tiny", "--self-test", "--out", "no/a.json", "--json"], 2, "usage"),
        (["selftest", "--mutations", "--out", "card.json", "--json"], 2, "usage"),
        (["optimize", "rope", "--strategy", "nope", "--dry-run", "--json"], 2, "usage"),
        ([*VLLM, "--weights", "dummy", "--json"], 2, "usage"),
        ([*VLLM, "--processes", "0", "--json"], 2, "usage"),
        ([*VLLM, "--processes", "2", "--json"], 2, "usage"),
        ([*VLLM, "--preset", "slow", "--json"], 2, "usage"),
        ([*VLLM, "--engine-arg", "moe_backend", "--json"], 2, "usage"),
        (["throughput", "gpt-oss-tiny", "--patch", "p", "--tune-baseline", "--json"], 2, "usage"),
        (["resume", "--json"], 2, "usage"),
        (["review", "--json"], 2, "usage"),
        (["accept", "nowhere", "--json"], 2, "usage"),
        (["report", "nope", "--json"], 2, "usage"),
        (["apply", "nowhere", "--json"], 2, "usage"),
        (["optimize", "fused_add_rms_norm", "--model", "oracle", "--json"], 2, "usage"),
        (["optimize", "fused_add_rms_norm", "--model", "anthropic", "--json"], 3, "missing"),
    ],
)
def test_bad_input_is_one_document_and_the_documented_code(
    words: list[str], code: int, kind: str, tmp_path: Path
) -> None:
    result = patcher(*words, cwd=tmp_path, env={"ANTHROPIC_API_KEY": ""})
    assert result.returncode == code, result.stderr
    error = error_of(result)
    assert error["kind"] == kind
    assert error["hint"]


def test_a_missing_argument_is_told_with_its_place(tmp_path: Path) -> None:
    error = error_of(patcher("evaluate", "kernel.cpp", "--json", cwd=tmp_path))
    assert error["hint"].startswith("patcher evaluate [OPTIONS] OP SOURCE; see: ")


def test_a_big_model_without_a_gpu_names_the_ways_on(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = patcher("profile", "gpt-oss-20b", "--json", cwd=tmp_path)
    assert result.returncode == 3
    hint = error_of(result)["hint"]
    assert "--from" in hint
    assert "patcher demo" in hint


def test_doctor_gives_fixes_and_never_the_key(tmp_path: Path) -> None:
    result = patcher("doctor", "--json", cwd=tmp_path, env={"ANTHROPIC_API_KEY": "sk-honeytoken"})
    findings = {item["name"]: item for item in json.loads(result.stdout)["findings"]}
    assert findings["model key"]["status"] == "ok"
    assert "honeytoken" not in result.stdout + result.stderr
    assert all(
        item["fix"] or item["status"] == "ok"
        for item in findings.values()
        if item["name"] != "clocks"
    )


def test_ops_and_config_are_documents(tmp_path: Path) -> None:
    ops = json.loads(patcher("ops", "--json", cwd=tmp_path).stdout)["ops"]
    assert {"fused_add_rms_norm", "moe_route"} <= {op["name"] for op in ops}
    shown = json.loads(patcher("ops", "show", "fused_add_rms_norm", "--json", cwd=tmp_path).stdout)
    names = {item["name"] for item in shown["solutions"]}
    assert names == {"cpu_simd", "cuda_row", "cuda_tuned", "triton_row"}
    (tmp_path / "patcher.toml").write_text("margin_pct = 1.0\n")
    env = {"PATCHER_ITERATIONS": "3"}
    settings = json.loads(patcher("config", "--json", cwd=tmp_path, env=env).stdout)["settings"]
    assert settings["margin_pct"] == {"value": 1.0, "origin": "patcher.toml"}
    assert settings["iterations"] == {"value": 3, "origin": "PATCHER_ITERATIONS"}


def test_evaluate_prints_one_document(tmp_path: Path) -> None:
    words = ["evaluate", "fused_add_rms_norm", str(GOOD), "--baseline", "eager", "--pairs", "4"]
    result = patcher(*words, "--threads", "1", "--json", cwd=tmp_path)
    found = json.loads(result.stdout)
    wanted = {"op", "language", "outcome", "checks", "baseline", "timings", "geomean_speedup"}
    assert wanted <= set(found)
    assert found["outcome"] in ("correct", "too_slow")
    assert result.returncode == (0 if found["outcome"] == "correct" else 1)
    assert {"axes", "candidate_us", "baseline_us", "speedup", "speedup_low", "speedup_high"} <= set(
        found["timings"][0]
    )
    broken = tmp_path / "broken.cpp"
    broken.write_text(GOOD.read_text().replace("sum * sum", "sum"))
    result = patcher("evaluate", "fused_add_rms_norm", str(broken), "--json", cwd=tmp_path)
    assert result.returncode == 1
    assert json.loads(result.stdout)["outcome"] == "mismatch"


def test_recorded_samples_are_decided(tmp_path: Path) -> None:
    lines = []
    for pair in range(20):
        for arm, speed in (("baseline", 100.0 + pair % 3), ("patched", (100.0 + pair % 3) * 1.02)):
            lines.append(json.dumps({"pair": pair, "arm": arm, "tokens_per_s": speed + pair / 1e3}))
    (tmp_path / "s.jsonl").write_text("\n".join(lines))
    result = patcher("throughput", "gpt-oss-20b", "--from", "s.jsonl", "--json", cwd=tmp_path)
    assert result.returncode == 0
    assert json.loads(result.stdout)["verdict"] == "accept"
    named = [json.dumps(json.loads(line) | {"process": i // 10}) for i, line in enumerate(lines)]
    (tmp_path / "s.jsonl").write_text("\n".join(named))
    result = patcher("throughput", "gpt-oss-20b", "--from", "s.jsonl", "--json", cwd=tmp_path)
    assert result.returncode == 0
    assert json.loads(result.stdout)["process_pairs"] == 4


RUN = [
    *("run", "gpt-oss-tiny", "--model", "replay:demo", "--language", "cpp", "--iterations", "2"),
    *("--device", "cpu", "--batch", "2", "--input-len", "8", "--output-len", "8"),
    *("--pairs", "6", "--threads", "1", "--op", "fused_add_rms_norm", "--json"),
]


def kill_when(folder: Path, step: str, kind: str, words: list[str]) -> None:
    """Run patcher and SIGKILL its whole session once the journal shows the event."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "patcher", *words],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, f"ended before {kind} of {step}"
        for journal in folder.glob("patcher-runs/*/journal.jsonl"):
            events = read_events(journal)
            if any(event.step == step and event.kind == kind for event in events):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return
        time.sleep(0.02)
    raise AssertionError(f"no {kind} of {step}")


@pytest.mark.slow
def test_a_run_killed_twice_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """kill -9 while judging and while measuring; nothing that was finished is done again."""
    kill_when(tmp_path, "fused_add_rms_norm/1/evaluate", "intent", RUN)
    kill_when(tmp_path, "measure", "intent", ["resume", "latest", "--json"])
    result = patcher("resume", "latest", "--json", cwd=tmp_path)
    assert result.returncode in (0, 1), result.stderr
    found = json.loads(result.stdout)
    [run] = (tmp_path / "patcher-runs").iterdir()
    assert found["run"] == run.name
    assert found["decision"]["verdict"] in ("accept", "reject", "inconclusive")
    events = read_events(run / "journal.jsonl")
    done = [event.step for event in events if event.kind == "result"]
    assert len(done) == len(set(done))
    begun = [event.step for event in events if event.kind == "intent"]
    twice = {step for step in begun if begun.count(step) > 1}
    assert twice == {"fused_add_rms_norm/1/evaluate", "measure"}
    assert all(begun.count(step) == 1 for step in begun if "ask-" in step)
    for name in found["reports"]:
        assert (run / name).stat().st_size > 1000
    again = json.loads(patcher("resume", "latest", "--json", cwd=tmp_path).stdout)
    assert again == found
    page = (run / "report.html").read_text()
    assert "Recorded conversation" in page
    assert str(tmp_path) not in page


def test_exchange_waits_with_its_code_and_names_the_file(tmp_path: Path) -> None:
    words = ["optimize", "fused_add_rms_norm", "--language", "cpp", "--model", "exchange:letters"]
    result = patcher(*words, "--iterations", "1", "--json", cwd=tmp_path)
    assert result.returncode == 6
    error = error_of(result)
    assert error["kind"] == "waiting"
    [prompt] = (tmp_path / "letters").glob("*.prompt.md")
    assert "reply.md" in error["hint"]
    [run] = (tmp_path / "patcher-runs").glob("*/run.json")
    assert json.loads(run.read_text())["settings"]["analyst"] == "off"  # on a CPU, unless named
    reply = prompt.with_name(prompt.name.replace("prompt", "reply"))
    reply.write_text(f"Here it is.\n\n```cpp\n{GOOD.read_text()}\n```\n")
    result = patcher("resume", "--json", cwd=tmp_path)
    assert result.returncode in (0, 1), result.stderr
    attempt = json.loads(result.stdout)["optimisation"]["iterations"][0]
    assert attempt["reply_source"] == "exchange"
    assert attempt["outcome"] in ("correct", "too_slow"), attempt
