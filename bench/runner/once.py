"""Run a candidate once outside the judge's protocol, for tools that watch a whole process.

`python -P -m patcher_kit.once JOB.json` loads the build, creates each call's tensors, calls the
entry, waits for the device, and writes the result to the job's `told` file. Each tensor has its own
allocation, since a memory checker only detects the edges of allocations. Tensors that are only
written stay uninitialised, so that a read of them is detected. The calls after the `warm` ones lie
between the start and the stop of CUDA's profiler. A job without a path runs no candidate: it shows
whether the tool works. It imports nothing of the project outside this folder.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from . import loading


def run(job: dict[str, Any]) -> None:
    """Make the calls of a job."""
    import torch

    device: str = job["device"]
    if job["path"] is None:
        _begin(device)
        torch.ones(1 << 12, device=device).sum().item()
        _end(device)
        return
    with open(job["data"], "rb") as file:
        sent = bytearray(file.read())
    # PyTorch rejects an empty buffer
    data = torch.frombuffer(sent, dtype=torch.uint8) if sent else torch.empty(0, dtype=torch.uint8)
    function = loading.load(job["path"], job["binding"], job["entry"])
    with torch.inference_mode():
        for call in job["calls"]:
            warm, count = job["warm"], job["warm"] + job["repeat"]
            arguments = [
                [*(_tensor(slot, call, data, device) for slot in call["slots"]), *call["scalars"]]
                for _ in range(count)
            ]
            for each in arguments[:warm]:
                function(*each)
            _begin(device)
            for each in arguments[warm:]:
                function(*each)
            _end(device)


def _tensor(slot: dict[str, Any], call: dict[str, Any], data: Any, device: str) -> Any:
    import torch

    dtype, shape, strides = getattr(torch, slot["dtype"]), slot["shape"], slot["strides"]
    made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if slot["name"] not in call["blank"] and slot["span_bytes"]:
        begin = call["at"] + slot["begin"]
        bytes_ = data[begin : begin + slot["span_bytes"]].clone().view(dtype)
        sent = bytes_.as_strided(shape, strides)
        if dtype.itemsize == 1:  # torch does not copy every dtype of a byte between strides
            made.view(torch.uint8).copy_(sent.view(torch.uint8))
        else:
            made.copy_(sent)
    return made


def _begin(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]


def _end(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def main() -> int:
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    result: dict[str, Any] = {"ok": True}
    try:
        run(job)
    except Exception as error:
        # the candidate's failure is a result: report it
        result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    with open(job["told"] + ".part", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(job["told"] + ".part", job["told"])
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
