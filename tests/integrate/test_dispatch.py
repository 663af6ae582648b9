"""Dispatch beyond one call: the torch operator, graphs, warming, receipts of a process."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_sample import (
    Graph,
    made,
    tensors,
)
from feature_matrix import ANY, feature
from patch_sample import add_norm_guards, kernel

from patcher.integrate import CallCounters, Receipt, cost, read_receipts
from patcher.integrate.counts import GraphWatch
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import CallGuards, TensorGuard
from patcher.integrate.receipts import ReceiptWriter

CALL = "op tokens=2 hidden=8 float32"


@torch.inference_mode()
def test_what_a_graph_holds_counts_once_for_each_replay() -> None:
    dispatch = made()
    own = dict(vars(Graph))
    with GraphWatch([dispatch.book], Graph) as watch:
        dispatch(*tensors(), 1e-5)
        graph, other = Graph(), Graph()
        graph.capture_begin(pool=3)
        assert watch.capturing
        for _ in range(3):
            dispatch(*tensors(), 1e-5)
        dispatch(*tensors(hidden=12), 1e-5)
        graph.capture_end()
        assert not watch.capturing
        other.capture_begin()
        dispatch(*tensors(4), 1e-5)
        other.capture_end()
        assert dispatch.book.calls == {CALL: 1}, "what was recorded did not run"
        assert not dispatch.book.fallbacks
        for _ in range(5):
            graph.replay()
        other.replay()
        dispatch(*tensors(), 1e-5)
    graph.replay()  # unwatched
    assert (graph.pool, graph.ended, graph.replayed, other.replayed) == (3, 1, 6, 1)
    assert dispatch.book.eager == {CALL: 2}
    assert dispatch.book.replayed == {CALL: 15, CALL.replace("tokens=2", "tokens=4"): 1}
    assert dispatch.book.calls == dispatch.book.eager + dispatch.book.replayed
    assert dispatch.book.fallbacks == {"hidden no multiple of 8": 5}
    assert dict(vars(Graph)) == own


@feature("two activations of one process", "right", ANY)
@torch.inference_mode()
@pytest.mark.parametrize("out", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_watches_of_several_activations_come_and_go_in_any_order(out: tuple[int, ...]) -> None:
    own = dict(vars(Graph))
    dispatches = [made() for _ in range(3)]
    watches = [GraphWatch([dispatch.book], Graph) for dispatch in dispatches]
    for watch in watches:
        watch.install()
        watch.install()
    gone: list[int] = []
    for next_out in out:
        graph, counted = Graph(), [dispatch.book.calls.total() for dispatch in dispatches]
        graph.capture_begin()
        for number, (watch, dispatch) in enumerate(zip(watches, dispatches, strict=True)):
            assert watch.capturing == (number not in gone)
            if number not in gone:
                dispatch(*tensors(), 1e-5)
        graph.capture_end()
        assert not any(watch.capturing for watch in watches)
        for _ in range(4):
            graph.replay()
        found = [dispatch.book.calls.total() for dispatch in dispatches]
        assert [now - then for now, then in zip(found, counted, strict=True)] == [
            0 if number in gone else 4 for number in range(3)
        ]
        watches[next_out].remove()
        watches[next_out].remove()
        gone.append(next_out)
    assert dict(vars(Graph)) == own


def test_what_others_put_over_a_watch_stays_when_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Graph.replay
    first = GraphWatch([], Graph)
    first.install()
    ours = Graph.replay

    def theirs(graph: Graph) -> None:
        ours(graph)

    monkeypatch.setattr(Graph, "replay", theirs)
    first.remove()
    assert Graph.replay is theirs
    book = CallCounters("id", "digest")
    with GraphWatch([book], Graph):  # over what is left
        graph = Graph()
        graph.capture_begin()
        book.reasons["why"] += 1
        graph.capture_end()
        graph.replay()
    assert book.fallbacks == {"why": 1}
    assert graph.replayed == 1
    assert Graph.replay is theirs
    Graph.replay = own  # type: ignore[method-assign]


@torch.inference_mode()
def test_a_counter_that_a_patch_point_keeps_counts_after_a_recording() -> None:
    dispatch = made(watch := GraphWatch([], Graph), strict=False)
    watch.add(dispatch.book)
    kept = dispatch.book.reasons
    kept["before"] += 1
    dispatch.warm(*tensors(4), 1e-5)
    with watch:
        graph = Graph()
        graph.capture_begin()
        kept["why"] += 1
        graph.capture_end()
        assert dispatch.book.fallbacks == {"before": 1}
        graph.replay()
        graph.replay()
        kept["why"] += 1
    assert dispatch.book.fallbacks == {"before": 1, "why": 3}


@torch.inference_mode()
def test_nothing_unproven_runs_while_a_graph_is_recorded() -> None:
    dispatch = made(watch := GraphWatch([], Graph), strict=False)
    watch.add(dispatch.book)
    dispatch.warm(*tensors(4), 1e-5)
    assert not dispatch.book.calls
    assert not dispatch.book.fallbacks
    with watch:
        graph = Graph()
        graph.capture_begin()
        ran = [dispatch(*tensors(tokens), 1e-5) for tokens in (2, 4)]
        graph.capture_end()
        graph.replay()
    assert ran == [False, True]
    assert dispatch.book.fallbacks == {"not warmed before the graph was recorded": 1}
    assert dispatch.book.calls == {CALL.replace("tokens=2", "tokens=4"): 1}


@torch.inference_mode()
def test_a_kernel_that_is_not_safe_in_graphs_is_not_recorded() -> None:
    base = add_norm_guards()
    guards = CallGuards(base.device, base.tensors, base.scalars, base.dtypes, graph_safe=False)
    with GraphWatch([], Graph) as watch:
        dispatch = Dispatcher("op", kernel, guards, CallCounters("id", "d"), watch=watch)
        assert dispatch(*tensors(), 1e-5)
        graph = Graph()
        graph.capture_begin()
        assert not dispatch(*tensors(), 1e-5)
        graph.capture_end()


def test_warming_what_the_guards_refuse_is_loud() -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match="no multiple of 8"):
        made().warm(*tensors(hidden=12), 1e-5)


@torch.inference_mode()
def test_misaligned_and_strided_calls_are_told_apart() -> None:
    rows = ("tokens", "hidden")
    guards = CallGuards(
        device="cpu",
        tensors=(
            TensorGuard("x", rows, "T", mutated=True, layout="rows", alignment=16),
            TensorGuard("n", ("tokens",), "I", mutated=False),
        ),
        scalars=(("k", int),),
        dtypes=({"T": torch.float32, "I": torch.int32},),
    )
    dispatch = Dispatcher("op", lambda x, n, k: x.add_(k), guards, CallCounters("id", "d"))
    wide, n = torch.zeros(4, 32), torch.zeros(4, dtype=torch.int32)
    assert dispatch(wide[:, :8], n, 1)
    assert not dispatch(wide[:, 1:9], n, 1)
    assert not dispatch(wide[:, ::4], n, 1)
    assert not dispatch(wide[:, :8], n.long(), 1)
    assert not dispatch(wide[:, :8], n[:3], 1)
    assert dispatch.book.fallbacks == {
        "not aligned": 1,
        "not contiguous": 1,
        "dtype float32/int64": 1,
        "shapes that do not fit together": 1,
    }
    assert torch.equal(wide, torch.cat([torch.ones(4, 8), torch.zeros(4, 24)], 1))


def offset(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, 4 bytes behind an aligned address."""
    wide = torch.ones(tensor.numel() + 1)
    return wide[1:].view(tensor.shape)


