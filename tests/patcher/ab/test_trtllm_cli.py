"""`patcher trtllm`, as a user meets it; trtllm-bench is the double's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from command_line import error_of, patcher
from trtllm_sample import CALLS, DOUBLE, RUN, installed, make_patch, write_program

from patcher.integrate import Store

LENGTHS = [
    *("--vocab-size", str(RUN.vocab_size), "--requests", str(RUN.requests)),
    *("--concurrency", str(RUN.concurrency), "--input-len", str(RUN.input_len)),
    *("--output-len", str(RUN.output_tokens)),
]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With the double installed, its program on PATH, and a patch applied."""
    with installed():
        patch = make_patch(tmp_path / "patch")
        Store(tmp_path / "home").apply(patch.folder)
    path = os.pathsep.join([str(DOUBLE), *filter(None, [os.environ.get("PYTHONPATH")])])
    write_program(tmp_path / "bin/trtllm-bench", sys.executable)
    return {
        "PATCHER_HOME": str(tmp_path / "home"),
        "PYTHONPATH": path,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "TRTLLM_DOUBLE_POOL": "subprocess",  # MPI has tests of its own
    }


def test_from_the_module_to_receipts_of_every_rank(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    made = patcher("trtllm", "module", "patched", "--json", cwd=tmp_path, env=environment)
    package = json.loads(made.stdout)["package"]
    words = ["trtllm", "bench", RUN.model, "run", *LENGTHS, "--module", package]
    dry = patcher(*words, "--dry-run", "--json", cwd=tmp_path, env=environment)
    assert json.loads(dry.stdout)["command"][-2:] == ["--custom_module_dirs", package]
    switches = {"PATCHER_PATCHES": "on", "PATCHER_RECEIPTS": str(tmp_path / "receipts")}
    ran = patcher(*words, "--json", cwd=tmp_path, env=environment | switches)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert json.loads(ran.stdout)["requests"] == RUN.requests
    # two more requests warm it up
    told = patcher("trtllm", "check", "receipts", "--json", cwd=tmp_path, env=environment)
    assert json.loads(told.stdout)["calls_by_rank"] == {
        "0": CALLS * (RUN.requests + 2) // RUN.requests
    }
    more = patcher(
        "trtllm", "check", "receipts", "--tp", "2", "--json", cwd=tmp_path, env=environment
    )
    assert more.returncode == 5
    assert "rank 1 of 2" in error_of(more)["message"]


def test_what_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    empty = {"PATCHER_HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"]}
    (tmp_path / "kernel.h").write_text("bool nothing();\n")
    cases = [
        (["check", "receipts"], 2, "no patch is applied"),
        (["bench", "m", "run", *LENGTHS], 3, "trtllm-bench is not on PATH"),
        (["bench", "m", "run", "--vocab-size", "1"], 2, "vocab_size"),
        (["bench", "m", "run", *LENGTHS, "--moe-backend", "X"], 2, "moe_backend"),
        (["diff", "nothing", "tree", "kernel.h", "--out", "out"], 2, "no patchable kernel"),
        (["diff", "moe_finalize", "tree", "none.h", "--out", "out"], 2, "cannot read"),
        (["diff", "moe_finalize", "tree", "kernel.h", "--out", "out"], 2, "has no cpp/"),
    ]
    for words, code, said in cases:
        result = patcher("trtllm", *words, "--json", cwd=tmp_path, env=empty)
        assert (result.returncode, said in error_of(result)["message"]) == (code, True), words
