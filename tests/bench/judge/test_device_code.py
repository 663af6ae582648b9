"""Which calls are carried over to a process without host code, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patcher.bench.errors import BusyError, MissingError
from patcher.bench.judge import device_code
from patcher.bench.judge.blob import Bytes, Wanted, layout
from patcher.bench.judge.device_code import DeviceCode
from patcher.bench.judge.evaluation import Evaluation, Grade, Outcome
from patcher.bench.judge.zygote import Limits, RunnerFailure
from patcher.bench.ops.contract import Point

HANDED = {"document": [3, 4], "sets": [1 << 45, 64], "notes": []}
POINT = Point(axes={"tokens": 8}, dtypes={"x": "float32"})


class Process:
    """A runner that answers what it was told to, and keeps what it was asked."""

    started: list[Process]

    def __init__(self, *_: Any, trusted: bool = False, **answers: Any) -> None:
        self.answers, self.asked, self.closed = answers, [], False
        self.sent: Bytes | None = None

    def start(self) -> None:
        self.started.append(self)
        if failure := self.answers.get("start"):
            raise failure

    def command(self, do: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        self.asked.append((do, arguments))
        answer = self.answers.get(do, {})
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    def handed(self, size: int) -> Bytes:
        return torch.arange(size).to(torch.uint8)

    def send(self, data: Bytes) -> None:
        self.sent = data

    def close(self) -> None:
        self.closed = True


class Stock:
    def lend(self, runner: Process) -> None:
        runner.asked.append(("stock", {}))


class Sets:
    plan = layout([Wanted(name="x", dtype="float32", shape=(4,))])
    cases = (1, 2)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answers of the judge's own process."""
    answers: dict[str, Any] = {}
    Process.started = []
    monkeypatch.setattr(device_code, "Runner", lambda *_, **__: Process(**{"stock": {}, **answers}))
    return answers


def _take(apart: DeviceCode) -> bool:
    sets: Any = Sets()
    stock: Any = Stock()
    return apart.take(sets, stock, POINT, 5)


def _apart(**answers: Any) -> DeviceCode:
    zygote: Any = None
    candidate: Any = Process(**answers)
    return DeviceCode(zygote, Limits(), candidate)


def test_calls_are_carried_over(ours: dict[str, Any]) -> None:
    with _apart(handover=HANDED) as apart:
        assert _take(apart)
        assert (apart.carried, apart.complete) == (True, True)
        mine: Any = apart.runner
        assert [do for do, _ in mine.asked] == ["profiler", "stock", "adopt"]
        told = mine.asked[-1][1]
        assert told["document"] == [3, 4]
        assert told["buffers"] == [1 << 45, 64]
        assert told["sets"] == 2
        assert told["plan"] == Sets.plan.model_dump()
        assert mine.sent.tolist() == list(range(7))
        assert (apart.grade, apart.reason) == (Grade.DEVICE_CODE, "")
        assert "none of its host code" in apart.said
    assert mine.closed


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            {"reason": "a call has a function on the host"},
            "tokens=8 float32: a call has a function",
        ),
        ({"document": [3, -4], "sets": [1, 2], "notes": []}, "names no place"),
        ({"document": [3, True], "sets": [1, 2], "notes": []}, "names no place"),
        ({"document": [1 << 40, 5], "sets": [1, 2], "notes": []}, "too many bytes"),
        ({"document": "ab", "sets": [1, 2], "notes": []}, "names no place"),
        ({"document": [3, 4]}, "cannot be built again"),
        ({"document": None, "sets": [1, 2], "notes": []}, "cannot be built again"),
        (RunnerFailure("CudaError: it went wrong", fatal=False), "it went wrong"),
        ({"reason": "\udcff" * 5000}, "tokens=8 float32: ???"),
    ],
)
def test_what_is_not_carried_is_said(ours: dict[str, Any], answer: Any, said: str) -> None:
    with _apart(handover=answer) as apart:
        assert not _take(apart)
        assert not apart.carried
        assert apart.grade is Grade.OWN_PROCESS
        assert said in apart.reason
        assert "lower grade" in apart.said
        apart.reason.encode()


def test_a_candidate_that_ends_is_no_matter_of_grades(ours: dict[str, Any]) -> None:
    with _apart(handover=RunnerFailure("crashed")) as apart, pytest.raises(RunnerFailure):
        _take(apart)


def test_a_process_that_failed_is_replaced(ours: dict[str, Any]) -> None:
    with _apart(handover=HANDED) as apart:
        first: Any = apart.runner
        first.answers["adopt"] = RunnerFailure("addresses are taken in this process", fatal=False)
        assert not _take(apart)
        assert first.closed
        assert _take(apart)
        assert apart.runner is not first
        assert apart.grade is Grade.OWN_PROCESS  # at one point it was not
        assert "addresses are taken" in apart.reason
        apart.refuse(POINT, "a kernel failed")
        assert apart.reason.endswith("; tokens=8 float32: a kernel failed")


def test_a_machine_that_cannot_start_a_second_process_goes_on(ours: dict[str, Any]) -> None:
    ours["start"] = MissingError("the GPU's memory is full", "free it")
    with _apart(handover=HANDED) as apart:
        assert not _take(apart)
        assert "the GPU's memory is full" in apart.reason


def test_an_evaluation_tells_its_grade() -> None:
    one = Evaluation(op="x", language="cuda", digest="0", outcome=Outcome.RUNTIME_ERROR)
    assert one.lower_grade == ""
    assert one.model_copy(update={"grade": Grade.DEVICE_CODE}).lower_grade == ""
    low = one.model_copy(update={"grade": Grade.OWN_PROCESS})
    assert low.lower_grade == "judged in its own process, a lower grade than device code alone"
    assert Evaluation.model_validate_json(low.model_dump_json()).grade is Grade.OWN_PROCESS


def test_what_keeps_the_gpu_busy_is_the_candidates(ours: dict[str, Any]) -> None:
    left = _busy(ours, until_killed=True)
    assert left == "left work on the GPU that ran on while the baseline was to be timed"
    assert _busy(ours, until_killed=False, slow_us=29.0) is None
    with pytest.raises(BusyError, match="another program"):
        _busy(ours, until_killed=False)


def _busy(ours: dict[str, Any], until_killed: bool, slow_us: float = 31.0) -> str | None:
    candidate, baseline = Process(), Process()

    def idle(*_: Any, **__: Any) -> dict[str, Any]:
        slow = not (until_killed and candidate.closed)
        return {"times_ns": [1e3 * slow_us if slow else 1e4] * 3}

    candidate.kill = candidate.close  # type: ignore[attr-defined]
    baseline.command = idle  # type: ignore[method-assign]
    zygote: Any = None
    there: Any = candidate
    apart = DeviceCode(zygote, Limits(), there, idle_us=10.0)
    trusted: Any = baseline
    return apart.left_behind(trusted)
