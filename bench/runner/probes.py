"""Commands of a runner that tell how the device is: exact arithmetic, and whether it is idle."""

from __future__ import annotations

import time
from typing import Any

# bound before any candidate is loaded, so that later patches have no effect here
_clock = time.perf_counter_ns


class Probing:
    """The commands of a trusted runner about the device."""

    device: str
    cuda: Any
    stream: int
    probe: Any = None

    def do_canary(self) -> dict[str, Any]:
        """Digest of exact arithmetic on the device, which changes if the device is damaged."""
        import torch

        x = torch.arange(1 << 20, dtype=torch.int64, device=self.device)
        y = (x * 2654435761 % 4294967291).view(1024, 1024)
        z = (y.to(torch.float64) % 257) @ (y.t().to(torch.float64) % 263)
        return {"digest": f"{int(y.sum()):x}-{int(z.sum()):x}"}

    def do_idle(self, rounds: int = 16) -> dict[str, Any]:
        """CUDA: nanoseconds of each of some copies of half of L2, which other work would delay."""
        if self.probe is None:
            import torch

            self.probe = torch.zeros(self.cuda.l2_bytes(), dtype=torch.uint8, device="cuda")
        half, begin, times = self.probe.numel() // 2, self.probe.data_ptr(), []
        for _ in range(rounds):
            self.cuda.synchronize()
            before = _clock()
            self.cuda.copy_async(begin, begin + half, half, self.stream)
            self.cuda.synchronize()
            times.append(_clock() - before)
        return {"times_ns": times}
