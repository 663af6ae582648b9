"""Record what a running engine hands to the code that a patch would replace, and what it gets back.

A recorder goes into a patch point in place of a patch's dispatcher. It leaves every call to the
engine, and keeps the inputs and the engine's outputs of some. So what a call is in the words of a
contract is what patches are called with.

A point that hands its tensors to a torch operator needs nothing more. One that calls the engine's
own function beside it tells what that gave by `Dispatcher.left`.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from patcher.bench import Contract, UsageError
from patcher.bench.judge.call_recording import (
    ALIGNED,
    CallRecording,
    RecordedCall,
    RecordedTensor,
    dtype_name,
    kept,
    name_of,
    write_part,
    write_recording,
)
from patcher.integrate.activation import contract_guards
from patcher.integrate.counts import CallCounters
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.engine import engine_version
from patcher.integrate.guards import AxisBounds, CallGuards, dispatches_itself
from patcher.integrate.points import PatchPoint

RECORDED = "recorded: the engine's own code runs"
"""Why a recorder's calls fall back, in its counters."""
NOT_TOLD = "the point did not tell what the engine gave"
_STEP = 2
"""The next call of one signature to record comes after this many times as many calls."""


@dataclass(frozen=True)
class RecordingLimits:
    """How much is recorded at one point."""

    calls: int = 16
    """Most calls. Of calls with equal shapes and strides the 1st, 2nd, 4th, 8th and so on are
    chosen, or the next of another layer, as its weights show."""
    megabytes: float = 64.0
    """Most values, in MB; values that calls share, such as weights, count once."""

    @classmethod
    def of(cls, megabytes: str) -> RecordingLimits:
        """The limits with a size as `PATCHER_RECORD_MB` has it; empty: the usual one.

        Raises:
            UsageError: it is no number above 0.
        """
        try:
            return cls() if not megabytes else cls(megabytes=float(megabytes))
        except ValueError:
            hint = "set it to a number above 0"
            raise UsageError(f"PATCHER_RECORD_MB is {megabytes!r}", hint) from None

    def __post_init__(self) -> None:
        if self.calls < 1 or not self.megabytes > 0:
            raise UsageError(
                f"nothing is recorded in {self.calls} calls and {self.megabytes:g} MB",
                "allow at least one call, and more than 0 MB",
            )


@dataclass
class _OpenCall:
    """A call whose outputs are not known yet."""

    number: int
    args: tuple[Any, ...]
    given: dict[str, torch.Tensor]
    refusal: str


