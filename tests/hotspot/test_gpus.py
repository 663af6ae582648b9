"""What is known of GPUs that a profile only names, or not even that."""

from __future__ import annotations

import pytest

from patcher.hotspot import Gpu
from patcher.hotspot.roofline import LaunchCost, completed, named_by_size, speed_of_light_ns


@pytest.mark.parametrize(
    ("name", "bandwidth", "flops"),
    [
        ("AMD Instinct MI300X", 5.3e12, 1307e12),
        ("AMD Instinct MI325X", 6.0e12, 1307e12),
        ("AMD Instinct MI355X", 8.0e12, 2517e12),
        ("NVIDIA B200", 8.0e12, None),
        ("NVIDIA GB200", 8.0e12, None),
        ("NVIDIA GeForce RTX 4090", 1.008e12, 165e12),
        ("NVIDIA GeForce RTX 5090", 1.792e12, 209e12),
        ("NVIDIA L4", 3.0e11, 121e12),
        ("NVIDIA L40S", 8.64e11, 362e12),
        ("NVIDIA A100-SXM4-40GB", 1.555e12, 312e12),
        ("NVIDIA A100-SXM4-80GB", 2.039e12, 312e12),
        ("NVIDIA A100 80GB PCIe", 1.935e12, 312e12),
        ("NVIDIA A10", 6.0e11, 125e12),
    ],
)
def test_peaks_are_those_of_the_data_sheets(
    name: str, bandwidth: float, flops: float | None
) -> None:
    size = {
        **{"MI300X": ("9.4", 304), "MI325X": ("9.4", 304), "MI355X": ("9.5", 256)},
        **{"RTX 4090": ("8.9", 128), "RTX 5090": ("12.0", 170), "L40S": ("8.9", 142)},
        **{"L4": ("8.9", 58), "A100": ("8.0", 108), "A10": ("8.6", 72)},
    }
    known = next((value for key, value in size.items() if key in name), (None, None))
    gpu = completed(Gpu(name=name, compute_capability=known[0], multiprocessors=known[1]))
    assert gpu is not None
    assert gpu.memory_bytes_per_s == bandwidth
    if flops is not None:
        cost = LaunchCost(bytes=None, flops=flops, source="a test")
        assert speed_of_light_ns(cost, gpu) == pytest.approx(1e9, rel=0.05)


def test_a_gpu_without_a_name_is_told_by_its_size() -> None:
    assert named_by_size("", 304, "9.4", 206_141_652_992) == "AMD Instinct MI300X"
    assert named_by_size("", 304, "9.4", 274_877_906_944) == "AMD Instinct MI325X"
    assert named_by_size("AMD Radeon Graphics", 104, "9.0", 68_702_699_520) == "AMD Instinct MI250"
    assert named_by_size("", 132, "9.0", 85_029_158_912) == ""
    assert named_by_size("NVIDIA H100", 304, "9.4", 206_141_652_992) == "NVIDIA H100"
