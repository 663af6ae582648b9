"""What every test shares: no test touches what this user's own runs learned or applied."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest

# Before torch is imported: what runs side by side shares the cores, and what it starts does so too.
_BESIDE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // _BESIDE, 1)))


@pytest.fixture(autouse=True, scope="session")
def _a_home_of_their_own() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patched:
        if "PATCHER_HOME" not in os.environ:
            patched.setenv("PATCHER_HOME", home)
        yield


@pytest.fixture(autouse=True, scope="session")
def _children_hear_signals() -> None:
    """What a shell starts in the background ignores SIGINT, what `nohup` starts SIGHUP, and so
    would all that the tests start.
    """
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """A session collects garbage before every pair; what all tests loaded is not looked through."""
    gc.freeze()
    yield
    gc.unfreeze()
