"""A patch as a flashinfer-bench dataset: Definition, Solution, Workloads and Traces.

The schema is that of flashinfer-bench 0.1.2 (`data/definition.py`, `solution.py`, `workload.py`,
`trace.py`), with the folders of `data/trace_set.py` and the builders of `compile/builders/`.

The schema has these limits:

- An input cannot be an output ("names must not overlap"). A tensor that the contract updates in
  place becomes an input `x` and an output `x_out`, and the Solution copies before it calls the
  kernel. The Traces time the kernel without these copies; flashinfer-bench would include them.
- A Definition has one dtype per tensor, here that of the sweep.
- `reference_latency_ms` is meant for the Definition's reference, which is not served. Here it is
  the latency of the strongest baseline, which the log names.
- `correctness` consists of two maxima. The judge compares distributions and stores no maxima, so
  both are NaN. flashinfer-bench's `apply` ignores such Traces until `flashinfer-bench run` has
  measured its own.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from patcher.bench import (
    Candidate,
    Contract,
    Evaluation,
    Language,
    Op,
    Point,
    Sweep,
    UsageError,
    VerificationError,
    load_op,
)
from patcher.integrate.formats import ExportedFiles, Files, device_of
from patcher.integrate.formats.flashinfer_definition import definition_of
from patcher.integrate.formats.flashinfer_solution import header_name, solution_of
from patcher.integrate.patch import Patch


def write(patch: Patch, sweep_name: str | None) -> ExportedFiles:
    """The files of the dataset.

    Raises:
        UsageError: the evidence does not name its sweep, the schema lacks a dtype, or the reference
            or the source is not self-contained.
        VerificationError: the patch is damaged, or the library's op has changed since.
    """
    candidate, contract, evidence = patch.candidate(), patch.contract, patch.evaluation
    op = load_op(candidate.op)
    if not op.contract.same_terms(contract):
        raise VerificationError(
            f"the contract of {op.name} has changed since the patch was made",
            "build the patch again: `patcher bundle`",
        )
    sweep = sweep_of(contract, evidence, device_of(candidate, evidence), sweep_name)
    definition = definition_of(op, sweep)
    solution = solution_of(candidate, contract, definition)
    left_out = _left_out(candidate, contract, sweep, evidence)
    name, kind = definition["name"], definition["op_type"]
    files: Files = {}
    workloads, traces = [], []
    for timing in evidence.timings:
        point = Point(axes=timing.axes, dtypes=sweep.dtypes)
        workload, blob = _workload(op, definition, point)
        files |= blob
        workloads.append({"definition": name, "workload": workload})
        traces.append(
            {
                "definition": name,
                "workload": workload,
                "solution": solution["name"],
                "evaluation": _evaluation(patch, evidence, timing.axes),
            }
        )
    files |= {
        f"definitions/{kind}/{name}.json": _json(definition),
        f"solutions/patcher/{kind}/{name}/{solution['name']}.json": _json(solution),
        f"workloads/{kind}/{name}.jsonl": _jsonl(workloads),
        f"traces/{kind}/{name}.jsonl": _jsonl(traces),
    }
    return ExportedFiles(
        files=files,
        source=header_name(candidate),
        left_out=tuple(left_out),
    )


def sweep_of(contract: Contract, evidence: Evaluation, device: str, name: str | None) -> Sweep:
    """The sweep that contains the timed points.

    Raises:
        UsageError: no sweep fits, or several do and neither the evidence nor `name` selects one.
    """
    timed = [timing.axes for timing in evidence.timings]
    fitting = [
        sweep
        for sweep in contract.sweeps
        if sweep.device == device
        and all(axes in [p.axes for p in sweep.points()] for axes in timed)
    ]
    wanted = name or evidence.sweep
    if wanted is not None:
        fitting = [sweep for sweep in fitting if sweep.name == wanted]
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(sweep.name for sweep in contract.sweeps)
    if not fitting:
        raise UsageError(
            f"the patch's timings belong to no sweep {wanted or ''}", f"its sweeps: {known}"
        )
    raise UsageError(
        f"the timings fit {' and '.join(sweep.name for sweep in fitting)}, which differ in dtypes",
        "choose one with --sweep",
    )


def _workload(op: Op, definition: Mapping[str, Any], point: Point) -> tuple[dict[str, Any], Files]:
    """One point of the sweep; a blob holds values that only the op's inputs.py can make."""
    contract = op.contract
    inputs: dict[str, Any] = {}
    blobs: dict[str, Any] = {}
    var = {
        axis: point.axes[axis] for axis, spec in definition["axes"].items() if "value" not in spec
    }
    label = "_".join(f"{axis}{size}" for axis, size in var.items())
    path = f"blob/workloads/{definition['op_type']}/{definition['name']}/{label}.safetensors"
    for tensor in contract.tensors:
        if tensor.access == "write":
            continue
        inputs[tensor.name] = {"type": "random"}
        if tensor.values == "given":
            inputs[tensor.name] = {"type": "safetensors", "path": path, "tensor_key": tensor.name}
            blobs[tensor.name] = None
    for scalar in contract.scalars:
        value = int(scalar.value) if scalar.type == "int" else scalar.value
        inputs[scalar.name] = {"type": "scalar", "value": value}
    files: Files = {}
    if blobs:
        import torch
        from safetensors.torch import save

        tensors = op.inputs.make(point, torch.Generator("cpu").manual_seed(0), "normal")
        files[path] = save({name: tensors[name].contiguous() for name in blobs})
    name = f"{definition['name']}/{label}"
    identity = str(uuid.uuid5(uuid.NAMESPACE_URL, f"patcher:{name}"))
    return {"axes": var, "inputs": inputs, "uuid": identity}, files


