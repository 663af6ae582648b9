"""The profiled program: `python -P -m patcher.hotspot.target WORKLOADS_JSON STEPS MODE [OUT ...]`.

It loads the model for the largest of the workloads, which differ in batch alone. For each of them
it warms up and decodes inside a capture range and an NVTX range `decode` of its own. Each step has
a range `step`, and the parts of a layer have ranges `module::CLASS`. `MODE` is `nsys` (profiled
from outside) or `torch`, which writes a file `OUT` of each. An expected error is printed as one
line on stderr.

NVTX ranges are those of the `nvtx` package, which needs neither CUDA nor PyTorch: they cost next to
nothing where no profiler listens.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from patcher.bench import MissingError, PatcherError, Workload
from patcher.bench.engines import Decoder, Decoding, open_decoder, random_prompts
from patcher.bench.engines.child_errors import memory_errors
from patcher.hotspot.capture import ERROR
from patcher.hotspot.names import MODULE, is_whole, is_within, module_name, row_name, with_sizes

WARM_UP_STEPS = 4


def main() -> int:
    """Run the program with the arguments of the command line; return its exit code."""
    workloads = TypeAdapter(list[Workload]).validate_json(sys.argv[1])
    steps, mode, outs = int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    try:
        _profile(workloads, steps, None if mode == "nsys" else [Path(out) for out in outs])
    except PatcherError as error:
        print(ERROR + json.dumps(error.as_dict()), file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _profile(workloads: Sequence[Workload], steps: int, outs: Sequence[Path] | None) -> None:
    """Profile each batch; `outs` are the files of torch.profiler, None under nsys."""
    push, pop = nvtx_ranges()
    largest = max(workloads, key=lambda workload: workload.batch)
    with memory_errors(largest):
        engine = open_decoder(largest)
    for index, workload in enumerate(workloads):
        with memory_errors(workload):
            prompts = random_prompts(workload, engine.vocab_size, workload.seed)
            decoding = engine.prefill(prompts)
            engine.decode(decoding, WARM_UP_STEPS)
            if outs is None:
                with _modules_of(engine, push, pop), capture_range(), nvtx_range("decode"):
                    decode_steps(engine, decoding, steps)
                    torch.cuda.synchronize()
            else:
                with_torch_profiler(engine, decoding, steps, outs[index])
            engine.release(decoding)


def nvtx_ranges() -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """Functions that begin and end an NVTX range of this thread.

    Raises:
        MissingError: the nvtx package is not installed.
    """
    try:
        import nvtx
    except ModuleNotFoundError:
        raise MissingError(
            "nvtx, which marks ranges, is not installed", "pip install 'patcher[profile]'"
        ) from None
    return nvtx.push_range, nvtx.pop_range


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """An NVTX range of this thread."""
    push, pop = nvtx_ranges()
    push(name)
    try:
        yield
    finally:
        pop()


def decode_steps(engine: Decoder, decoding: Decoding, steps: int) -> None:
    """Decode with an NVTX range `step` around each step."""
    for _ in range(steps):
        with nvtx_range("step"):
            engine.decode(decoding, 1)


def _modules_of(
    engine: Decoder, push: Callable[[str], Any], pop: Callable[[], Any]
) -> AbstractContextManager[None]:
    """Ranges around modules, for engines that call modules; a compiled engine does not."""
    model = getattr(engine, "model", None)
    return nullcontext() if model is None else module_ranges(model, push, pop)


@contextmanager
def capture_range() -> Iterator[None]:
    """The range that nsys records with `-c cudaProfilerApi`."""
    cuda: Any = torch.cuda
    runtime = cuda.cudart()
    torch.cuda.synchronize()
    runtime.cudaProfilerStart()
    try:
        yield
    finally:
        torch.cuda.synchronize()
        runtime.cudaProfilerStop()


@contextmanager
def module_ranges(
    model: torch.nn.Module, push: Callable[[str], Any], pop: Callable[[], Any]
) -> Iterator[None]:
    """Put `module::CLASS` ranges around decoder layers, their parts, and norms.

    An eager norm is a handful of generic elementwise kernels, which only its range identifies. One
    within a part of a layer has its own name in it, see `module_name`.
    """
    chosen: dict[int, tuple[str, torch.nn.Module]] = {}
    within: set[int] = set()
    for path, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm"):
            chosen[id(module)] = path, module
        if type(module).__name__.endswith("DecoderLayer"):
            parts = dict(module.named_children())
            chosen |= {id(part): (name, part) for name, part in parts.items()}
            chosen[id(module)] = path, module
            inside = [each for part in parts.values() for each in part.modules()]
            within |= {id(each) for each in inside} - {id(part) for part in parts.values()}
    handles: list[Any] = []
    for path, module in chosen.values():
        name = module_name(module, path, id(module) in within)
        handles.append(module.register_forward_pre_hook(_pre_hook(push, name)))
        handles.append(module.register_forward_hook(_post_hook(pop)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _pre_hook(push: Callable[[str], Any], name: str) -> Callable[[Any, Any], None]:
    """A hook that opens a range. It returns None, since a result would replace the arguments."""
    within = is_within(name)

    def enter(_module: Any, arguments: Any) -> None:
        push(with_sizes(name, arguments[0].shape) if within and arguments else name)

    return enter


def _post_hook(pop: Callable[[], Any]) -> Callable[[Any, Any, Any], None]:
    """A hook that closes a range."""

    def leave(_module: Any, _arguments: Any, _output: Any) -> None:
        pop()

    return leave


def with_torch_profiler(engine: Decoder, decoding: Decoding, steps: int, out: Path) -> None:
    """Profile with torch.profiler and write the result to `out`.

    On a GPU it is a Kineto trace. On a CPU it is JSON with `steps` and `rows` of operators by self
    time; each norm module is one row that includes all operators it calls.
    """
    from torch.profiler import ProfilerActivity, profile

    if engine.workload.device == "cuda":
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            engine.decode(decoding, steps)
            engine.synchronize()
        recorded.export_chrome_trace(str(out))
        return
    ranges: list[Any] = []
    push_nvtx, pop_nvtx = nvtx_ranges()

    def push(name: str) -> None:
        push_nvtx(name)
        ranges.append(torch.profiler.record_function(name))
        ranges[-1].__enter__()

    def pop() -> None:
        ranges.pop().__exit__(None, None, None)
        pop_nvtx()

    cpu_operators = profile(activities=[ProfilerActivity.CPU])
    with _modules_of(engine, push, pop), nvtx_range("decode"), cpu_operators as cpu:
        decode_steps(engine, decoding, steps)
    events: Any = cpu.events()
    out.write_text(json.dumps({"steps": steps, "rows": cpu_rows(events)}), encoding="utf-8")


def cpu_rows(events: Iterable[Any]) -> list[dict[str, Any]]:
    """Sum the self time (ns) of CPU operators by row; a norm module is one row."""
    times: dict[str, list[int]] = {}
    for event in events:
        if event.name.startswith(MODULE):
            if is_whole(event.name):
                times.setdefault(event.name, []).append(round(event.cpu_time_total * 1e3))
            continue
        module = _innermost_module(event)
        if module is None or not is_whole(module):
            spent = round(event.self_cpu_time_total * 1e3)
            times.setdefault(row_name(module, event.name), []).append(spent)
    return _rows(times)


def _innermost_module(event: Any) -> str | None:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(MODULE):
            return str(parent.name)
        parent = parent.cpu_parent
    return None


def _rows(times: dict[str, list[int]]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "instances": len(each),
            "total_ns": sum(each),
            "median_ns": float(statistics.median(each)),
            "min_ns": min(each),
            "max_ns": max(each),
        }
        for name, each in times.items()
        if sum(each)
    ]


if __name__ == "__main__":
    sys.exit(main())
