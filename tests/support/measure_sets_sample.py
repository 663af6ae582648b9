"""What test_measure_sets and others share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from patch_sample import SOURCE, evaluation

from patcher import bench
from patcher.bench import Candidate, Language
from patcher.integrate import Patch

OPS = ("fused_add_rms_norm", "rope", "moe_topk")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("bundles")
    made = []
    for name in OPS:
        candidate = Candidate(op=name, language=Language.CPP, source=SOURCE)
        right = evaluation(candidate).model_copy(update={"op": name})
        folder = root / name
        Patch.create(
            folder, bench.load_op(name), candidate, right, engine="transformers", made_by="test"
        )
        made.append(folder)
    return made


def ids(bundles: Sequence[Path], *ops: str) -> tuple[str, ...]:
    by_op = {folder.name: Patch.load(folder).manifest.id for folder in bundles}
    return tuple(sorted(by_op[op] for op in ops))
