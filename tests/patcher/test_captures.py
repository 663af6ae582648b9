"""Several batches captured with patches: what is told of each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from patch_sample import LAYERS, OP, TINY, evaluation
from proof_sample import TRITON, claims, patched_profile, triton_patch

from patcher.bench import VerificationError
from patcher.captures import capture_here, ran_in
from patcher.hotspot import read
from patcher.hotspot.capture import STEPS
from patcher.hotspot.target import WARM_UP_STEPS
from patcher.integrate import Patch, pack, read_receipts

SOURCES = {info.name: candidate for info, candidate in OP.solutions()}
CPP = SOURCES["cpu_simd"]


def test_two_batches_with_a_patch_are_one_process(tmp_path: Path) -> None:
    patch = Patch.create(
        tmp_path / "norm", OP, CPP, evaluation(CPP), engine="transformers", made_by="test"
    )
    pack(patch, tmp_path / "norm.zip")
    workloads = [TINY.model_copy(update={"batch": batch}) for batch in (1, 3)]
    kept = tmp_path / "kept"
    profiles, told = capture_here(workloads, kept, [tmp_path / "norm.zip"], lambda _: None)
    assert [profile.steps for profile in profiles] == [STEPS, STEPS]
    [line] = told
    assert line.startswith(f"{patch.manifest.id} ran ")
    [receipt] = read_receipts(kept / "receipts")  # of one process
    calls = Counter[str]()
    for label, count in receipt.calls.items():
        calls[label.split()[1]] += count
    step = 2 * LAYERS
    warm = step * WARM_UP_STEPS
    assert calls == {"tokens=8": step, "tokens=1": warm, "tokens=24": step, "tokens=3": warm}
    # on a CPU ranges around modules mark the profiled steps
    assert receipt.fallbacks == {"a module has hooks": 2 * step * STEPS}


def test_a_patch_that_one_batch_does_not_take_is_told(tmp_path: Path) -> None:
    patch = triton_patch(tmp_path / "patch")
    export = patched_profile(tmp_path / "patched.sqlite", f"{TRITON}_0")
    patched = read(export, "gpt-oss-20b")
    stock = read(Path(__file__).parents[1] / "data/nsys/decode.sqlite", "gpt-oss-20b")
    receipts = [claims(patch, 10**6)]
    [at_8, at_64] = ran_in(patch, receipts, {8: patched, 64: stock}, [patch])
    assert at_8.startswith(f"batch 8: {patch.manifest.id} ran 1,000,000 times")
    assert not at_8.endswith("; 0 launches in the profiled steps")
    assert at_64.startswith("batch 64: the patch did not run in this profile")
    assert at_64.endswith("; 0 launches in the profiled steps")
    [alone] = ran_in(patch, receipts, {8: patched}, [patch])
    assert alone == at_8.removeprefix("batch 8: ")
    for profiles in ({8: stock}, {8: stock, 64: stock}):
        with pytest.raises(VerificationError, match="not run in this profile"):
            ran_in(patch, receipts, profiles, [patch])
