"""A patched model against stock in processes of their own: a small gpt-oss that has learned."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cloze_sample import KNOWN, trained
from patch_sample import OP, evaluation

from patcher.bench import Language
from patcher.bench.lab import same_model
from patcher.integrate import Patch


def test_a_right_kernel_leaves_the_model_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, bundle, out = tmp_path / "model", tmp_path / "patch", tmp_path / "out.json"
    model.mkdir()
    trained(model)
    [candidate] = [one for info, one in OP.solutions() if info.language == Language.CPP]
    verdict = evaluation(candidate)
    made = Patch.create(
        bundle, OP, candidate, verdict, engine="transformers", made_by="test"
    ).manifest
    words = [str(out), str(model), str(bundle), "--quality-steps", "6", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["same_model", *words, "--input-len", "4"])
    same_model.main()
    found = json.loads(out.read_text(encoding="utf-8"))
    quality = found["quality"]
    assert quality["passed"], quality["reason"]
    assert quality["positions"] == 4 * (6 + 1)
    assert quality["task"]["baseline_pct"] >= 100 * KNOWN / quality["task"]["items"]
    assert quality["between"]["max_error"] > 0, "the kernel rounds in its own way"
    assert list(found["receipts"]) == [made.id]
    assert sum(found["receipts"][made.id]["calls"].values()) > 0
    assert found["stock_repeats_itself_after_the_patch"]
