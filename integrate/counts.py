"""Count the calls of patched kernels in this process, eager and replayed in CUDA graphs.

Python does not run during a graph's replay. So the calls dispatched during recording are stored
with the graph, and each replay counts them again. The graph itself is unchanged.

A served engine imports this module, so it uses only torch and the standard library.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from patcher.integrate.keys import never
from patcher.integrate.layers import LayerSurvey

REPLACED = "another module was put in its place later"
"""Why a layer that the patch takes keeps the engine's own code."""

_BOOKS = itertools.count()
"""Tells apart counters that start at one time of the clock, which may be coarse or stand still."""


@dataclass(slots=True, eq=False)
class CallSignature:
    """One combination of shapes, strides, dtypes, devices and alignment, with its call count."""

    label: str
    """The kernel and its shape bucket, as receipts name it."""
    refusal: str | None
    """Why the guards refuse such a call; None if they allow it."""
    matches: Callable[..., bool] = never
    """A fast test for such a call."""
    next: CallSignature = field(init=False, repr=False)
    """The signature of the call that followed such a one last time; at first itself."""
    proven: bool = False
    """Whether the kernel has run once for such a call and may use the caller's tensors."""
    device: int | None = None
    """Index of the CUDA device of its tensors; None where no other could be the current one."""
    calls: int = 0
    """Eager calls, including those of a graph until its recording ends."""

    def __post_init__(self) -> None:
        self.next = self


@dataclass(slots=True)
class GraphRecording:
    """The calls that one CUDA graph holds, and the number of its replays."""

    calls: Counter[str]
    fallbacks: Counter[str]
    replays: int = 0


class CallCounters:
    """Counters of one patch in this process: calls by kernel and shape, fallbacks by reason."""

    def __init__(self, patch_id: str, digest: str) -> None:
        """Start at zero.

        Args:
            patch_id: the patch's id.
            digest: the digest of its manifest.
        """
        self.patch_id, self.digest = patch_id, digest
        self.pid, self.started = os.getpid(), time.time_ns() + next(_BOOKS)
        self.cases: list[CallSignature] = []
        self._former: Counter[str] = Counter()
        """Eager calls of signatures that are no longer in `cases`, by label."""
        self.reasons: Final[Counter[str]] = Counter()
        """Eager calls that fell back to the original, by reason; one object, as points keep it."""
        self.compiled_out: Final[Counter[str]] = Counter()
        """The part of `reasons` that `leave_in_graph` counted."""
        self.recordings: list[GraphRecording] = []
        self.surveys: dict[int, LayerSurvey] = {}
        """The layers of the models that this process loaded, by number of the loading worker."""
        self._before = 0
        """Calls in and out of graphs before the engine that runs now; see `begin_engine`."""
        self.replaced: Callable[[], int] = int
        """How many of the layers that the patch takes were put out of their model since."""

    def begin_again(self) -> None:
        """Start at zero in a process that was forked, since its parent counts what was before."""
        self.pid, self.started = os.getpid(), time.time_ns() + next(_BOOKS)
        self.reasons.clear()
        self.compiled_out.clear()
        self._before = 0
        self._former = Counter()
        for case in self.cases:
            case.calls = 0
        for recording in self.recordings:
            recording.replays = 0

    def leave_in_graph(self, reasons: Iterable[str]) -> None:
        """Count places of a graph that were compiled with the engine's own code, which is final.

        A process that loads code which another one compiled does not count them.
        """
        found = Counter(reasons)
        self.reasons.update(found)
        self.compiled_out.update(found)

    def uncount(self, before: Counter[str]) -> Counter[str]:
        """Take what was counted in `reasons` since it was as `before` out of it, and return it."""
        since = Counter(self.reasons) - before
        for reason, count in since.items():
            self.reasons[reason] -= count
            if not self.reasons[reason]:
                del self.reasons[reason]
        return since

    def begin_engine(self) -> None:
        """Count on for another engine of this process, after those before it were shut down."""
        self.surveys.clear()
        self._before = self._seen

    @property
    def ran(self) -> bool:
        """Whether the kernel ran, or was recorded, since this engine began."""
        return self._seen > self._before

    @property
    def _seen(self) -> int:
        return self.calls.total() + self.recorded.total()

    def forget_cases(self) -> None:
        """Keep the counts of all signatures, and drop the signatures, which may be many."""
        self._former, self.cases = self.eager, []

    @property
    def layers(self) -> LayerSurvey | None:
        """The layers of all models that were loaded; None if none was looked at."""
        surveys = list(self.surveys.values())
        if not surveys:
            return None
        total = sum(surveys, LayerSurvey())
        gone = min(self.replaced(), total.taken)
        return total + LayerSurvey(-gone, Counter({REPLACED: gone} if gone else {}))

    @property
    def recorded(self) -> Counter[str]:
        """Calls in graphs, by label, as if each graph had run once."""
        total: Counter[str] = Counter()
        for recording in list(self.recordings):
            total += recording.calls
        return total

    @property
    def eager(self) -> Counter[str]:
        """Calls outside graphs, by label."""
        total = Counter(self._former)
        for case in list(self.cases):
            if case.calls:
                total[case.label] += case.calls
        return total

    @property
    def replayed(self) -> Counter[str]:
        """Calls in graphs, by label: the calls of each graph times its replays."""
        return self._times_replays(lambda recording: recording.calls)

    @property
    def calls(self) -> Counter[str]:
        """All calls of the patched kernel, by label."""
        return self.eager + self.replayed

    @property
    def fallbacks(self) -> Counter[str]:
        """Calls that fell back to the engine's own kernel, graphs included, by reason."""
        eager = Counter(dict(self.reasons))  # one atomic copy, since other threads may count
        return eager + self._times_replays(lambda recording: recording.fallbacks)

    def _times_replays(self, of: Callable[[GraphRecording], Counter[str]]) -> Counter[str]:
        total: Counter[str] = Counter()
        for recording in list(self.recordings):
            for name, count in of(recording).items():
                total[name] += count * recording.replays
        return +total


