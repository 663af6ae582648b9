"""What a failed program printed becomes one sentence and a log file."""

from __future__ import annotations

from pathlib import Path

import pytest

from patcher.bench import BusyError, PatcherError, UsageError, relayed
from patcher.bench.ab.processes import TooLateError
from patcher.bench.engines.child_errors import child_failed

TRACEBACK = b"""loading
Traceback (most recent call last):
  File "x.py", line 1, in <module>
torch.cuda.CudaError: no kernel image
The target application returned non-zero exit code 1
"""


WORKER = b"""\
(Worker-0 pid=2) ERROR 11-29 08:55:09 [x.py:953] WorkerProc failed to start.
(Worker-0 pid=2) ERROR 11-29 08:55:09 [x.py:953]     raise ValueError(
(Worker-0 pid=2) ERROR 11-29 08:55:09 [x.py:953] ValueError: too little memory
(EngineCore pid=1) ERROR 11-29 08:55:12 [core.py:15] Exception: See stack trace for root cause.
RuntimeError: Engine core initialization failed. See root cause above.
"""
LOGGED = b"(APIServer pid=1) ERROR 11-29 08:54:38 [repo.py:124] Error parsing config\nServing\n"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (TRACEBACK, "torch.cuda.CudaError: no kernel image"),
        (WORKER, "ValueError: too little memory"),
        (
            WORKER.splitlines()[-1],
            "RuntimeError: Engine core initialization failed. See root cause above.",
        ),
        (LOGGED, "Serving"),
        (b"first\nlast\n\n", "last"),
        (b"", "it printed nothing"),
        (b"\xff" + b"x" * 1000, "\ufffd" + "x" * 299),
    ],
)
def test_the_exception_is_the_sentence(
    output: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error = child_failed("the program", 1, output)
    assert error.message == f"the program failed (exit code 1): {said}"
    [log] = tmp_path.iterdir()
    assert error.hint == f"its output is in {log}"
    assert log.read_bytes() == output


def test_an_error_that_is_relayed_is_of_its_kind_and_of_no_other() -> None:
    """Two classes have no kind of their own, as one that says that loading took too long."""
    plain = PatcherError("it failed", "try again")
    for error in (plain, TooLateError("it failed"), child_failed("the program", 1, b"no")):
        again = relayed(error.as_dict())
        assert type(again) is PatcherError
        assert (again.message, again.hint) == (error.message, error.hint)
    for kind in (UsageError, BusyError):
        assert type(relayed(kind("wrong").as_dict())) is kind
