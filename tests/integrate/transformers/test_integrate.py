"""Patch bundles and the transformers patch point, on a real gpt-oss-tiny."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_matrix import feature
from patch_sample import (
    CANDIDATE,
    LAYERS,
    OP,
    SOURCE,
    TINY,
    add_norm_guards,
    evaluation,
    kernel,
    make_patch,
    state,
)

import patcher.integrate.patch
from patcher import bench
from patcher.bench import Candidate, Language, Outcome
from patcher.bench.engines import Engine, open_engine
from patcher.integrate import CallCounters, Patch, Receipt, Store, prepare
from patcher.integrate.counts import CallSignature
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(TINY)


@pytest.fixture
def patch(tmp_path: Path) -> Patch:
    return make_patch(tmp_path / "patch")


def test_a_bundle_reads_back_as_it_was_written(patch: Patch) -> None:
    again = Patch.load(patch.folder)
    assert again.manifest == patch.manifest
    assert again.digest == patch.digest
    assert again.candidate() == CANDIDATE
    assert again.contract == OP.contract
    again.verify_target()


def test_only_a_correct_candidate_becomes_a_patch(tmp_path: Path) -> None:
    for wrong in (
        evaluation(outcome=Outcome.MISMATCH),
        evaluation(CANDIDATE.model_copy(update={"source": "other"})),
    ):
        with pytest.raises(bench.UsageError, match="judged correct"):
            Patch.create(
                tmp_path / "p", OP, CANDIDATE, wrong, engine="transformers", made_by="test"
            )


def spoil_source(folder: Path) -> None:
    file = next((folder / "sources").iterdir())
    file.write_text(file.read_text() + " ")


def spoil_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"guards"', '"gards"'))


def add_file(folder: Path) -> None:
    (folder / "sources" / "more.py").write_text("import os")


def remove_source(folder: Path) -> None:
    next((folder / "sources").iterdir()).unlink()


def link_source(folder: Path) -> None:
    file = next((folder / "sources").iterdir())
    moved = file.rename(folder.parent / "elsewhere")
    file.symlink_to(moved)


def escape(folder: Path) -> None:
    edit(folder, files={"../../etc/passwd": "0" * 64})


def link_folder(folder: Path) -> None:
    moved = (folder / "sources").rename(folder.parent / "elsewhere")
    (folder / "sources").symlink_to(moved, target_is_directory=True)


def add_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def newer_schema(folder: Path) -> None:
    edit(folder, schema_version=3)


def wrong_evidence(folder: Path) -> None:
    evidence = json.loads((folder / "manifest.json").read_text())["evidence"]
    edit(folder, evidence=evidence | {"outcome": "too_slow"})


def no_source(folder: Path) -> None:
    edit(folder, files={})


SPOILS = [
    *(spoil_source, spoil_manifest, add_file, add_pipe, remove_source, link_source, link_folder),
    *(escape, newer_schema, wrong_evidence, no_source),
]


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_spoilt_bundle_is_refused(patch: Patch, spoil: Callable[[Path], None]) -> None:
    spoil(patch.folder)
    with pytest.raises(bench.VerificationError):
        Patch.load(patch.folder)


def test_a_patch_cannot_name_a_folder_outside_the_store(patch: Patch, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.apply(patch.folder)
    kept = tmp_path / "kept" / "file"
    kept.parent.mkdir()
    kept.write_text("x")
    for name in (str(kept.parent), "../../kept", "..", ""):
        edit(patch.folder, id=name)
        with pytest.raises(bench.VerificationError):
            store.apply(patch.folder)
    assert kept.read_text() == "x"


@feature("another version, changed code", "refused", "gpt_oss.decoder_layer")
def test_another_version_or_other_code_is_refused(
    patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patcher.integrate.patch, "engine_version", lambda engine: "4.57.0")
    with pytest.raises(bench.VerificationError, match=r"4\.57\.0 is installed"):
        patch.verify_target()
    monkeypatch.undo()
    from transformers.models.gpt_oss import modeling_gpt_oss

    class GptOssRMSNorm(modeling_gpt_oss.GptOssRMSNorm):
        """A release that changed the norm."""

    monkeypatch.setattr(modeling_gpt_oss, "GptOssRMSNorm", GptOssRMSNorm)
    with pytest.raises(bench.VerificationError, match="differs from that of"):
        patch.verify_target()


def test_patched_output_is_close_and_revert_is_bit_identical(engine: Engine, patch: Patch) -> None:
    prompts = engine.prompts(1)
    tokens, logits = engine.generate(prompts, 4).tokens, engine.logits(prompts)
    clean = state(engine.model)
    book = CallCounters("id", "digest")
    with prepare(engine.model, patch, kernel=kernel, book=book):
        assert state(engine.model) != clean
        patched = engine.logits(prompts)
        engine.generate(prompts, 4)
    assert torch.allclose(patched, logits, atol=1e-5)
    assert state(engine.model) == clean
    assert torch.equal(engine.generate(prompts, 4).tokens, tokens)
    assert torch.equal(engine.logits(prompts), logits)
    receipt = Receipt.of(book)
    # two a layer and forward: 4 decode steps of 2 tokens; prefill and the logits of 2 x 8 tokens
    assert receipt.calls == {
        "fused_add_rms_norm tokens=2 hidden=256 float32": 4 * 2 * LAYERS,
        "fused_add_rms_norm tokens=16 hidden=256 float32": 2 * 2 * LAYERS,
    }
    assert receipt.fallbacks == {}


def test_it_is_taken_out_after_an_exception_too(engine: Engine, patch: Patch) -> None:
    clean = state(engine.model)

    def broken(*args: Any) -> None:
        raise RuntimeError("device lost")

    with (
        pytest.raises(RuntimeError, match="device lost"),
        prepare(engine.model, patch, kernel=broken),
    ):
        engine.logits(engine.prompts(1))
    assert state(engine.model) == clean


def test_it_cannot_be_installed_twice(engine: Engine, patch: Patch) -> None:
    installed = prepare(engine.model, patch, kernel=kernel)
    with installed, pytest.raises(bench.UsageError, match="already installed"):
        installed.install()
    installed.remove()
    with installed, pytest.raises(bench.VerificationError, match="already patched"):
        prepare(engine.model, patch, kernel=kernel).install()


def test_another_model_is_refused(patch: Patch) -> None:
    with pytest.raises(bench.VerificationError, match="no gpt-oss decoder layers"):
        prepare(torch.nn.Linear(2, 2), patch, kernel=kernel)


@feature("`output_hidden_states`", "falls back", "gpt_oss.decoder_layer")
def test_recorded_hidden_states_are_what_they_were(engine: Engine, patch: Patch) -> None:
    prompts = engine.prompts(2)
    with torch.inference_mode():
        before = engine.model(prompts, output_hidden_states=True).hidden_states
        with prepare(engine.model, patch, kernel=kernel) as book:
            after = engine.model(prompts, output_hidden_states=True).hidden_states
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert book.fallbacks == {"hidden states are being recorded": 2 * LAYERS}
    assert not book.calls


def test_a_callers_tensor_is_not_written_to(engine: Engine, patch: Patch) -> None:
    body: Any = engine.model
    with torch.inference_mode(), prepare(engine.model, patch, kernel=kernel) as book:
        embedded = body.get_input_embeddings()(engine.prompts(3))
        kept = embedded.clone()
        body(inputs_embeds=embedded)
    assert torch.equal(embedded, kept)
    assert book.calls


@feature("hooks, gradients", "falls back", "gpt_oss.decoder_layer")
def test_foreign_hooks_and_gradients_fall_back(engine: Engine, patch: Patch) -> None:
    body: Any = engine.model
    seen: list[torch.Tensor] = []
    handle = body.model.layers[0].register_forward_hook(lambda m, a, out: seen.append(out))
    try:
        with torch.inference_mode():
            body(engine.prompts(1))
            with prepare(engine.model, patch, kernel=kernel) as book:
                body(engine.prompts(1))
    finally:
        handle.remove()
    assert torch.equal(seen[0], seen[1])
    assert book.fallbacks == {"a module has hooks": 2}
    with prepare(engine.model, patch, kernel=kernel) as book:
        body(engine.prompts(1))
    assert book.fallbacks == {"gradients are on": 2 * LAYERS}


def test_unsupported_dtype_runs_the_original(patch: Patch) -> None:
    wide = open_engine(TINY)
    wide.model.to(torch.float64)
    body: Any = wide.model
    body.config._experts_implementation = "eager"  # grouped_mm has no float64
    before = wide.logits(wide.prompts(1))
    with prepare(wide.model, patch, kernel=kernel) as book:
        after = wide.logits(wide.prompts(1))
    assert torch.equal(before, after)
    assert not book.calls
    assert set(book.fallbacks) == {"dtype float64/float64"}


def dispatcher(run: Callable[..., object], strict: bool = True) -> Dispatcher:
    guards = add_norm_guards({"hidden": AxisBounds(maximum=64, multiple_of=8)})
    return Dispatcher("op", run, guards, CallCounters("id", "digest"), strict=strict)


@pytest.mark.parametrize(
    ("hidden", "reason"), [(12, "hidden no multiple of 8"), (128, "hidden above 64")]
)
def test_guards_hold_shapes(hidden: int, reason: str) -> None:
    dispatch = dispatcher(kernel)
    with torch.inference_mode():
        tensors = torch.ones(2, hidden), torch.ones(2, hidden), torch.ones(hidden)
        assert not dispatch(*tensors, 1e-5)
        strided = torch.ones(8, 2).t(), torch.ones(2, 8), torch.ones(8)
        assert not dispatch(*strided, 1e-5)
    assert dispatch.book.fallbacks == {reason: 1, "not contiguous": 1}
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_a_broken_kernel_raises_when_measuring_and_falls_back_when_serving() -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no")

    tensors = torch.ones(2, 8), torch.ones(2, 8), torch.ones(8)
    with torch.inference_mode():
        with pytest.raises(RuntimeError):
            dispatcher(broken)(*tensors, 1e-5)
        serving = dispatcher(broken, strict=False)
        assert [serving(*tensors, 1e-5) for _ in range(3)] == [False] * 3
    assert serving.book.fallbacks == {"the patched kernel raised RuntimeError": 3}


def test_receipts_are_read_as_written(tmp_path: Path) -> None:
    book = CallCounters("id", "digest")
    book.cases.append(CallSignature("a", None, calls=3))
    receipt = Receipt.of(book)
    receipt.write(tmp_path / "receipt.json")
    assert Receipt.read(tmp_path / "receipt.json") == receipt
    assert receipt.total_calls == 3
    with pytest.raises(bench.VerificationError):
        Receipt.read(tmp_path / "nothing.json")


def test_the_store_applies_once_a_point_and_reverts(
    engine: Engine, patch: Patch, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    assert store.applied() == ()
    entry = store.apply(patch.folder)
    assert store.applied() == (entry,)
    store.apply(patch.folder)
    assert store.applied() == (entry,)
    other = Candidate(op=OP.name, language=Language.CPP, source=SOURCE + "//")
    second = Patch.create(
        tmp_path / "second",
        OP,
        other,
        evaluation(other),
        engine="transformers",
        made_by="test",
    )
    with pytest.raises(bench.UsageError, match="is already applied to"):
        store.apply(second.folder)
    assert store.revert(entry.id)
    assert not store.revert(entry.id)
    assert store.applied() == ()
    (tmp_path / "store" / ".lock").unlink()
    (tmp_path / "store" / ".lock").mkdir()  # nothing can be written there
    with pytest.raises(bench.UsageError, match="cannot write"):
        store.apply(patch.folder)
    assert store.applied() == ()
    (tmp_path / "store" / "applied.json").write_text("{")
    with pytest.raises(bench.VerificationError, match="damaged"):
        store.applied()
