"""The CUDA runtime through ctypes, bound before a candidate is loaded: copies, events and graphs.

Python functions that a candidate may patch (`torch.cuda.synchronize`, `Event.elapsed_time`) are not
used for times or outputs. Each call is a separate graph. A timed or verified sequence is composed
of them here, in an order that no candidate code has seen.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from .driver import CudaError
from .images import mapped_paths

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3
_PERSISTING_L2 = 6
_DEVICE_L2_BYTES = 38
"""cudaDevAttrL2CacheSize."""


class _Memset(ctypes.Structure):
    """cudaMemsetParams."""

    _fields_ = (
        ("dst", _POINTER),
        ("pitch", _SIZE),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("width", _SIZE),
        ("height", _SIZE),
    )


class Cuda:
    """Calls of this process's CUDA runtime. Pointers and handles are integers, sizes bytes."""

    def __init__(self) -> None:
        paths = [path for path in mapped_paths() if "libcudart" in os.path.basename(path)]
        if not paths:
            raise CudaError("no libcudart in this process: a CUDA build of torch is needed")
        self._library = ctypes.CDLL(paths[0])
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = self._library.cudaGetErrorString(status).decode()
            raise CudaError(f"{name}: {text} ({status})")

    def synchronize(self) -> None:
        self.call("cudaDeviceSynchronize")

    def to_device(self, target: int, source: int, size: int) -> None:
        self.call("cudaMemcpy", _POINTER(target), _POINTER(source), _SIZE(size), _TO_DEVICE)

    def to_host(self, target: int, source: int, size: int) -> None:
        self.call("cudaMemcpy", _POINTER(target), _POINTER(source), _SIZE(size), _TO_HOST)

    def copy_async(self, target: int, source: int, size: int, stream: int) -> None:
        self.call(
            "cudaMemcpyAsync",
            _POINTER(target),
            _POINTER(source),
            _SIZE(size),
            _ON_DEVICE,
            _POINTER(stream),
        )

    def fill(self, target: int, byte: int, size: int, stream: int) -> None:
        """Set each byte of device memory, in stream order."""
        self.call(
            "cudaMemsetAsync",
            _POINTER(target),
            ctypes.c_int(byte),
            _SIZE(size),
            _POINTER(stream),
        )

    def event(self) -> int:
        event = _POINTER()
        self.call("cudaEventCreate", ctypes.byref(event))
        return event.value or 0

    def record(self, event: int, stream: int) -> None:
        self.call("cudaEventRecord", _POINTER(event), _POINTER(stream))

    def elapsed_ns(self, begin: int, end: int) -> float:
        milliseconds = ctypes.c_float()
        self.call(
            "cudaEventElapsedTime", ctypes.byref(milliseconds), _POINTER(begin), _POINTER(end)
        )
        return milliseconds.value * 1e6

    def persisting_bytes(self) -> int:
        """Bytes of L2 that are reserved for persisting lines."""
        size = _SIZE()
        self.call("cudaDeviceGetLimit", ctypes.byref(size), _PERSISTING_L2)
        return size.value

    def forget_persisting_lines(self) -> None:
        """Reset persisting L2, so that no candidate keeps its working set between samples."""
        self.call("cudaCtxResetPersistingL2Cache")
        self.call("cudaDeviceSetLimit", _PERSISTING_L2, _SIZE(0))

    def l2_bytes(self) -> int:
        size = ctypes.c_int()
        self.call("cudaDeviceGetAttribute", ctypes.byref(size), _DEVICE_L2_BYTES, 0)
        return size.value


class Composition:
    """A linear graph of child graphs and trusted nodes."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._graph, self._executable = _POINTER(), _POINTER()
        self._last: int | None = None
        cuda.call("cudaGraphCreate", ctypes.byref(self._graph), 0)

    def _add(self, function: str, *arguments: Any) -> None:
        node = _POINTER()
        before = None if self._last is None else (_POINTER * 1)(self._last)
        count = _SIZE(0 if self._last is None else 1)
        self._cuda.call(function, ctypes.byref(node), self._graph, before, count, *arguments)
        self._last = node.value

    def child(self, graph: int) -> None:
        self._add("cudaGraphAddChildGraphNode", _POINTER(graph))

    def record(self, event: int) -> None:
        self._add("cudaGraphAddEventRecordNode", _POINTER(event))

    def copy(self, target: int, source: int, size: int) -> None:
        self._add(
            "cudaGraphAddMemcpyNode1D",
            _POINTER(target),
            _POINTER(source),
            _SIZE(size),
            _ON_DEVICE,
        )

    def fill(self, target: int, size: int) -> None:
        self._add("cudaGraphAddMemsetNode", ctypes.byref(_Memset(target, 0, 0, 1, size, 1)))

    def ready(self, stream: int) -> None:
        executable, graph = ctypes.byref(self._executable), self._graph
        self._cuda.call("cudaGraphInstantiate", executable, graph, ctypes.c_ulonglong(0))
        self._cuda.call("cudaGraphUpload", self._executable, _POINTER(stream))

    def launch(self, stream: int) -> None:
        self._cuda.call("cudaGraphLaunch", self._executable, _POINTER(stream))

    def close(self) -> None:
        if self._executable:
            self._cuda.call("cudaGraphExecDestroy", self._executable)
        self._cuda.call("cudaGraphDestroy", self._graph)


def whole(
    cuda: Cuda, children: Sequence[int], order: Sequence[int], events: tuple[int, int]
) -> Composition:
    """Compose the calls in order between two events."""
    graph = Composition(cuda)
    graph.record(events[0])
    for index in order:
        graph.child(children[index])
    graph.record(events[1])
    return graph


def verified(
    cuda: Cuda,
    children: Sequence[int],
    order: Sequence[int],
    copies: Sequence[tuple[int, int, int]],
) -> Composition:
    """Compose the calls, each followed by a copy (target, source, bytes) of its buffers."""
    graph = Composition(cuda)
    for index in order:
        graph.child(children[index])
        graph.copy(*copies[index])
    return graph


def cold(
    cuda: Cuda,
    children: Sequence[int],
    order: Sequence[int],
    flush: tuple[int, int],
    events: Sequence[tuple[int, int]],
) -> Composition:
    """Compose the calls, each after overwriting L2 and between its own two events."""
    graph = Composition(cuda)
    for index, (begin, end) in zip(order, events, strict=True):
        graph.fill(*flush)
        graph.record(begin)
        graph.child(children[index])
        graph.record(end)
    return graph
