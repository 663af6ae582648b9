"""The page of features says what tests assert and what was run, no more and no less."""

from __future__ import annotations

import json
import subprocess
import sys

import feature_matrix
from feature_matrix import ENGINES, PAGE, ROOT, page, recorded


def test_the_page_is_of_the_record() -> None:
    assert PAGE.read_text() == page(recorded()), "run `make features`"


def test_the_record_is_of_what_tests_assert_today() -> None:
    command = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-q", "-m", "feature"]
    more = ["-p", "feature_matrix", "tests/integrate"]
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests/support')!r}); import pytest; "
    code += "raise SystemExit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *command[4:], *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("claim ")]
    asserted = {tuple(json.loads(line.removeprefix("claim "))) for line in lines}
    record = {
        (engine, name, point, outcome)
        for engine, names in recorded().items()
        for name, points in names.items()
        for point, outcomes in points.items()
        for outcome in outcomes
    }
    assert record == asserted, "run `make features`"


def test_cells_say_what_ran_and_what_did_not() -> None:
    record: feature_matrix.Record = {}
    point = ENGINES["vllm"][0]
    for version, outcome in (("0.9", "right"), ("0.10", "refused")):
        feature_matrix._add(record, "vllm", version, [("vllm", "LoRA", point, outcome)])
        feature_matrix._add(record, "vllm", version, [("vllm", "LoRA", point, outcome)])
    feature_matrix._add(record, "vllm", "0.11", [("vllm", "hooks", point, "falls back")])
    lines = [[cell.strip() for cell in line.split("|")] for line in page(record).splitlines()]
    rows = {line[1]: line[2:] for line in lines if len(line) > 2}
    assert rows["LoRA"][0] == "refused in 0.10; right in 0.9; not tried in 0.11"
    assert rows["hooks"][0] == "falls back; not tried in 0.9, 0.10"
    assert rows["hooks"][1] == ""
    feature_matrix._add(record, "vllm", "0.11", [])
    assert "hooks" not in record["vllm"]
