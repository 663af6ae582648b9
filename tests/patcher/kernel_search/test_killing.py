"""`killing.py`: SIGKILL at every boundary of the agent loop, and at a sample of the whole path's.

All of the whole path's: `python tests/support/killing.py --story whole` (half a minute).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KILLING = Path(__file__).parents[2] / "support" / "killing.py"
EFFECT = r"(ask-\w+|evaluate|profile|measure)"
LOST = re.compile(
    rf"before the end of \S*{EFFECT}|before open \S*{EFFECT}\.json\.tmp"
    rf"|(before|half of) write \S*{EFFECT}\.json\.tmp"
)
"""Where an effect has happened and its reply is not on the disk yet: nothing else, and nothing that
takes time, lies between a reply and its file."""


def killed(*options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(KILLING), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["failed"] == []
    assert done.returncode == 0
    assert [name for name in found["lost_at"] if not LOST.fullmatch(name)] == []
    return found


@pytest.mark.slow
def test_killed_at_any_boundary_the_loop_ends_as_if_it_had_not_been() -> None:
    found = killed("--twice", "30")
    assert found["trials"] == found["boundaries"] + 30 > 200
    # a round's decision, two agents' questions, verdicts: four boundaries each where one is lost
    assert len(found["lost_at"]) == 4 * 7


@pytest.mark.slow
def test_killed_on_the_whole_path_it_ends_as_if_it_had_not_been() -> None:
    found = killed("--story", "whole", "--sample", "40", "--twice", "5", "--seed", "1")
    assert found["boundaries"] > 200
