"""The table of verdicts on the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
from elsewhere_sample import at
from measure_sample import decided, evidence
from report_sample import throughput_of

from patcher.ab.best_set import BestSet
from patcher.ab.measurement import Measurement
from patcher.ab.result import ABResult
from patcher.ab.set_search import SetSearch, combination_of
from patcher.bench import UsageError
from patcher.bench.lab.verdict_table import PUBLISHED, main, read, table


def judged(**changes: object) -> ABResult:
    parts = evidence()
    decision = decided(**parts)
    parts |= {"throughput": throughput_of(), **changes}
    measured = Measurement(
        **{name: parts[name] for name in Measurement.model_fields if name in parts}
    )
    return ABResult(patches=("norm-1",), measured=(measured,), decisions=(decision,))


def test_a_row_a_verdict_and_one_for_each_other_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = judged(other_workloads=at(0.4))
    (tmp_path / "a.json").write_text(one.model_dump_json())
    both = ABResult(
        patches=("norm-1", "rope-2"), measured=one.measured * 2, decisions=one.decisions * 2
    )
    best = BestSet(patches=both.patches, reason="", combinations=(combination_of(both),))
    (tmp_path / "b.json").write_text(SetSearch(best=best, measured=(both,)).model_dump_json())
    assert main([str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    found = one.measured[0].throughput.comparison
    assert rows[0].startswith("| `norm-1` | 8 | 32 to 160 |")
    assert f"| {found.figures} |" in rows[0]
    assert "**accept**" in rows[0]
    assert rows[1].startswith("|  | 64 | 4,096 |")
    assert rows[1].endswith("| within |")
    assert rows[2].startswith("| `norm-1`, `rope-2` | 8 |")
    assert rows[-1] == PUBLISHED
    assert {row.count(" | ") for row in rows[:-1]} == {8}
    assert table(read(tmp_path)).count("**accept**") == 2


def test_what_is_no_verdict_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="holds no verdict"):
        read(tmp_path)
    for text in ("[]", "{}", "3", "{"):
        (tmp_path / "a.json").write_text(text)
        assert main([str(tmp_path)]) == 2
        assert "a.json holds no verdict" in capsys.readouterr().err
    assert main([]) == 2