UNLIKE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "dtype": (lambda tensor: tensor.double(), "dtype"),
    "device": (lambda tensor: tensor.to("meta"), "device"),
    "strides": (lambda tensor: torch.ones(8, 2).t() if tensor.dim() == 2 else tensor[::2], ""),
    "alignment": (offset, "not aligned"),
    "axes": (lambda tensor: tensor[None], "axes"),
}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("unlike", UNLIKE)
@torch.inference_mode()
def test_a_call_that_differs_from_the_last_one_in_one_thing_is_looked_at_anew(
    unlike: str, place: int
) -> None:
    change, reason = UNLIKE[unlike]
    base = add_norm_guards()
    aligned = tuple(dataclasses.replace(guard, alignment=16) for guard in base.tensors)
    dispatch = Dispatcher(
        "op", kernel, dataclasses.replace(base, tensors=aligned), CallCounters("id", "d1" * 20)
    )
    for _ in range(2):
        assert dispatch(*tensors(), 1e-5)
    other = list(tensors())
    other[place] = change(other[place])
    assert not dispatch(*other, 1e-5)
    assert dispatch(*tensors(), 1e-5)
    assert dispatch(*tensors(4), 1e-5)
    assert not dispatch(*other, 1e-5)
    [told] = dispatch.book.fallbacks
    assert reason in told
    assert dispatch.book.calls == {CALL: 3, CALL.replace("tokens=2", "tokens=4"): 1}


