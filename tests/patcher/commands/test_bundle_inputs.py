"""A bundle that cannot be written is refused before its kernel is built or judged."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from patch_sample import evaluation

from patcher.api.bundle import bundle as api_bundle
from patcher.bench import (
    Candidate,
    MissingError,
    PatcherError,
    UsageError,
    judge,
    load_op,
    toolchains,
)
from patcher.commands.bundle import bundle

OP = load_op("fused_add_rms_norm")
KERNEL = OP.folder / "solutions/cpu_simd/fused_add_rms_norm.cpp"


def taken(target: Path) -> Path:
    """Something that is no patch."""
    if target.suffix:
        target.write_text("mine")
    else:
        target.mkdir()
    return target


WITHOUT_VLLM = pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is here")
CASES = [
    ("new", "nope", UsageError, "no patch point in nope"),
    pytest.param("new", "vllm", MissingError, "vllm is not installed", marks=WITHOUT_VLLM),
    ("taken", "transformers", UsageError, "exists and is not a patch"),
    ("taken.zip", "transformers", UsageError, "exists and is not a patch"),
]


@pytest.mark.parametrize(("name", "engine", "kind", "said"), CASES)
def test_nothing_is_judged_or_built_for_it(
    name: str,
    engine: str,
    kind: type[PatcherError],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judge, "evaluate", lambda *_: pytest.fail("it was judged"))
    monkeypatch.setattr(toolchains, "build", lambda *_: pytest.fail("it was built"))
    target = tmp_path / name
    if name != "new":
        taken(target)
    with pytest.raises(kind, match=said):
        bundle(OP.name, KERNEL, target, engine=engine)
    verdict = evaluation(Candidate.from_file(OP.name, KERNEL))
    with pytest.raises(kind, match=said):
        api_bundle(verdict, KERNEL, target, engine=engine)
