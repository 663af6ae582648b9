"""What test_proof and others share."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from patch_sample import OP, evaluation

from patcher.bench import Candidate, Language
from patcher.integrate import Patch, Receipt

EXPORT = Path(__file__).parents[1] / "data/nsys/decode.sqlite"

OLD = "triton_red_fused_fused_add_rms_norm"

TRITON = "quick_add_norm"
"""The patch's kernel; Triton's own code generator appends nothing to it."""

LABEL = "fused_add_rms_norm tokens=8 hidden=2880 bfloat16/float32"


def made(folder: Path, candidate: Candidate) -> Patch:
    return Patch.create(
        folder, OP, candidate, evaluation(candidate), engine="transformers", made_by="test"
    )


def triton_patch(folder: Path) -> Patch:
    source = (
        "import triton\n@triton.jit\n"
        f"def {TRITON}_0(x):\n    pass\n@triton.jit(debug=False)\ndef {TRITON}_1(x):\n    pass\n"
        "def fused_add_rms_norm(*args):\n    pass\n"
    )
    return made(folder, Candidate(op=OP.name, language=Language.TRITON, source=source))


def claims(patch: Patch, calls: int, **more: Any) -> Receipt:
    counted = {LABEL: calls} if calls else {}
    known = {"patch_id": patch.manifest.id, "digest": patch.digest, "pid": 1, "calls": counted}
    return Receipt.model_validate({**known, **more})


def renamed(path: Path, old: str, new: str) -> Path:
    with closing(sqlite3.connect(path)) as database:
        changed = database.execute(
            "UPDATE StringIds SET value = replace(value, ?, ?) WHERE value LIKE ?",
            (old, new, f"%{old}%"),
        )
        assert changed.rowcount, "the name is in the profile"
        database.commit()
    return path


def patched_profile(path: Path, new: str, old: str = OLD) -> Path:
    """decode.sqlite as if the norm's kernels had been replaced by one."""
    shutil.copy(EXPORT, path)
    for index in (0, 1):
        renamed(path, f"{old}_{index}", new)
    return path