class Recorder(Dispatcher):
    """Leaves every call to the engine's own code, and records some. Calls of several threads may
    be told at once."""

    eager_only = True

    def __init__(
        self, contract: Contract, point: type[PatchPoint], file: Path, limits: RecordingLimits
    ) -> None:
        digest = hashlib.sha256(f"recorder {point.engine} {point.name}".encode()).hexdigest()
        book = CallCounters(f"recorder-{contract.name}", digest)
        super().__init__(contract.name, _never, _guards(contract, "cpu"), book)
        self.contract, self.file, self.limits = contract, file, limits
        self.calls: list[RecordedCall] = []
        self.left_out: Counter[str] = Counter()
        self.seen = 0
        self.waits = False
        """Whether calls are neither recorded nor counted for now."""
        self._point = point
        self._device = "cpu"
        self._values: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._counts: Counter[Any] = Counter()
        self._due: dict[Any, int] = {}
        self._layers: set[Any] = set()
        self._open = threading.local()
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> bool:
        """Record what the call is given if it is chosen; the engine's own code runs."""
        if self.waits:
            return False
        self.book.reasons[RECORDED] += 1
        with self._lock:
            self._open.call = None
            number, self.seen = self.seen, self.seen + 1
            if self._chosen(args):
                call = self._open.call = self._begun(number, args)
                self.left_out[NOT_TOLD] += call is not None
        return False

    def left(self, *written: Any) -> None:
        """See `Dispatcher.left`: the outputs of the call, which is now whole."""
        call: _OpenCall | None = getattr(self._open, "call", None)
        if call is None:
            return
        self._open.call = None
        with self._lock:
            self.left_out[NOT_TOLD] -= 1
            self._end(call, written)

    def record(self) -> CallRecording:
        """What is recorded so far, without the values."""
        return CallRecording(
            op=self.contract.name,
            signature=self.contract.signature(),
            engine=self._point.engine,
            engine_version=engine_version(self._point.engine),
            point=self._point.name,
            device=self._device,
            torch_version=torch.__version__,
            seen=self.seen,
            left_out={reason: count for reason, count in self.left_out.items() if count},
            calls=tuple(self.calls),
        )

    def write(self) -> None:
        """Write the whole file; until then each call that is recorded is a part of its own."""
        with self._lock:
            write_recording(self.file, self.record(), self._values)

    def _chosen(self, args: tuple[Any, ...]) -> bool:
        tensors = args[: len(self.guards.tensors)]
        if len(self.calls) >= self.limits.calls:
            return False
        if any(map(dispatches_itself, tensors)):
            self.left_out["a tensor with operators of its own"] += 1
            return False
        key = self._key(*args)
        count = self._counts[key]
        self._counts[key] += 1
        if count + 1 < self._due.get(key, 1):
            return False
        constant = zip(self.contract.tensors, tensors, strict=True)
        layer = key, tuple(each.data_ptr() for spec, each in constant if spec.constant)
        if layer[1] and layer in self._layers:
            return False
        if any(each.is_cuda for each in tensors) and torch.cuda.is_current_stream_capturing():
            self.left_out["a CUDA graph was being recorded"] += 1
            return False
        self._layers.add(layer)
        self._due[key] = _STEP * (count + 1)
        return True

    def _begun(self, number: int, args: tuple[Any, ...]) -> _OpenCall | None:
        tensors = args[: len(self.guards.tensors)]
        room = self.limits.megabytes * 1e6 - self._bytes
        sizes = zip(self.contract.tensors, tensors, strict=True)
        once = sum(
            each.nbytes * (2 if spec.access == "update" else 1)
            for spec, each in sizes
            if not spec.constant
        )
        if once > room:
            self.left_out["larger than what is left of the size limit"] += 1
            return None
        guards = _guards(self.contract, tensors[0].device.type)
        pairs = zip(self.contract.tensors, tensors, strict=True)
        given = {spec.name: kept(each) for spec, each in pairs if spec.access != "write"}
        if tensors[0].is_cuda:
            self._device = torch.cuda.get_device_name(tensors[0].device)
        return _OpenCall(number, args, given, guards.refusal(args) or "")

    def _end(self, call: _OpenCall, written: tuple[Any, ...]) -> None:
        tensors = call.args[: len(self.guards.tensors)]
        pairs = list(zip(self.contract.tensors, tensors, strict=True))
        own = written or tuple(each for spec, each in pairs if spec.access != "read")
        made: dict[str, torch.Tensor] = {}
        for (spec, each), found in zip(
            [pair for pair in pairs if pair[0].access != "read"], own, strict=True
        ):
            if found.dtype != each.dtype or found.numel() != each.numel():
                gave = f"{dtype_name(found)} {list(found.shape)}"
                self.left_out[f"the engine gave {spec.name} as {gave}"] += 1
                return
            made[spec.name] = kept(found).view(each.shape)
        names: dict[tuple[str, str], str] = {}
        fresh: dict[str, torch.Tensor] = {}
        for kind, values in (("given", call.given), ("made", made)):
            for name, value in values.items():
                key = names[kind, name] = name_of(value)
                if key not in self._values:
                    fresh[key] = value
        size = sum(value.nbytes for value in fresh.values())
        if self._bytes + size > self.limits.megabytes * 1e6:
            self.left_out["larger than what is left of the size limit"] += 1
            return
        recorded = tuple(
            RecordedTensor(
                name=spec.name,
                dtype=dtype_name(each),
                shape=tuple(each.shape),
                strides=tuple(each.stride()),
                shift=each.data_ptr() % ALIGNED,
                given=names.get(("given", spec.name), ""),
                made=names.get(("made", spec.name), ""),
            )
            for spec, each in pairs
        )
        scalars = tuple(float(each) for each in call.args[len(pairs) :])
        self.calls.append(
            RecordedCall(
                number=call.number, tensors=recorded, scalars=scalars, refusal=call.refusal
            )
        )
        try:
            write_part(self.file, self.record(), fresh)
        except OSError as error:  # such as a full disk: the engine's call is served all the same
            self.calls.pop()
            self.left_out[f"it could not be written: {error.strerror or error}"] += 1
            return
        self._bytes += size
        self._values |= fresh


def _guards(contract: Contract, device: str) -> CallGuards:
    """Where the contract lets a kernel be called."""
    bounds = {
        axis: AxisBounds(guard.minimum, guard.maximum, guard.multiple_of)
        for axis, guard in contract.guards.axes.items()
    }
    guards = contract_guards(contract, device, contract.dtype_choices())
    return replace(guards, axes=bounds)


def _never(*args: Any) -> None:
    """The kernel of a recorder, which refuses every call."""
    raise AssertionError("a recorder calls no kernel")
