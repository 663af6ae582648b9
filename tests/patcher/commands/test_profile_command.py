"""`patcher profile` as a user runs it."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

EXPORT = Path(__file__).parents[2] / "data/nsys/decode.sqlite"
SUMMARY = Path(__file__).parents[2] / "data/nsys/cuda_gpu_kern_sum.csv"


def profile(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "patcher", "profile", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_the_table_is_the_ledger_and_says_what_to_do() -> None:
    shown = profile("gpt-oss-20b", "--from", EXPORT).stdout
    for word in ("chain: MoE routing", "rope + KV write", "configuration", "closed", "fuse", "why"):
        assert word in shown
    assert "which the kernel rows add up to" in shown
    assert "4 steady steps" in shown
    everything = profile("gpt-oss-20b", "--from", EXPORT, "--top", 100).stdout
    assert "smaller rows are not shown" in shown
    assert "smaller rows are not shown" not in everything


def test_json_is_one_document_and_a_picture_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "decode.svg"
    done = profile("gpt-oss-20b", "--from", EXPORT, "--json", "--plot", picture)
    document = json.loads(done.stdout)
    kernels = [spot for spot in document["hotspots"] if spot["kind"] == "kernel"]
    assert sum(spot["exposed_ns"] for spot in kernels) == document["busy_ns"]
    drawn = ElementTree.parse(picture).getroot()
    assert drawn.tag.endswith("svg")
    text = "".join(drawn.itertext())
    assert "MoE routing" in text
    assert str(EXPORT.parent) not in text + done.stdout


def test_a_summary_is_ranked_without_times() -> None:
    done = profile("gpt-oss-20b", "--from", SUMMARY)
    assert "77,548,893 ns over 11,976 kernels" in done.stdout
    assert "no_times" in done.stderr


def test_two_profiles_are_compared() -> None:
    done = profile("--compare", EXPORT, EXPORT, "--json")
    document = json.loads(done.stdout)
    assert document["unit"] == "decode step"
    assert {row["change"] for row in document["rows"]} == {"same"}
    assert "no patched kernel is there" in profile("m", "--compare", EXPORT, SUMMARY).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "nothing.sqlite"], "cannot read nothing.sqlite"),
        (["--from", str(EXPORT), "--plot", "no/such/folder.svg"], "cannot write the plot to"),
        (["--from", str(EXPORT), "--window", "decode"], "no NVTX range 'decode'"),
        (["--from", str(SUMMARY), "--window", "decode"], "no NVTX ranges"),
        (["--compare", str(EXPORT), str(EXPORT), "--plot", "x.svg"], "--compare takes two files"),
        (["--from", str(SUMMARY), "--minus", str(SUMMARY)], "does not hold more work"),
        (["--ncu", str(SUMMARY)], "go with --from"),
        (["--steps", "3"], "go with --from"),
        (["--force"], "go with --from"),
        (["--compare", str(EXPORT), str(EXPORT), "--steps", "3"], "--compare takes two files"),
        (["--from", str(EXPORT), "--dtype", "float16"], "--dtype applies only to a capture"),
        (["--from", str(EXPORT), "--keep", "x"], "--keep applies only to a capture"),
        (
            ["--compare", str(EXPORT), str(EXPORT), "--device", "cpu", "--output-len", "3"],
            "--device and --output-len applies only to a capture",
        ),
        (["--from", str(EXPORT), "--top", "0"], "--top"),
        (["--from", str(EXPORT), "--batch", "1,8"], "a file has the steps of one"),
        (["--compare", str(EXPORT), str(EXPORT), "--batch", "1,8"], "a file has the steps of one"),
        (["--batch", "1,8", "--plot", "x.svg"], "--plot draws one profile"),
        (["--batch", "0,8"], "--batch '0,8' is no batch"),
        (["--batch", "a"], "--batch 'a' is no batch"),
        (["--batch", "1,"], "--batch '1,' is no batch"),
        (["--batch", "8,8"], "names a batch twice"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments: list[str], said: str) -> None:
    done = profile("m", *arguments, code=2)
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    as_json = profile("m", *arguments, "--json", code=2)
    assert json.loads(as_json.stdout)["error"]["kind"] == "usage"


def test_a_graph_level_trace_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "graph.sqlite"
    shutil.copy(EXPORT, path)
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT)")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (0)")
    refused = profile("gpt-oss-20b", "--from", path, code=2)
    assert "--cuda-graph-trace=node" in refused.stderr
    ranked = profile("gpt-oss-20b", "--from", path, "--force")
    assert "graph_level" in ranked.stderr
    assert "MoE routing" in ranked.stdout


def test_without_a_model_there_is_nothing_to_profile() -> None:
    assert "no model was named" in profile(code=2).stderr


def test_several_batches_are_a_document_and_tables(tmp_path: Path) -> None:
    tiny = ("gpt-oss-tiny", "--device", "cpu", "--input-len", 4, "--ledger")
    done = profile(*tiny, "--batch", "1,3", "--json", "--keep", tmp_path)
    document = json.loads(done.stdout)
    assert list(document) == ["schema_version", "profiles"]
    assert [one["batch"] for one in document["profiles"]] == [1, 3]
    assert [one["profile"]["ledger"]["batch"] for one in document["profiles"]] == [1, 3]
    assert (tmp_path / "torch.batch3.json").is_file()
    shown = profile(*tiny, "--batch", "3,2")
    *tables, together = shown.stdout.split("the step at each batch")
    heads = [line.split()[1] for line in "".join(tables).splitlines() if line.startswith("batch ")]
    assert [head.rstrip(",") for head in heads] == ["3", "3", "2", "2"], "title and last lines"
    rows = [
        line.split()[1]
        for line in together.splitlines()
        if line.startswith("\N{BOX DRAWINGS LIGHT VERTICAL}")
    ]
    assert rows == ["3", "2"]
    assert shown.stderr.count("cpu_operators") == 1
