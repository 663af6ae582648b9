"""The adapter that the tutorial shows, as it stands there, in an engine made for it."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from patch_sample import OP, evaluation

from patcher import bench
from patcher.bench import Candidate, Contract, Language
from patcher.integrate import Patch, Store, Switches, activate, points, read_receipts, verify

ROOT = Path(__file__).resolve().parents[3]
ENGINE = """
import torch


class RMSNorm:
    def __init__(self, hidden):
        self.weight, self.epsilon = torch.ones(hidden), 1e-5

    def forward(self, x, residual):
        residual.add_(x)
        x.copy_(residual * torch.rsqrt(residual.pow(2).mean(-1, True) + self.epsilon) * self.weight)
        return x, residual
"""
KERNEL = """
import torch


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    input.copy_(residual * torch.rsqrt(residual.pow(2).mean(-1, True) + epsilon) * weight)
"""


class OpOfToyserve:
    """The library's op with a patch point in toyserve."""

    name = OP.name
    contract = Contract.model_validate(
        {
            **OP.contract.model_dump(),
            "patch_points": [
                {
                    "engine": "toyserve",
                    "versions": ">=1.2,<2",
                    "point": "rms_norm",
                    "summary": "add + norm",
                    "calls_per_layer": 1,
                }
            ],
        }
    )


def example() -> str:
    text = (ROOT / "docs/tutorials/add-an-engine.md").read_text(encoding="utf-8")
    found = re.search(r"^## To patch it.*?^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def write_engine(folder: Path, source: str = ENGINE, version: str = "1.2.3") -> None:
    (folder / "toyserve").mkdir(parents=True, exist_ok=True)
    (folder / "toyserve" / "__init__.py").touch()
    (folder / "toyserve" / "layers.py").write_text(source)
    info = folder / "toyserve.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toyserve\nVersion: {version}\n")


@pytest.fixture
def norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine's class; engine and adapter are importable."""
    folder = tmp_path / "site"
    write_engine(folder)
    (folder / "toyserve_adapter.py").write_text(example())
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(points.POINTS._ours, "toyserve", "toyserve_adapter:POINTS")
    names = ("toyserve", "toyserve.layers", "toyserve_adapter")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    yield importlib.import_module("toyserve.layers").RMSNorm
    for name in names:
        sys.modules.pop(name, None)


def make(folder: Path) -> Patch:
    candidate = Candidate(op=OP.name, language=Language.TORCH, source=KERNEL)
    op: Any = OpOfToyserve()
    return Patch.create(
        folder, op, candidate, evaluation(candidate), engine="toyserve", made_by="test"
    )


def test_the_example_is_short() -> None:
    lines = [line for line in example().splitlines() if line.strip()]
    assert len(lines) <= 60


def test_the_example_goes_in_counts_falls_back_and_out(norm: Any, tmp_path: Path) -> None:
    original = norm.forward
    store = Store(tmp_path / "home")
    entry = store.apply(make(tmp_path / "patch").folder)
    switches = Switches("on", strict=True, receipts=tmp_path / "receipts")
    with torch.inference_mode():
        expected = norm(8).forward(torch.ones(2, 8), torch.ones(2, 8))
        with activate("toyserve", switches=switches, store=store) as active:
            assert active.digests == entry.digest
            found = norm(8).forward(torch.ones(2, 8), torch.ones(2, 8))
            norm(12).forward(torch.ones(2, 12), torch.ones(2, 12))
            with pytest.raises(bench.VerificationError, match="patched already"):
                activate("toyserve", switches=switches, store=store)
            [installed] = active.installed
            with pytest.raises(bench.UsageError, match="installed already"):
                installed.install()
        active.close()
    assert norm.forward is original
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    [receipt] = [one for one in read_receipts(tmp_path / "receipts") if not one.failure]
    assert receipt.calls == {"fused_add_rms_norm tokens=2 hidden=8 float32": 1}
    assert receipt.fallbacks == {"hidden no multiple of 8": 1}


def test_what_the_example_refuses_is_told(
    norm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = make(tmp_path / "patch")
    assert verify(patch).failure is None
    write_engine(tmp_path / "site", version="2.0")
    [failure] = [check for check in verify(patch).checks if not check.passed]
    assert failure.name == "version"
    write_engine(tmp_path / "site", ENGINE.replace("residual.add_(x)", "residual += 2 * x"))
    importlib.invalidate_caches()
    importlib.reload(sys.modules["toyserve.layers"])
    [failure] = [check for check in verify(patch).checks if not check.passed]
    [change] = failure.changes
    assert (failure.name, change.name) == ("source", "RMSNorm.forward")
    assert "+        residual += 2 * x" in change.diff
    monkeypatch.setitem(sys.modules, "toyserve.layers", None)
    failed = verify(patch).failure
    assert failed is not None
    assert failed.exit_code == 5
    assert "rms_norm is not in toyserve 1.2.3" in failed.detail


def test_someone_elses_patch_over_the_examples_stays(norm: Any, tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    store.apply(make(tmp_path / "patch").folder)
    active = activate("toyserve", switches=Switches("on", strict=True, receipts=None), store=store)

    def theirs(*args: Any) -> None: ...

    norm.forward = theirs
    with pytest.raises(bench.VerificationError, match="over ours"):
        active.close()
    assert norm.forward is theirs
    assert active.installed == []
    active.close()