def finds(dispatch: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of calls whose signature the dispatcher looks up, from now on."""
    found: list[tuple[int, ...]] = []
    find = dispatch._find

    def counted(args: Any) -> Any:
        found.append(tuple(args[0].shape))
        return find(args)

    monkeypatch.setattr(dispatch, "_find", counted)
    return found


@torch.inference_mode()
def test_calls_of_several_shapes_in_turn_are_looked_up_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatch = made()
    found = finds(dispatch, monkeypatch)
    turn = [tensors(hidden=hidden) for hidden in (8, 12, 16, 24)]
    for _ in range(6):
        assert [dispatch(*args, 1e-5) for args in turn] == [True, False, True, True]
    # each shape, and once more the first, which followed the last for the first time
    assert found == [(2, 8), (2, 12), (2, 16), (2, 24), (2, 8)]
    assert set(dispatch.book.calls.values()) == {6}
    assert dispatch.book.fallbacks == {"hidden no multiple of 8": 6}
    assert not dispatch(*tensors(hidden=20), 1e-5)
    assert dispatch(*turn[0], 1e-5)
    assert dispatch.book.fallbacks == {"hidden no multiple of 8": 7}


@torch.inference_mode()
def test_a_weight_that_is_a_parameter_is_looked_up_once_like_a_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatch = made()
    x, residual, weight = tensors()
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    for kind in (weight, parameter):
        assert dispatch(x, residual, kind, 1e-5)
    found = finds(dispatch, monkeypatch)
    for kind in (parameter, parameter, parameter, weight, weight, weight):
        assert dispatch(x, residual, kind, 1e-5)
    assert len(found) == 2
    assert dispatch.book.calls == {CALL: 8}


@torch.inference_mode()
def test_a_signature_that_was_forgotten_counts_no_more_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("patcher.integrate.dispatch._MOST_CASES", 1)
    dispatch = made()
    assert dispatch(*tensors(), 1e-5)
    forgotten = dispatch._last
    assert dispatch(*tensors(4), 1e-5)
    dispatch._last = forgotten  # as a thread leaves it whose call began before
    assert dispatch(*tensors(), 1e-5)
    assert dispatch.book.calls == {CALL: 2, CALL.replace("tokens=2", "tokens=4"): 1}


@torch.inference_mode()
def test_calls_of_very_many_shapes_are_counted_and_not_all_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("patcher.integrate.dispatch._MOST_CASES", 4)
    dispatch = made()
    for _ in range(3):
        for hidden in range(1, 9):
            assert dispatch(*tensors(hidden), 1e-5)
    assert dispatch.book.calls.total() == 24
    assert set(dispatch.book.calls.values()) == {3}
    assert len(dispatch.book.cases) <= 4
    dispatch.book.begin_again()
    assert not dispatch.book.calls


@torch.inference_mode()
def test_without_torchs_own_guard_every_call_makes_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)
    dispatch = made()
    assert [dispatch(*tensors(hidden), 1e-5) for hidden in (2, 2, 4)] == [True] * 3
    assert not dispatch(*tensors(hidden=12), 1e-5)
    assert dispatch.book.calls.total() == 3


def test_the_operator_runs_under_compile_and_falls_back_inside() -> None:
    originals: Counter[int] = Counter()

    def original(input: torch.Tensor, residual: torch.Tensor, *rest: Any) -> None:
        originals[input.shape[1]] += 1
        kernel(input, residual, *rest)

    dispatch = made()
    operator = dispatch.op(original)
    assert dispatch.op(original) is operator

    def layer(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        added, kept = x * 2, residual + 1
        operator(added, kept, weight, 1e-5)
        return added + kept

    try:
        compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with torch.inference_mode():
            for hidden in (8, 12):
                args = torch.randn(2, hidden), torch.randn(2, hidden), torch.randn(hidden)
                assert torch.allclose(compiled(*args), layer(*args), atol=1e-6)
        assert dispatch.book.calls == {CALL: 2}
        assert originals == {12: 2}
    finally:
        torch._dynamo.reset()
        dispatch.close()
        dispatch.close()
    assert not hasattr(torch.ops.patcher, f"op_{('d1' * 20)[:12]}")
    made().op(original)  # the name is free again


def test_each_function_of_the_engine_has_an_operator_of_its_own() -> None:
    ran: list[str] = []
    dispatch = made()
    first, second = (
        dispatch.op(lambda *given, it=name: ran.append(it)) for name in ("first", "second")
    )
    try:
        assert first is not second
        refused = torch.randn(2, 12), torch.randn(2, 12), torch.randn(12)
        with torch.inference_mode():
            for operator in (second, first):
                operator(*refused, 1e-5)
                operator(*tensors(), 1e-5)
        assert ran == ["second", "first"]
        assert dispatch.book.calls == {CALL: 2}
    finally:
        dispatch.close()
    name = f"op_{('d1' * 20)[:12]}"
    assert not any(hasattr(torch.ops.patcher, each) for each in (name, f"{name}_1"))


def test_an_operator_may_be_given_other_views_than_the_kernel() -> None:
    given: list[tuple[tuple[int, ...], ...]] = []

    def original(*args: Any) -> None:
        given.append(tuple(tuple(arg.shape) for arg in args[:2]))

    def view(input: torch.Tensor, residual: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
        return input.t(), residual, *rest

    dispatch = made()
    operator = dispatch.op(original, view)
    assert dispatch.op(original, view) is operator
    assert dispatch.op(original) is not operator
    x, residual, weight = tensors()
    try:
        with torch.inference_mode():
            operator(x.t(), residual, weight, 1e-5)
            assert torch.equal(residual, torch.full_like(residual, 2.0))
            operator(torch.ones(2, 12).t(), torch.ones(2, 12), torch.ones(12), 1e-5)
        assert given == [((12, 2), (2, 12))]
        assert dispatch.book.calls == {CALL: 1}
        assert dispatch.book.fallbacks == {"hidden no multiple of 8": 1}
    finally:
        dispatch.close()


def test_two_dispatchers_of_one_patch_have_an_operator_each() -> None:
    first, second = made(), made()
    try:
        operators = [each.op(kernel) for each in (first, second)]
        with torch.inference_mode():
            for operator in operators:
                operator(*tensors(), 1e-5)
        assert operators[0] is not operators[1]
        assert first.book.calls == second.book.calls == {CALL: 1}
        name = operators[1].name()  # type: ignore[attr-defined]
        assert hasattr(torch.ops.patcher, name.removeprefix("patcher::"))
        del second, operator, operators
        gc.collect()
        assert not hasattr(torch.ops.patcher, name.removeprefix("patcher::"))
    finally:
        first.close()


def test_receipts_outlive_a_worker_that_is_killed(tmp_path: Path) -> None:
    code = """
        import sys, time, torch
        from patch_sample import add_norm_guards, kernel
        from patcher.integrate import CallCounters
        from patcher.integrate.dispatch import Dispatcher
        from patcher.integrate.receipts import ReceiptWriter
        from pathlib import Path
        dispatch = Dispatcher("op", kernel, add_norm_guards(), CallCounters("some-patch", "d"))
        ReceiptWriter(Path(sys.argv[1])).add(dispatch.book, "vllm:norm")
        with torch.inference_mode():
            for _ in range(7):
                dispatch(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 1e-5)
        print("done", flush=True)
        time.sleep(60)
    """
    path = os.pathsep.join([str(Path(__file__).parents[2] / "support"), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "RANK": "3"},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"done\n"
            [file] = tmp_path.glob(f"some-patch.rank3.*.{process.pid}-*.json")
            for _ in range(300):
                if json.loads(file.read_text())["calls"]:
                    break
                time.sleep(0.1)
        finally:
            process.send_signal(signal.SIGKILL)
    [receipt] = read_receipts(tmp_path)
    assert receipt.calls == {CALL: 7}
    assert (receipt.rank, receipt.point, receipt.failure) == (3, "vllm:norm", None)


def test_a_writer_tells_the_last_counts_when_it_closes(tmp_path: Path) -> None:
    dispatch = made()
    writer = ReceiptWriter(tmp_path / "receipts")
    writer.add(dispatch.book, "here")
    with torch.inference_mode():
        dispatch(*tensors(), 1e-5)
    writer.close()
    writer.close()
    [receipt] = read_receipts(tmp_path / "receipts")
    assert receipt == Receipt.of(dispatch.book, "here")
    assert receipt.calls == {CALL: 1}


@torch.inference_mode()
def test_what_is_too_large_to_copy_is_written_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patcher.integrate.dispatch._MOST_COPIED", 40)
    seen: list[tuple[int, ...]] = []

    def run(*args: Any) -> None:
        seen.append(tuple(arg.data_ptr() for arg in args[:3]))
        kernel(*args)

    dispatch = made(run=run, strict=False)
    large, small = tensors(), tensors(1)
    for args in (large, small):
        assert dispatch(*args, 1e-5)
        assert torch.equal(args[1], torch.full_like(args[1], 2.0))
    own = [tuple(arg.data_ptr() for arg in args) for args in (large, small)]
    assert seen[0] == own[0], "64 bytes a tensor: not copied"
    assert seen[1][:2] != own[1][:2]
    assert seen[1][2] == own[1][2], "only read: not copied"


def test_the_cost_of_an_operator_is_of_calls_that_all_run_or_all_fall_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cost, "PAIRS", 2)
    few, many = (cost.operator_cost("cpu", tokens) for tokens in (8, 2 * cost.MOST_TOKENS))
    assert few["falls_back"] == {}
    assert many["falls_back"] == {"tokens above 32": (3 + 2) * many["calls"]}
