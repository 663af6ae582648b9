"""What the environment switches on, in this process and in one that is started anew."""

from __future__ import annotations

import logging
import pwd
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_matrix import ANY, feature
from patch_sample import LAYERS, OP, TINY, evaluation, state

from patcher import bench
from patcher.bench import Candidate, Language
from patcher.bench.engines import Engine, open_engine
from patcher.integrate import Patch, Store, Switches, activate, home_store, read_receipts
from patcher.integrate.transformers.points import GptOssDecoderLayers

SOURCE = """
import torch
def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    input.copy_(weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)))
"""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(TINY)


def made(folder: Path, source: str = SOURCE) -> Patch:
    candidate = Candidate(op=OP.name, language=Language.TORCH, source=source)
    return Patch.create(
        folder, OP, candidate, evaluation(candidate), engine="transformers", made_by="test"
    )


def test_nothing_happens_unless_it_is_switched_on(engine: Engine, store: Store) -> None:
    store.apply(made(store.root.parent / "patch").folder)
    clean = state(engine.model)
    assert activate("transformers", engine.model).installed == []
    assert state(engine.model) == clean


@pytest.mark.parametrize("prefix", ["PATCHER", "TLLM_PATCHER"])
def test_what_is_on_runs_counts_and_goes(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    entry = store.apply(made(store.root.parent / "patch").folder)
    folder = store.root.parent / "receipts"
    monkeypatch.setenv(f"{prefix}_PATCHES", entry.id)
    monkeypatch.setenv(f"{prefix}_RECEIPTS", str(folder))
    clean, prompts = state(engine.model), engine.prompts(1)
    before = engine.generate(prompts, 2).tokens
    with activate("transformers", engine.model) as active:
        assert active.digests == entry.digest
        engine.generate(prompts, 2)
    assert state(engine.model) == clean
    assert torch.equal(engine.generate(prompts, 2).tokens, before)
    [receipt] = read_receipts(folder)
    assert receipt.total_calls == 3 * 2 * LAYERS
    assert receipt.point == "transformers:gpt_oss.decoder_layer"
    with activate("vllm") as active:  # the patch is of another engine
        assert active.installed == []


def broken_source(store: Store) -> None:
    store.apply(made(store.root.parent / "broken", "def fused_add_rms_norm(:").folder)


def changed_after(store: Store) -> None:
    entry = store.apply(made(store.root.parent / "patch").folder)
    file = next((store.root / "patches" / entry.id / "sources").iterdir())
    file.write_text(file.read_text() + " ")


def damaged_list(store: Store) -> None:
    store.apply(made(store.root.parent / "patch").folder)
    (store.root / "applied.json").write_text("{")


@pytest.mark.parametrize("spoil", [broken_source, changed_after, damaged_list])
def test_in_serving_what_fails_is_told_once_and_harms_nothing(
    engine: Engine,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Any,
) -> None:
    spoil(store)
    monkeypatch.setenv("PATCHER_PATCHES", "on")
    clean, prompts = state(engine.model), engine.prompts(1)
    before = engine.generate(prompts, 2).tokens
    with caplog.at_level(logging.ERROR, "patcher"):
        active = activate("transformers", engine.model)
    assert len(caplog.records) == 1
    assert "the engine's own" in caplog.text
    assert active.installed == []
    assert state(engine.model) == clean
    assert torch.equal(engine.generate(prompts, 2).tokens, before)
    monkeypatch.setenv("PATCHER_STRICT", "1")
    with pytest.raises(bench.VerificationError):
        activate("transformers", engine.model)
    assert state(engine.model) == clean


def test_one_damaged_patch_leaves_the_others_in(engine: Engine, store: Store) -> None:
    changed_after(store)
    [entry] = store.applied()
    second = made(store.root.parent / "second", f"{SOURCE}#")
    shutil.copytree(second.folder, store.root / "patches" / second.manifest.id)
    known = {"id": second.manifest.id, "digest": second.digest, "point": "elsewhere"}
    both = (entry, entry.model_copy(update=known))
    store._write(store._index().model_copy(update={"applied": both}))
    folder = store.root.parent / "receipts"
    switches = Switches("on", strict=False, receipts=folder)
    with activate("transformers", engine.model, switches=switches) as active:
        assert len(active.installed) == 1
    told = {receipt.point: receipt.failure for receipt in read_receipts(folder)}
    assert told["transformers:elsewhere"] is None
    assert "was changed after" in (told["transformers:gpt_oss.decoder_layer"] or "")


def test_what_nobody_foresaw_harms_no_request(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter that breaks midway: as when an engine changed beyond its fingerprint."""
    store.apply(made(store.root.parent / "patch").folder)
    install = GptOssDecoderLayers.install

    def midway(point: Any, kernel: Any) -> None:
        install(point, kernel)
        raise AttributeError("no such layer")

    monkeypatch.setattr(GptOssDecoderLayers, "install", midway)
    clean = state(engine.model)
    folder = store.root.parent / "receipts"
    active = activate("transformers", engine.model, switches=Switches("on", False, folder))
    active.close()
    assert state(engine.model) == clean
    [receipt] = read_receipts(folder)
    assert receipt.failure == "AttributeError: no such layer"
    with pytest.raises(AttributeError):
        activate("transformers", engine.model, switches=Switches("on", True, None))
    assert state(engine.model) == clean


def test_a_refused_patch_has_a_receipt_that_says_why(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_source(store)
    folder = store.root.parent / "receipts"
    with activate(
        "transformers", engine.model, switches=Switches("on", strict=False, receipts=folder)
    ) as active:
        assert len(active.failures) == 1
    [receipt] = read_receipts(folder)
    assert receipt.failure
    assert "does not build on this machine" in receipt.failure
    assert receipt.total_calls == 0


@feature("a tensor parallel size without a verdict", "refused", ANY)
def test_a_tensor_parallel_size_that_was_not_foreseen_is_refused(
    engine: Engine, store: Store
) -> None:
    patch = made(store.root.parent / "patch")
    guards = patch.manifest.guards.model_copy(update={"tensor_parallel": (2, 4)})
    manifest = patch.manifest.model_copy(update={"guards": guards})
    (patch.folder / "manifest.json").write_text(manifest.model_dump_json())
    store.apply(patch.folder)
    strict = Switches("on", strict=True, receipts=None)
    with pytest.raises(bench.VerificationError, match="size of 2, 4, not 1"):
        activate("transformers", engine.model, switches=strict)
    with activate("transformers", engine.model, switches=strict, tensor_parallel=4) as active:
        assert len(active.installed) == 1


def test_an_id_that_is_not_applied_is_named(store: Store) -> None:
    with pytest.raises(bench.UsageError, match="names nothing-such"):
        activate("vllm", switches=Switches("nothing-such", strict=True, receipts=None))


def test_receipts_that_cannot_be_written_are_told(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    file = store.root.parent / "file"
    file.touch()
    for strict in (False, True):
        switches = Switches("on", strict=strict, receipts=file / "receipts")
        if strict:
            with pytest.raises(bench.UsageError, match="cannot write receipts"):
                activate("vllm", switches=switches)
        else:
            activate("vllm", switches=switches)
            assert "cannot write receipts" in caplog.text


def home_is_missing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> Any:
        raise KeyError("uid not found")

    monkeypatch.delenv("PATCHER_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def list_is_unreadable(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    (store.root / "applied.json").mkdir(parents=True)  # root may read any file


def home_is_too_long(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHER_HOME", f"/{'long' * 100}")


@feature("a store of patches that cannot be read", "refused", ANY)
@pytest.mark.parametrize("spoil", [home_is_missing, list_is_unreadable, home_is_too_long])
def test_a_store_that_cannot_be_read_stops_no_engine(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spoil: Any
) -> None:
    spoil(store, monkeypatch)
    monkeypatch.setenv("PATCHER_PATCHES", "on")
    assert activate("transformers").installed == []
    assert [bool(record.exc_info) for record in caplog.records] == [False], "in words"
    assert "no patch is installed" in caplog.text
    monkeypatch.setenv("PATCHER_STRICT", "1")
    with pytest.raises(bench.UsageError):
        activate("transformers")


@feature("`PATCHER_PATCHES=on` where none is applied", "refused", ANY)
@pytest.mark.parametrize("names", ["on", " on,", ","])
def test_switches_that_switch_nothing_on_are_told(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, names: str
) -> None:
    monkeypatch.setenv("PATCHER_PATCHES", names)
    assert activate("transformers").installed == []
    assert f"none for transformers is applied in {store.root}" in caplog.text


def test_switches_are_read_as_people_write_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.apply(made(store.root.parent / "patch").folder)
    monkeypatch.setenv("HOME", str(store.root.parent))
    monkeypatch.setenv("PATCHER_HOME", f"~/{store.root.name}")
    monkeypatch.setenv("PATCHER_RECEIPTS", "~/receipts")
    monkeypatch.setenv("PATCHER_PATCHES", "on, ")
    for word, strict in {"1": True, "true": True, "0": False, "False": False, "off": False}.items():
        monkeypatch.setenv("PATCHER_STRICT", word)
        switches = Switches.read()
        assert switches.strict is strict, word
        assert switches.receipts == store.root.parent / "receipts"
        assert len(switches.chosen("transformers", home_store())) == 1