def _evaluation(patch: Patch, evidence: Evaluation, axes: dict[str, int]) -> dict[str, Any]:
    [timing] = [each for each in evidence.timings if each.axes == axes]
    machine = evidence.environment
    libs = dict(machine.packages) if machine else {}
    if machine:
        libs |= {"python": machine.python}
        libs |= {"driver": machine.driver} if machine.driver else {}
        libs |= {"compiler": machine.compiler} if machine.compiler else {}
    log = (
        f"Judged by patcher, not by flashinfer-bench. latency_ms: median of {timing.calls} calls "
        f"of the kernel in place ({evidence.timing_method or 'method not recorded'}). "
        "reference_latency_ms and speedup_factor: against the baseline "
        f"{evidence.baseline or '(not recorded)'}, not against the Definition's reference; "
        f"95 % interval [{timing.speedup_low:.4f}, {timing.speedup_high:.4f}] over {timing.pairs} "
        "pairs. Clocks: "
        + (machine.clocks if machine else "not recorded")
        + ". The timestamp is the "
        "patch's. Errors: NaN means "
        "not recorded; the outputs were compared with float64, see correctness.extra."
    )
    checks = {check.name: check.detail for check in evidence.checks}
    return {
        "status": "PASSED",
        "environment": {"hardware": machine.device if machine else "not recorded", "libs": libs},
        "timestamp": patch.manifest.provenance.created,
        "log": log,
        "correctness": {
            "max_relative_error": "NaN",
            "max_absolute_error": "NaN",
            "extra": {"judged_by": "patcher", "checks": checks},
        },
        "performance": {
            "latency_ms": timing.candidate_us / 1e3,
            "reference_latency_ms": timing.baseline_us / 1e3,
            "speedup_factor": timing.speedup,
        },
    }


def _left_out(
    candidate: Candidate, contract: Contract, sweep: Sweep, evidence: Evaluation
) -> list[str]:
    """What the schema cannot express of this patch, one sentence each."""
    limits = []
    if updated := [each.name for each in contract.tensors if each.access == "update"]:
        limits.append(
            f"in place: {', '.join(updated)} cannot be both input and output, so the Solution "
            "copies first; the Traces time only the kernel, without the copies"
        )
    limits.append(
        f"the Traces' speedups are against {evidence.baseline or 'the strongest baseline'}, their "
        "errors are not recorded (NaN): flashinfer-bench must run the kernel before it applies it"
    )
    if len(contract.dtype_choices()) > 1:
        dtypes = ", ".join(f"{symbol}={dtype}" for symbol, dtype in sweep.dtypes.items())
        limits.append(f"dtypes other than {dtypes}: a Definition has one dtype per tensor")
    if scales := [each.name for each in contract.tensors if each.scale_of]:
        limits.append(f"block scales: {', '.join(scales)} is compared by itself, not as a factor")
    limits.append("strides, alignment, graph safety, the engine, the patch point, other shapes")
    if candidate.language in (Language.CPP, Language.CUDA):
        build = next((each.detail for each in evidence.checks if each.name == "build"), "patcher's")
        limits.append(f"compiler flags: flashinfer-bench uses its own instead of {build}")
    if any(scalar.type == "float" for scalar in contract.scalars):
        limits.append("float64 scalars: they are declared as float32")
    return limits


def _json(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode()


def _jsonl(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records).encode()
