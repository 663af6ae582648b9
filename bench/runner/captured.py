"""Buffer sets of a runner, and CUDA graphs of single calls on them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

from . import cudart

NAME_LIMIT = 200
SPAN_LIMIT = 1000
_move = ctypes.memmove  # bound before any candidate is loaded


class Arena:
    """Buffer sets on a GPU, side by side in one allocation, and the tensors of each call.

    The first `poisoned` bytes of each set hold poison before a call, the next `sent` ones come from
    the judge, and the first `returned` bytes go back. With `bare` there are only bytes and no
    tensors. `memory` gives a tensor of so many bytes, if not PyTorch's allocator does.
    """

    def __init__(
        self,
        plan: dict[str, Any],
        sets: int,
        device: str = "cuda",
        bare: bool = False,
        memory: Callable[[int], Any] | None = None,
    ) -> None:
        import torch

        self.set_bytes, self.sets = plan["set_bytes"], sets
        self.poisoned, self.sent = plan["poisoned_bytes"], plan["sent_bytes"]
        self.returned = plan["returned_bytes"]
        size = self.set_bytes * sets
        if memory is None:
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            self.bytes = memory(size)
        self.pointer = self.bytes.data_ptr()
        self.slots = [slot for slot in plan["slots"] if slot["travel"] in ("checked", "mixed")]
        self.constants = [slot for slot in plan["slots"] if slot["constant"]]
        self.recipes: list[list[list[int]]] = []
        self.arguments = []
        for index in range(0 if bare else sets):
            block = self.block(index)
            self.arguments.append([_view(block, slot) for slot in plan["slots"]])

    def at(self, index: int) -> int:
        """Address of a set."""
        return int(self.pointer + index * self.set_bytes)

    def block(self, index: int) -> Any:
        """Bytes of a set, uint8."""
        return self.bytes[index * self.set_bytes : (index + 1) * self.set_bytes]

    def pieces(self, width: int, begin: int = 0) -> list[tuple[int, int, int]]:
        """Where `width` bytes of each set from `begin` on are, and where they lie side by side:
        (address, place, bytes)."""
        if width == self.set_bytes:
            return [(self.pointer, 0, width * self.sets)]
        return [(self.at(index) + begin, index * width, width) for index in range(self.sets)]

    def mix(self, mixer: Any, stock: Any) -> None:
        """Fill the tensors that are not sent, by the recipes."""
        for index, recipes in enumerate(self.recipes):
            block = self.block(index)
            mixer.surround(block[self.poisoned + self.sent :])
            slots = [slot for slot in self.slots if slot["travel"] == "mixed"]
            for slot, recipe in zip(slots, recipes, strict=True):
                mixer.mix(block[slot["begin"] : slot["begin"] + slot["span_bytes"]], stock, recipe)

    def digests(self, mixer: Any, key: int) -> list[list[int]]:
        """Digests of the slots that do not go back, for each set."""
        return [
            [mixer.digest(self._slot(index, slot), key) for slot in self.slots]
            for index in range(self.sets)
        ]

    def _slot(self, index: int, slot: dict[str, Any]) -> Any:
        return self.block(index)[slot["offset"] : slot["offset"] + slot["slot_bytes"]]


def _view(block: Any, slot: dict[str, Any]) -> Any:
    import torch

    dtype = getattr(torch, slot["dtype"])
    data = block[slot["begin"] : slot["begin"] + slot["span_bytes"]]
    return data.view(dtype).as_strided(slot["shape"], slot["strides"])


class MappedSet:
    """One buffer set on a CPU, in a mapping by itself, which the judge shares.

    The mappings lie at new places for each block, with gaps of random sizes between them. A second
    one takes what the set holds when a call returns.
    """

    def __init__(self, plan: dict[str, Any], descriptor: int, index: int, sets: int) -> None:
        self._gap = mmap.mmap(-1, (1 + os.urandom(1)[0]) * mmap.PAGESIZE, prot=0)
        block, snapshot = (_mapped(plan, descriptor, at) for at in (index, sets + index))
        self.arguments = [_view(block, slot) for slot in plan["slots"]]
        self._copy = (snapshot.data_ptr(), block.data_ptr(), plan["returned_bytes"])
        self._kept = snapshot

    def keep(self) -> None:
        """Copy the returned bytes to the second mapping."""
        _move(*self._copy)


def _mapped(plan: dict[str, Any], descriptor: int, index: int) -> Any:
    import torch

    pitch = -(-plan["set_bytes"] // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    mapped = mmap.mmap(descriptor, pitch, flags=flags, offset=index * pitch)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=plan["set_bytes"])


class Captured:
    """Graphs of single calls, and a larger graph composed of them.

    Args:
        cuda: the runtime.
        arena: the calls' buffer sets.
        snapshot: as much memory for copies.
        children: handles of the graphs.
        stream: the stream to launch on.
        keep: what owns the graphs.
    """

    def __init__(
        self,
        cuda: Any,
        arena: Arena,
        snapshot: Arena,
        children: list[int],
        stream: int,
        keep: object,
    ) -> None:
        import torch

        self.cuda, self.arena, self.stream = cuda, arena, stream
        self.children, self._keep = children, keep
        self.snapshot = snapshot
        self.flush = torch.empty(2 * cuda.l2_bytes(), dtype=torch.uint8, device="cuda")
        self._sum = torch.Tensor.sum
        self._words = [
            each.bytes.view(torch.int64).view(each.sets, -1)[:, : each.returned // 8]
            for each in (arena, snapshot)
        ]
        self._composition: Any = None
        self._events: list[tuple[int, int]] = []
        self._mode = "whole"

    def compose(self, mode: str, order: list[int]) -> None:
        """Compose the calls of `order` into one graph; see `Session.do_compose` for the modes."""
        self.close()
        size, sets, target = self.arena.set_bytes, self.arena.sets, self.snapshot.pointer
        self._mode, self._calls = mode, len(order)
        needed = {"whole": 1, "verified": 0, "cold": len(order)}[mode]
        while len(self._events) < needed:
            self._events.append((self.cuda.event(), self.cuda.event()))
        self._used = self._events[:needed]
        if mode == "whole":
            self._composition = cudart.whole(self.cuda, self.children, order, self._used[0])
        elif mode == "verified":
            self.cuda.copy_async(target, self.arena.pointer, size * sets, self.stream)
            copies = [(target + index * size, self.arena.at(index), size) for index in range(sets)]
            self._composition = cudart.verified(self.cuda, self.children, order, copies)
        else:
            flush = (self.flush.data_ptr(), self.flush.numel())
            self._composition = cudart.cold(self.cuda, self.children, order, flush, self._used)
        self.cuda.forget_persisting_lines()
        self._composition.ready(self.stream)
        self.cuda.synchronize()

    def close(self) -> None:
        """Free the composed graph."""
        if self._composition is not None:
            self._composition.close()
            self._composition = None

    def launch(self) -> list[float]:
        """Launch the graph and wait; return times in nanoseconds."""
        self._composition.launch(self.stream)
        self.cuda.synchronize()
        times = [self.cuda.elapsed_ns(*pair) for pair in self._used]
        return [times[0] / self._calls] if self._mode == "whole" else times

    def launch_traced(self) -> tuple[list[float], list[list[Any]]]:
        """Launch under CUPTI: times in nanoseconds, and the longest spans [name, begin, end]."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            times = self.launch()
        profiler: Any = seen.profiler
        spans = [
            [event.name()[:NAME_LIMIT], event.start_ns(), event.end_ns()]
            for event in profiler.kineto_results.events()
            if "CUDA" in str(event.device_type()) and event.duration_ns() > 0
        ]
        return times, sorted(spans, key=lambda span: span[1] - span[2])[:SPAN_LIMIT]

    def follow(self, index: int, other: int, call: Callable[[], None], stream: Any) -> None:
        """Run `call` once as a separate graph, on a set that holds another set's values.

        The set keeps its own constants (weights). All its own values lie in `snapshot`.
        """
        import torch

        self._lend(index, other)
        self.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, stream=stream):
            call()
        graph.replay()
        self.cuda.synchronize()
        self._mode = "follow"

    def _lend(self, index: int, other: int) -> None:
        """Copy another set's values into a set, and its own to `snapshot`; constants stay."""
        arena, snapshot, size = self.arena, self.snapshot, self.arena.set_bytes
        self.cuda.copy_async(snapshot.at(index), arena.at(index), size, self.stream)
        self.cuda.copy_async(arena.at(index), arena.at(other), size, self.stream)
        for slot in arena.constants:
            here, size = slot["offset"], slot["slot_bytes"]
            self.cuda.copy_async(
                arena.at(index) + here, snapshot.at(index) + here, size, self.stream
            )

    def fingerprint(self) -> int:
        """Sum of the returned bytes as int64 words."""
        return int(self._sum(self._words[self._mode == "verified"]).item())

    @property
    def left(self) -> Arena:
        """Buffers after the calls, or their copies after each call."""
        return self.snapshot if self._mode == "verified" else self.arena
