"""The commands of a runner: load, fill buffers, call, time, hand back.

Everything that it uses is bound before a candidate is loaded. Its replies are never trusted alone.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import mmap
import os
import time
from typing import Any

from . import cudart, loading
from .captured import Arena, Captured, MappedSet
from .driver import CudaError
from .exchange import Exchange, opened
from .images import LoadedImages
from .late_writer import LateWriter
from .mixing import FILL, Mixer
from .portable import Carrying
from .probes import Probing

# bound before any candidate is loaded, so that later patches have no effect here
_clock = time.perf_counter_ns


class Session(Carrying, Probing):
    """State of one runner; each method `do_NAME` runs the command NAME and returns its reply.

    Args:
        inputs: descriptor of a file in memory that commands read.
        outputs: descriptor of one that they write.
        device: on CUDA, the descriptor and the size of device memory that is used in place of both
            where it is large enough; it is not, if the reply to `start` says `unshared`.
        status: what that reply says besides.
    """

    def __init__(
        self, inputs: int, outputs: int, device: tuple[int, int] | None, status: dict[str, Any]
    ) -> None:
        self.status = status
        self._offered = device
        self.exchange: Any = None
        size = os.fstat(inputs).st_size
        # writable, so that ctypes gives its address; private, so that the judge's bytes stay
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        self.input = mmap.mmap(inputs, size, prot=writable, flags=mmap.MAP_PRIVATE)
        self.inputs = _address(self.input)
        self.shared = outputs
        """On CUDA for outputs, and on a CPU for the sets."""
        self.function: Any = None
        self.device = "cpu"
        self.cuda: Any = None
        self.stream = 0
        self.captured: Any = None
        self.ready: Any = None
        self.mixer: Any = None
        self.stock: Any = None
        self.late: Any = None

    def do_start(
        self, device: str, threads: int | None, portable: bool, environment: dict[str, str]
    ) -> dict[str, Any]:
        """Initialise the device, before any foreign code.

        With `portable`, calls that are captured later can be handed over to another process.
        """
        import torch

        os.environ.update(environment)
        torch.manual_seed(0)
        self.device = device
        self.mixer = Mixer()
        if threads is not None:
            torch.set_num_threads(threads)
        if device == "cuda":
            self.output = mmap.mmap(self.shared, len(self.input))
            self.outputs = _address(self.output)
            images = LoadedImages() if portable else None
            torch.zeros(1, device="cuda")
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self.torch_stream = stream
            torch.cuda.set_stream(stream)
            self.stream = stream.cuda_stream
            self.cuda = cudart.Cuda()
            files = (self.inputs, (self.output, self.outputs))
            memory = opened(self._offered, self.status)
            self.exchange = Exchange(self.cuda, self.stream, *files, memory)
            self.cuda.forget_persisting_lines()
            self.multiply = torch.mm
            self.nan = torch.full((4096, 4096), float("nan"), dtype=torch.bfloat16, device="cuda")
            self.product = torch.empty_like(self.nan)
            capability = torch.cuda.get_device_capability()
            self.status["no_late_writer"] = self._load_late_writer(capability)
            if images is not None:
                self._make_portable(images)
            self.cuda.synchronize()
        return {"threads": torch.get_num_threads(), **self.status}

    def _load_late_writer(self, capability: tuple[int, int]) -> str:
        """Load the late-writing kernel; return why that failed, or an empty string."""
        if capability < (9, 0):
            return "compute capability 9.0 is the first to launch dependents early"
        try:
            self.late = LateWriter()
        except CudaError as error:
            return str(error)
        return ""

    def do_candidate(self, path: str, binding: str, entry: str) -> dict[str, Any]:
        """Load a candidate's build, in place of the one before."""
        if self.function is not None:
            self.function = self.captured = self.ready = None
            gc.unfreeze()
            gc.collect()
        with self._own_memory():
            self.function = loading.load(path, binding, entry)
        gc.freeze()  # collecting the loaded modules would take 0.1 s between calls
        return {}

    def do_baseline(self, op: str, name: str) -> dict[str, Any]:
        """Load a baseline of an op; only a trusted runner can."""
        from patcher.bench.ops.op import load_op

        self.captured = None
        known = load_op(op)
        function = known.baselines[name](self.device)
        tensors = known.contract.tensors
        written = [place for place, each in enumerate(tensors) if each.access != "read"]

        def run(*arguments: Any) -> None:
            # a baseline may return its outputs: copy them into the contract's tensors
            result = function(*arguments)
            if isinstance(result, tuple):
                for place, value in zip(written, result, strict=True):
                    if value is not arguments[place]:
                        arguments[place].copy_(value)

        self.function = run
        gc.freeze()
        return {}

    def do_stock(self, whole: int, at: int, size: int) -> dict[str, Any]:
        """CUDA: receive a part of the pool of what large tensors are mixed from."""
        import torch

        if at == 0:
            self.stock = torch.empty(whole, dtype=torch.uint8, device="cuda")
        self.exchange.receive(self.stock.data_ptr() + at, 0, size, size)
        self.cuda.synchronize()
        return {}

    def do_call(self, order: list[int], **sets: Any) -> dict[str, Any]:
        """CUDA: call once for each set of `order`, and copy its buffers when the call returns."""
        self.do_ready(order, **sets)
        return self.do_go()

    def do_ready(
        self,
        order: list[int],
        plan: dict[str, Any],
        scalars: list[float],
        sets: int,
        recipes: list[list[list[int]]],
    ) -> dict[str, Any]:
        """Prepare the calls, so that the judge's clock covers only the calls.

        On a CPU the judge fills the sets when this has returned, with the process stopped.
        """
        self.ready = None
        if self.cuda is None:
            mapped = [MappedSet(plan, self.shared, index, sets) for index in range(sets)]
            self.ready = [
                ((*mapped[index].arguments, *scalars), mapped[index].keep) for index in order
            ]
            return {}
        arena, snapshot = Arena(plan, sets), Arena(plan, sets, bare=True)
        self._fill(arena, recipes)
        arguments = [(*arena.arguments[index], *scalars) for index in order]
        self.ready = (arena, arguments, order, snapshot)
        return {}

    def do_go(
        self, empty: bool = False, keep: bool = False, only: int | None = None
    ) -> dict[str, Any]:
        """Make the calls that `do_ready` prepared: all, or one, or none if `empty`.

        On a CPU, with `keep`, buffers are copied as each call leaves them. On CUDA they always are,
        and the reply has the calls' times in nanoseconds.
        """
        import torch

        function = self._loaded()
        gc.disable()
        try:
            with torch.inference_mode(), self._own_memory():
                if self.cuda is not None:
                    return {"times_ns": self._call_on_gpu(function)}
                calls = self.ready if only is None else self.ready[only : only + 1]
                for arguments, kept in [] if empty else calls:
                    function(*arguments)
                    if keep:
                        kept()
        finally:
            gc.enable()
        return {}

    def do_hand(self, key: int) -> dict[str, Any]:
        """CUDA: hand back the buffers of eager calls."""
        return self._hand_back(self.ready[-1], key)

    def _call_on_gpu(self, function: Any) -> list[float]:
        """Call eagerly; a time is the larger of the events' and the synchronised host's."""
        arena, arguments, order, snapshot = self.ready
        self.cuda.copy_async(
            snapshot.pointer, arena.pointer, arena.set_bytes * arena.sets, self.stream
        )
        before, after, times = self.cuda.event(), self.cuda.event(), []
        for index, each in zip(order, arguments, strict=True):
            # leaves NaN in every multiprocessor's shared memory, to expose uninitialised reads
            self.multiply(self.nan, self.nan, out=self.product)
            self.cuda.synchronize()
            begin = _clock()
            self.cuda.record(before, self.stream)
            function(*each)
            self.cuda.record(after, self.stream)
            self.cuda.copy_async(snapshot.at(index), arena.at(index), arena.set_bytes, self.stream)
            self.cuda.synchronize()
            wall = _clock() - begin
            times.append(max(self.cuda.elapsed_ns(before, after), float(wall)))
        self.exchange.give(snapshot)
        return times

    def do_capture(
        self,
        plan: dict[str, Any],
        scalars: list[float],
        sets: int,
        recipes: list[list[list[int]]],
    ) -> dict[str, Any]:
        """CUDA: capture each call as a separate graph, on permanent buffers."""
        import torch

        self.captured = self.ready = None
        memory = None if self.portable is None else self.portable.sets
        arena, snapshot = Arena(plan, sets, memory=memory), Arena(plan, sets, bare=True)
        self._fill(arena, recipes)
        function, graphs = self._loaded(), []
        pool: Any = torch.cuda.graph_pool_handle()
        if self.portable is not None:
            pool = self.portable.pool_id
        with torch.inference_mode():
            with self._own_memory():
                for _ in range(2):
                    function(*arena.arguments[0], *scalars)
            self.cuda.synchronize()
            for arguments in arena.arguments:
                graph = torch.cuda.CUDAGraph(keep_graph=True)
                with torch.cuda.graph(graph, pool=pool, stream=self.torch_stream):
                    function(*arguments, *scalars)
                graphs.append(graph)
            self.cuda.synchronize()
        children = [graph.raw_cuda_graph() for graph in graphs]
        self.captured = Captured(self.cuda, arena, snapshot, children, self.stream, graphs)
        return {"persisting_bytes": self.cuda.persisting_bytes()}

    def do_compose(
        self, mode: str, order: list[int], recipes: list[list[list[int]]]
    ) -> dict[str, Any]:
        """Fill the captured buffers with new values, and compose the calls of `order`.

        `mode`: `whole` (between two events), `verified` (a copy after each call, in stream order)
        or `cold` (L2 overwritten before each call).
        """
        self._fill(self.captured.arena, recipes)
        persisting = self.cuda.persisting_bytes()
        self.captured.compose(mode, order)
        return {"persisting_bytes": persisting}

    def do_launch(self) -> dict[str, Any]:
        """Launch once, with a fingerprint of the buffers at the time of the reply."""
        times = self.captured.launch()
        return {"times_ns": times, "fingerprint": self.captured.fingerprint()}

    def do_profiler(self) -> dict[str, Any]:
        """Import what PyTorch's profiler imports when it is entered first."""
        try:
            importlib.import_module("torch._inductor.config")
        except ImportError as error:  # another version of PyTorch: `spans` takes what it takes
            return {"not_imported": str(error)}
        return {}

    def do_spans(self, order: list[int], recipes: list[list[list[int]]]) -> dict[str, Any]:
        """Launch under CUPTI, with spans of all streams: [name, begin, end] in nanoseconds."""
        if self.portable is not None:
            self.portable.close()  # CUPTI has one user at a time
        self._fill(self.captured.arena, recipes)
        self.captured.compose("whole", order)
        times, spans = self.captured.launch_traced()
        return {"times_ns": times, "spans": spans}

    def do_follow(
        self, index: int, other: int, scalars: list[float], recipes: list[list[list[int]]]
    ) -> dict[str, Any]:
        """Call one set behind a kernel that writes its buffers late, and lets dependents begin.

        Until then the buffers hold the other set's values.
        """
        arena, snapshot, function = self.captured.arena, self.captured.snapshot, self._loaded()
        self._fill(arena, recipes)

        def call() -> None:
            self.late.launch(arena.at(index), snapshot.at(index), arena.set_bytes, self.stream)
            function(*arena.arguments[index], *scalars)

        self.captured.follow(index, other, call, self.torch_stream)
        return {}

    def do_collect(self, key: int) -> dict[str, Any]:
        """Hand back the buffers of a launched graph."""
        self.exchange.give(self.captured.left)
        return self._hand_back(self.captured.left, key)

    def _loaded(self) -> Any:
        if self.function is None:
            raise RuntimeError("nothing is loaded")
        return self.function

    def _fill(self, arena: Arena, recipes: list[list[list[int]]]) -> None:
        if arena.poisoned:  # first, so that L2 is left with what calls read
            for index in range(arena.sets):
                self.cuda.fill(arena.at(index), FILL, arena.poisoned, self.stream)
        for here, at, size in arena.pieces(arena.sent, arena.poisoned):
            self.exchange.receive(here, at, size, arena.sent * arena.sets)
        if arena.sent < arena.set_bytes:
            arena.recipes = recipes
            arena.mix(self.mixer, self.stock)
        self.cuda.synchronize()

    def _hand_back(self, left: Arena, key: int) -> dict[str, Any]:
        """A sum of the returned bytes as they were given, and digests of the other tensors."""
        given = self.exchange.summed(left, self.mixer, key)
        return {"sum": given, "digests": left.digests(self.mixer, key)}


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
