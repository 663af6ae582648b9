"""What ran in this process: calls of a patched kernel, made eagerly or replayed in CUDA graphs.

Python does not run when a graph is replayed. So what was dispatched while a graph was recorded is
kept with the graph, and each replay of it counts once more; nothing is added to the graph itself.

This is what a served engine imports: torch and the standard library only.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class CallSignature:
    """What is known of one combination of shapes, strides, dtypes, devices and alignment."""

    label: str
    """The kernel and its shape bucket, as receipts name it."""
    refusal: str | None
    """Why the kernel may not be called like this."""
    proven: bool = False
    """Whether it may be run on the caller's tensors straight away."""
    matches: Callable[..., bool] | None = None
    """Whether a call is such a one, quickly; None where it was not asked for yet."""
    calls: int = 0
    """Eager calls, and those of a graph that is being recorded until its recording ends."""


@dataclass(slots=True)
class GraphRecording:
    """What one CUDA graph holds, and how often it was replayed."""

    calls: Counter[str]
    fallbacks: Counter[str]
    replays: int = 0


class CallCounters:
    """Counts of one patch in this process: calls by kernel and shape, fallbacks by reason."""

    def __init__(self, patch_id: str, digest: str) -> None:
        self.patch_id, self.digest, self.pid = patch_id, digest, os.getpid()
        self.cases: list[CallSignature] = []
        self.reasons: Counter[str] = Counter()
        """Eager calls that went to the original, by reason."""
        self.recordings: list[GraphRecording] = []

    @property
    def eager(self) -> Counter[str]:
        """Calls outside of graphs, by label."""
        total: Counter[str] = Counter()
        for case in list(self.cases):
            if case.calls:
                total[case.label] += case.calls
        return total

    @property
    def replayed(self) -> Counter[str]:
        """Calls in graphs, by label: what each holds times its replays."""
        return self._times_replays(lambda recording: recording.calls)

    @property
    def calls(self) -> Counter[str]:
        """Every call of the patched kernel that was made, by label."""
        return self.eager + self.replayed

    @property
    def fallbacks(self) -> Counter[str]:
        """Calls that went to the engine's own kernel, in graphs too, by reason."""
        eager = Counter(dict(self.reasons))  # copied at once: another thread may count meanwhile
        return eager + self._times_replays(lambda recording: recording.fallbacks)

    def _times_replays(self, of: Callable[[GraphRecording], Counter[str]]) -> Counter[str]:
        total: Counter[str] = Counter()
        for recording in list(self.recordings):
            for name, count in of(recording).items():
                total[name] += count * recording.replays
        return +total


class GraphWatch:
    """Watches `torch.cuda.CUDAGraph` for the books of a process. A context manager.

    Calls that another thread makes while a graph is recorded are counted into that graph.
    """

    def __init__(self, books: Iterable[CallCounters], kind: type[Any] | None = None) -> None:
        """`kind`: the class of graphs; torch's by default."""
        self._books = list(books)
        self._kind: Any = kind or torch.cuda.CUDAGraph
        self._originals: dict[str, Any] = {}
        self.capturing = False
        """Whether a graph is being recorded now: nothing may be built or allocated."""

    def add(self, book: CallCounters) -> None:
        self._books.append(book)

    def install(self) -> None:
        if self._originals:
            return
        watch, kind = self, self._kind
        begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay
        own = {name: kind.__dict__.get(name) for name in ("capture_begin", "capture_end", "replay")}

        def capture_begin(graph: Any, *args: Any, **more: Any) -> Any:
            result = begin(graph, *args, **more)
            graph._patcher_before = [
                (book, [case.calls for case in book.cases], Counter(book.reasons))
                for book in watch._books
            ]
            watch.capturing = True
            return result

        def capture_end(graph: Any, *args: Any, **more: Any) -> Any:
            watch.capturing = False
            graph._patcher_recordings = [
                _take(book, calls, reasons)
                for book, calls, reasons in graph.__dict__.pop("_patcher_before", ())
            ]
            return end(graph, *args, **more)

        def counted_replay(graph: Any, *args: Any, **more: Any) -> Any:
            for recording in graph.__dict__.get("_patcher_recordings", ()):
                recording.replays += 1
            return replay(graph, *args, **more)

        self._originals = own
        kind.capture_begin, kind.capture_end = capture_begin, capture_end
        kind.replay = counted_replay

    def remove(self) -> None:
        """Put torch's own methods back; once more is the same as once."""
        for name, original in self._originals.items():
            if original is None:
                delattr(self._kind, name)
            else:
                setattr(self._kind, name, original)
        self._originals = {}

    def __enter__(self) -> GraphWatch:
        self.install()
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def _take(book: CallCounters, calls: list[int], reasons: Counter[str]) -> GraphRecording:
    """Move what was counted since into a recording: it was recorded, it did not run."""
    recording = GraphRecording(Counter(), book.reasons - reasons)
    book.reasons = reasons
    for case, before in zip(book.cases, [*calls, *[0] * len(book.cases)], strict=False):
        if case.calls > before:
            recording.calls[case.label] += case.calls - before
            case.calls = before
    book.recordings.append(recording)
    return recording
