"""The process that runs a kernel: `python -P -m bench.judge.runner WORKDIR`.

It knows no expected value, no seed and no key. Commands come as JSON lines on stdin, inputs as
bytes in a file; replies go to a descriptor of their own as JSON lines, outputs as bytes to another
file. What the kernel prints goes to a log.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# bound before any candidate is loaded
_clock = time.perf_counter_ns


def main() -> None:
    folder = Path(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    session = _Session(folder)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(session, f"do_{command.pop('do')}")(**command)
            reply = {"ok": True, **answer}
        except Exception as error:
            # the candidate's own failure is an outcome: tell it and go on
            reply = {
                "ok": False,
                "kind": type(error).__name__,
                "error": f"{type(error).__name__}: {error}"[:4000],
                "trace": "".join(traceback.format_exception(error)[-4:])[-4000:],
            }
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


class _Session:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.function: Callable[..., Any] | None = None
        self.device = "cpu"
        self.written: list[str] = []
        self.graphs: dict[str, Any] = {}

    def do_start(self, device: str, threads: int | None, written: list[str]) -> dict[str, Any]:
        """Import torch and wake the device, before any foreign code."""
        import torch

        torch.manual_seed(0)
        self.device, self.written = device, written
        if threads is not None:
            torch.set_num_threads(threads)
        if device == "cuda":
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
        return {"threads": torch.get_num_threads()}

    def do_candidate(self, built: dict[str, Any], entry: str) -> dict[str, Any]:
        from bench.toolchains import Built, load

        self.function = load(Built(**built), entry)
        return {}

    def do_baseline(self, op: str, name: str) -> dict[str, Any]:
        from bench.op import load_op

        self.function = load_op(op).baselines[name](self.device)
        self.graphs.clear()
        return {}

    def do_run(self, layout: dict[str, Any], scalars: list[float], sets: int) -> dict[str, Any]:
        """Call once per set, each call timed by itself; hand back every slot."""
        import torch

        plan, tensors, buffers = self._receive(layout, sets)
        times = []
        function = self._loaded()
        with torch.inference_mode():
            for arguments in tensors:
                self._synchronize()
                begin = _clock()
                result = function(*arguments.values(), *scalars)
                self._synchronize()
                times.append(_clock() - begin)
                self._take_returned(result, arguments)
        self._hand_back(plan, buffers, sets)
        return {"times_ns": times}

    def do_graph(
        self, layout: dict[str, Any], scalars: list[float], sets: int, label: str
    ) -> dict[str, Any]:
        """Capture one call per set in a CUDA graph on buffers that stay; replays come with
        `do_replay`.
        """
        import torch

        plan, tensors, buffers = self._receive(layout, sets)
        function = self._loaded()
        with torch.inference_mode():
            stream: Any = torch.cuda.Stream
            side = stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    function(*tensors[0].values(), *scalars)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            results = []
            with torch.cuda.graph(graph):
                for arguments in tensors:
                    results.append(function(*arguments.values(), *scalars))
            torch.cuda.synchronize()
        self.graphs = {label: (graph, plan, tensors, buffers, results)}
        return {}

    def do_replay(self, label: str, sets: int) -> dict[str, Any]:
        """New values into the captured buffers, then one timed replay."""
        import numpy as np
        import torch

        graph, plan, tensors, buffers, results = self.graphs[label]
        source = np.memmap(
            self.folder / "in.bin", dtype=np.uint8, mode="r", shape=(sets, plan.set_bytes)
        )
        for index in range(sets):
            block = torch.from_numpy(np.array(source[index]))
            for slot in plan.slots:
                buffers[index][slot.name].copy_(block[slot.offset : slot.offset + slot.slot_bytes])
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        wall = _clock()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        wall = _clock() - wall
        with torch.inference_mode():
            for arguments, result in zip(tensors, results, strict=True):
                self._take_returned(result, arguments)
        self._hand_back(plan, buffers, sets)
        return {"times_ns": [begin.elapsed_time(end) * 1e6 / sets], "wall_ns": wall}

    def _loaded(self) -> Callable[..., Any]:
        if self.function is None:
            raise RuntimeError("nothing is loaded")
        return self.function

    def _synchronize(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def _receive(
        self, layout: dict[str, Any], sets: int
    ) -> tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]:
        import numpy as np
        import torch

        from bench.judge.blob import RED_ZONE, Layout

        plan = Layout(**layout)
        source = np.memmap(
            self.folder / "in.bin", dtype=np.uint8, mode="r", shape=(sets, plan.set_bytes)
        )
        tensors, buffers = [], []
        for index in range(sets):
            block = torch.from_numpy(np.array(source[index]))
            held, views = {}, {}
            for slot in plan.slots:
                buffer = block[slot.offset : slot.offset + slot.slot_bytes].to(
                    self.device, copy=True
                )
                data = buffer[RED_ZONE : RED_ZONE + slot.data_bytes]
                held[slot.name] = buffer
                views[slot.name] = data.view(getattr(torch, slot.dtype)).view(slot.shape)
            buffers.append(held)
            tensors.append(views)
        return plan, tensors, buffers

    def _take_returned(self, result: Any, arguments: dict[str, Any]) -> None:
        """A baseline may return what the contract says is written; put it where it belongs,
        untimed.
        """
        if isinstance(result, tuple) and len(result) == len(self.written):
            for name, value in zip(self.written, result, strict=True):
                if value is not arguments[name]:
                    arguments[name].copy_(value)

    def _hand_back(self, plan: Any, buffers: list[dict[str, Any]], sets: int) -> None:
        import numpy as np

        target = np.memmap(
            self.folder / "out.bin", dtype=np.uint8, mode="w+", shape=(sets, plan.set_bytes)
        )
        for index in range(sets):
            for slot in plan.slots:
                target[index, slot.offset : slot.offset + slot.slot_bytes] = (
                    buffers[index][slot.name].cpu().numpy()
                )
        target.flush()


if __name__ == "__main__":
    main()