class GraphWatch:
    """Watches CUDA graphs to count the calls in their replays. A context manager.

    It wraps methods of `torch.cuda.CUDAGraph`, which the watches of a process share: they may come
    and go in any order. Calls of another thread during a recording are counted as part of that
    graph.
    """

    def __init__(self, books: Iterable[CallCounters], kind: type[Any] | None = None) -> None:
        """Watch graphs for some counters.

        Args:
            books: the counters of this process's patches.
            kind: the class of graphs; by default `torch.cuda.CUDAGraph`.
        """
        self._books = list(books)
        self._kind: Any = kind or torch.cuda.CUDAGraph
        self.capturing = False
        """Whether a graph is being recorded now, so that nothing may be built or allocated."""

    def add(self, book: CallCounters) -> None:
        """Watch graphs for these counters too."""
        self._books.append(book)

    def install(self) -> None:
        """Wrap the methods of the graph class, if no other watch has; idempotent."""
        with _HOOKING:
            hooks = _HOOKS.get(self._kind)
            if hooks is None:
                hooks = _HOOKS[self._kind] = _GraphHooks(self._kind)
            if self not in hooks.watches:
                hooks.watches.append(self)

    def remove(self) -> None:
        """Stop watching; the last watch restores torch's own methods. Idempotent."""
        with _HOOKING:
            hooks = _HOOKS.get(self._kind)
            if hooks is None or self not in hooks.watches:
                return
            hooks.watches.remove(self)
            if not hooks.watches:
                hooks.remove()
                del _HOOKS[self._kind]
        self.capturing = False

    def books(self) -> list[CallCounters]:
        """The counters, as of now."""
        return list(self._books)

    def __enter__(self) -> GraphWatch:
        self.install()
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class _GraphHooks:
    """The wrapped methods of a graph class, and the watches that they serve."""

    def __init__(self, kind: Any) -> None:
        self.watches: list[GraphWatch] = []
        watches = self.watches
        begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

        def capture_begin(graph: Any, *args: Any, **more: Any) -> Any:
            result = begin(graph, *args, **more)
            if not watches:  # left under other code's methods
                return result
            graph._patcher_before = [
                (book, [case.calls for case in book.cases], Counter(book.reasons))
                for book in dict.fromkeys(book for watch in watches for book in watch.books())
            ]
            for watch in watches:
                watch.capturing = True
            return result

        def capture_end(graph: Any, *args: Any, **more: Any) -> Any:
            for watch in watches:
                watch.capturing = False
            if watches:
                graph._patcher_recordings = [
                    _take(book, calls, reasons)
                    for book, calls, reasons in graph.__dict__.pop("_patcher_before", ())
                ]
            return end(graph, *args, **more)

        def counted_replay(graph: Any, *args: Any, **more: Any) -> Any:
            for recording in graph.__dict__.get("_patcher_recordings", ()) if watches else ():
                recording.replays += 1
            return replay(graph, *args, **more)

        self._kind = kind
        self._ours = {
            "capture_begin": capture_begin,
            "capture_end": capture_end,
            "replay": counted_replay,
        }
        self._own = {name: kind.__dict__.get(name) for name in self._ours}
        for name, function in self._ours.items():
            setattr(kind, name, function)

    def remove(self) -> None:
        """Restore the class's own methods; where other code lies over ours, ours stays, idle."""
        for name, own in self._own.items():
            if self._kind.__dict__.get(name) is not self._ours[name]:
                continue
            if own is None:
                delattr(self._kind, name)
            else:
                setattr(self._kind, name, own)


_HOOKS: dict[type[Any], _GraphHooks] = {}
"""By class of graphs; torch has one such class for all engines of a process."""
_HOOKING = threading.Lock()


def _take(book: CallCounters, calls: list[int], reasons: Counter[str]) -> GraphRecording:
    """Move the counts since `calls` and `reasons` to a recording, since those calls did not run."""
    recording = GraphRecording(Counter(), book.uncount(reasons))
    for case, before in zip(book.cases, [*calls, *[0] * len(book.cases)], strict=False):
        if case.calls > before:
            recording.calls[case.label] += case.calls - before
            case.calls = before
    book.recordings.append(recording)
    return recording
