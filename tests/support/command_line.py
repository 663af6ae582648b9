"""What test_cli and others share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def patcher(
    *words: str, cwd: Path, env: dict[str, str] | None = None, limit_s: float = 300
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "patcher", *words],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )


def error_of(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert "Traceback" not in result.stderr
    found: dict[str, Any] = json.loads(result.stdout)["error"]
    return found
