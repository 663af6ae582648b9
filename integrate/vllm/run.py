"""One run of vLLM, as a program: `python -P -m patcher.integrate.vllm.run JSON`.

The plugin installs patches, as in serving; this program itself patches only for `own`. It decodes
inside a CUDA profiler range, so that nsys records only steady steps.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch

from patcher.bench import Record, Workload, load_op
from patcher.bench.engines import Decoding
from patcher.integrate.activation import contract_guards
from patcher.integrate.counts import CallCounters, GraphWatch
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.measuring import activated
from patcher.integrate.receipts import Receipt
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.roles.experts_sum import Reduce

MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
}
WARM_UP_STEPS = 4
KV_CACHE_BYTES = 4 << 30
"""A fixed size, since vLLM would attribute other processes' allocations to itself."""
OWN = "own"
"""The patch id for dispatching the engine's own kernel."""


class EngineRun(Record):
    """The parameters of a run."""

    workload: Workload
    mode: Literal["eager", "piecewise", "full"]
    out: str
    """The file for the result."""
    steps: int = 16
    """Decode steps per window."""
    windows: int = 1
    own: bool = False
    """Dispatch the engine's own `reduce_grouped` as if it were a patch."""
    memory_share: float = 0.6
    """Share of the GPU's memory, which must be free at the start."""
    engines: int = 1
    """Engines to run in turn; with more than one, each has its own worker process."""


class EngineResult(Record):
    """The result of a run."""

    tokens: list[list[list[int]]]
    """Greedy tokens by engine and request."""
    window_s: list[float]
    """Duration of each window in seconds."""
    calls: dict[str, int]
    """Calls of patched kernels in the last engine's windows, by patch id, in this process."""
    fallbacks: dict[str, int]
    """Fallbacks by patch id and reason."""


def main() -> int:
    """Run with the parameters of the command line, and write the result."""
    plan = EngineRun.model_validate_json(sys.argv[1])
    with ExitStack() as stack:
        own = stack.enter_context(_own()) if plan.own else None
        result = _run(plan, own)
    Path(plan.out).write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return 0


def _run(plan: EngineRun, own: CallCounters | None) -> EngineResult:
    from patcher.bench.engines.vllm import VllmEngine

    tokens, window_s = [], []
    before = after = {}
    for _ in range(plan.engines):
        chosen = {**MODES[plan.mode], "gpu_memory_utilization": plan.memory_share}
        chosen["kv_cache_memory_bytes"] = KV_CACHE_BYTES
        if plan.mode != "eager":  # by default 83 more sizes are recorded for prefill, unused here
            chosen["max_cudagraph_capture_size"] = plan.workload.batch
        engine = VllmEngine(plan.workload, chosen, one_process=plan.engines == 1)
        decoding = engine.prefill(engine.prompts(plan.workload.seed))
        engine.decode(decoding, WARM_UP_STEPS)
        before = _counts(own)
        with _profiled():
            window_s += [_window(engine, decoding, plan.steps) for _ in range(plan.windows)]
        after = _counts(own)
        tokens.append(decoding.tokens().tolist())
        engine.close()
    calls, fallbacks = (
        {key: after[kind][key] - before[kind].get(key, 0) for key in after[kind]}
        for kind in ("calls", "fallbacks")
    )
    return EngineResult(
        tokens=tokens,
        window_s=window_s,
        calls={key: count for key, count in calls.items() if count},
        fallbacks={key: count for key, count in fallbacks.items() if count},
    )


def _window(engine: Any, decoding: Decoding, steps: int) -> float:
    engine.synchronize()
    begin = time.perf_counter()
    engine.decode(decoding, steps)
    engine.synchronize()
    return time.perf_counter() - begin


class _profiled:
    """The range that `nsys -c cudaProfilerApi` records."""

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        cuda: Any = torch.cuda
        cuda.cudart().cudaProfilerStart()

    def __exit__(self, *exc: object) -> None:
        torch.cuda.synchronize()
        cuda: Any = torch.cuda
        cuda.cudart().cudaProfilerStop()


def _counts(own: CallCounters | None) -> dict[str, dict[str, int]]:
    """Calls and fallbacks of this process until now."""
    books = [own] if own is not None else []
    books += [item.book for item in activated("vllm").installed]
    receipts = [Receipt.of(book) for book in books]
    return {
        "calls": {receipt.patch_id: receipt.total_calls for receipt in receipts},
        "fallbacks": {
            f"{receipt.patch_id}: {reason}": count
            for receipt in receipts
            for reason, count in receipt.fallbacks.items()
        },
    }


class _own:
    """A/A: a dispatcher around `reduce_grouped` with `reduce_grouped` as its kernel."""

    def __enter__(self) -> CallCounters:
        matmul = sources.module("triton_kernels.matmul_ogs")
        original = matmul.reduce_grouped
        plain = matmul.FusedActivation()
        epilogue = matmul.Epilogue(matmul.FnSpecs.default(), (), (), False)

        def kernel(rows: Any, row_map: Any, _scales: Any, output: Any) -> None:
            original(rows.unsqueeze(1), row_map, output.unsqueeze(0), None, plain, epilogue)

        self._book = CallCounters(OWN, "0" * 64)
        self._watch = GraphWatch([self._book])
        self._point = Reduce()
        contract = load_op(Reduce.op).contract
        guards = contract_guards(contract, "cuda", contract.dtype_choices())
        self._point.install(Dispatcher(Reduce.op, kernel, guards, self._book, watch=self._watch))
        self._watch.install()
        return self._book

    def __exit__(self, *exc: object) -> None:
        self._watch.remove()
        self._point.remove()


if __name__ == "__main__":
    sys.exit(main())
