"""What the agents should know of the hardware that their kernels are judged on."""

from __future__ import annotations

import platform

from patcher.bench import MissingError
from patcher.bench.judge.ceilings import ceilings
from patcher.bench.machine.environment import describe


def hardware_facts(kind: str) -> str:
    """What the agents should know of this machine's `cpu` or `cuda`, in words.

    Raises:
        MissingError: there is no CUDA device.
    """
    if kind == "cpu":
        return (
            f"{describe('cpu').device} ({platform.machine()}); called from Python, "
            "so the fixed cost of a call counts. The same source must also compile and run on "
            "x86-64 without AVX-512 and on 64-bit Arm"
        )
    import torch

    if not torch.cuda.is_available():
        raise MissingError(
            "this machine has no CUDA device to judge on",
            "use a GPU host, or have it judged on one: --judge exchange:DIR",
        )
    device = torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability()
    best = ceilings("cuda")
    return (
        f"{device.name}: compute capability {major}.{minor}, {device.multi_processor_count} "
        f"multiprocessors with {device.shared_memory_per_multiprocessor >> 10} KiB of shared "
        f"memory and {device.max_threads_per_multi_processor} threads each, "
        f"{device.total_memory / 2**30:.0f} GiB, L2 {device.L2_cache_size >> 20} MiB. Measured "
        f"on it: a large copy {best.memory_gb_s:,.0f} GB/s (read plus written), matmuls "
        f"{max(best.flops.values()) / 1e12:,.0f} TFLOP/s at best, the shortest kernel "
        f"{best.launch_us:.2g} us. Timed as one call per buffer set inside a CUDA graph: no "
        "allocation, no synchronisation and no default-stream launch in a call"
    )
