"""A user's own op with a user's own patch point in vLLM: bundled, in, counted, out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_here import config, needs_vllm

from patcher.bench import Candidate, Evaluation, Language, Op, Outcome, Timing, UsageError, load_op
from patcher.bench.toolchains import build
from patcher.integrate import Patch, patch_point, prepare, verify

__all__ = ["config"]

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/tutorials/write-an-op.md").read_text(encoding="utf-8")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Op:
    """The op of the tutorial, in a folder of the user's."""
    for name, text in re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    monkeypatch.setenv("PATCHER_OPS", str(tmp_path / "my_ops"))
    return load_op("silu_mul")


@pytest.fixture
def point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with the patch point."""
    info = tmp_path / "own_point-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-point\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[patcher.patch_points]\nvllm.own = own_point:POINTS\n")
    shutil.copy(ROOT / "tests/data/own_point/own_point.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_an_op_of_ones_own_without_a_point_is_refused_by_its_name(own: Op) -> None:
    with pytest.raises(UsageError, match="silu_mul has no patch point in vllm"):
        patch_point(own, "vllm")


@needs_vllm
@pytest.mark.usefixtures("point")
def test_an_op_of_ones_own_goes_into_the_engine_and_out(
    own: Op, tmp_path: Path, config: Any
) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    source = (tmp_path / "silu_mul.cpp").read_text(encoding="utf-8")
    candidate = Candidate(op=own.name, language=Language.CPP, source=source)
    timing = Timing(
        axes={"tokens": 8, "inner": 1024}, candidate_us=1.0, baseline_us=2.0, speedup=2.0,
        speedup_low=1.9, speedup_high=2.1, pairs=4, calls=8,
    )  # fmt: skip
    verdict = Evaluation(
        op=own.name, language=Language.CPP, digest=candidate.digest, outcome=Outcome.CORRECT,
        timings=(timing,), geomean_speedup=2.0,
    )  # fmt: skip
    patch = Patch.create(
        tmp_path / "patch",
        own,
        candidate,
        verdict,
        engine="vllm",
        made_by="test",
        built=build(candidate, own.contract),
    )
    assert patch.manifest.target.point == "own_gate"
    assert verify(patch).failure is None
    layer, x, original = SiluAndMul(), torch.randn(3, 96), SiluAndMul.forward
    before = layer(x)
    with prepare(None, patch) as book:
        assert SiluAndMul.forward is not original
        torch.testing.assert_close(layer(x), before)
        half = layer(x.bfloat16())
    assert sum(book.calls.values()) == 1
    assert [reason.split()[0] for reason in book.fallbacks] == ["dtype"]
    torch.testing.assert_close(half, layer(x.bfloat16()))
    assert SiluAndMul.forward is original
    assert torch.equal(layer(x), before)
