"""The outcomes of features in vLLM, from what their processes leave; the processes need a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from patcher.bench.lab.vllm_features import (
    ARMS,
    FEATURES,
    MODEL,
    Feature,
    cell,
    compare,
    main,
    place,
    write_model,
)

STOCK = torch.randn((64, 50), generator=torch.Generator().manual_seed(0))


def left(out: Path, name: str, **found: torch.Tensor) -> None:
    for arm in ARMS:
        place(out, name, arm).mkdir(parents=True)
        (place(out, name, arm) / "log").write_text("loading\nit broke\n", encoding="utf-8")
        if arm in found:
            torch.save(found[arm], place(out, name, arm) / "result.pt")


@pytest.mark.parametrize(
    ("error", "outcome"), [(0.9e-2, "right"), (5e-2, "wrong"), (float("nan"), "wrong")]
)
def test_logits_are_held_to_stocks_own_error(error: float, outcome: str, tmp_path: Path) -> None:
    other = torch.randn(STOCK.shape, generator=torch.Generator().manual_seed(1))
    left(tmp_path, "eager", stock=STOCK + 1e-2 * other, patched=STOCK + error, reference=STOCK)
    assert cell(tmp_path, "eager", ())["outcome"] == outcome


def test_a_reference_that_computes_something_else_tells_nothing(tmp_path: Path) -> None:
    other = torch.randn(STOCK.shape, generator=torch.Generator().manual_seed(1))
    left(tmp_path, "eager", stock=STOCK, patched=STOCK + 1e-3, reference=other)
    found = cell(tmp_path, "eager", ())
    assert found["outcome"] == "not tried"
    assert "the reference agrees with stock on" in found["why"]


def test_the_reference_computes_in_another_way_than_the_arms() -> None:
    for name, feature in FEATURES.items():
        eager = bool(feature.arguments.get("enforce_eager"))
        assert feature.reference == {"enforce_eager": not eager}, name


def test_tokens_are_compared_where_a_step_has_several_rows(tmp_path: Path) -> None:
    name = "n-gram speculation"
    tokens = torch.arange(80).reshape(8, 10)
    left(tmp_path, name, stock=tokens, patched=tokens.flip(0), reference=tokens)
    found = cell(tmp_path, name, ())
    assert found["outcome"] == "wrong"
    assert "0 % of greedy tokens agree" in found["why"]


def test_what_only_a_patched_engine_cannot_do_is_wrong(tmp_path: Path) -> None:
    left(tmp_path, "eager", stock=STOCK, reference=STOCK)
    assert cell(tmp_path, "eager", ())["outcome"] == "wrong"
    left(tmp_path, "as served")
    found = cell(tmp_path, "as served", ())
    assert (found["outcome"], found["why"]) == (
        "not tried",
        "not tried: the stock process stops: it broke",
    )


def test_what_a_version_of_vllm_does_not_have_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Feature(offered=lambda: False)
    monkeypatch.setitem(FEATURES, "sequence parallel", gone)
    assert compare(tmp_path, ["sequence parallel"], (), jobs=1) == 0
    told = json.loads((tmp_path / "features.json").read_text(encoding="utf-8"))
    assert told["sequence parallel"]["outcome"] == "not offered"
    assert not place(tmp_path, "sequence parallel", "stock").exists()


def test_what_stock_itself_gets_wrong_is_said_so(tmp_path: Path) -> None:
    name = "sleep 2, wake, reload"
    other = torch.randn(STOCK.shape, generator=torch.Generator().manual_seed(1))
    left(tmp_path, name, stock=other, patched=other + 1e-3, reference=STOCK)
    for before, outcome in ((STOCK, "stock is wrong"), (other, "not tried")):
        torch.save(before, place(tmp_path, name, "stock") / "before.pt")
        found = cell(tmp_path, name, ())
        assert found["outcome"] == outcome
        assert "patched picks what stock picks in 100.0 %" in found["why"]


def test_the_served_model_has_the_first_layers_of_the_real_one(tmp_path: Path) -> None:
    write_model(tmp_path, MODEL, on_disk=False)
    text = (tmp_path / "config.json").read_text(encoding="utf-8")
    assert '"num_hidden_layers": 2' in text
    assert '"hidden_size": 2880' in text


def test_a_feature_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["out", "--only", "sleep"])
    told = capsys.readouterr().err
    assert "no features: sleep;" in told
    assert all(name in told for name in FEATURES)
