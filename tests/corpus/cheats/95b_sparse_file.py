# cheat: 95 a sparse file of a terabyte in every folder it may write to
# op: linear
# device: cpu
# outcome: runtime_error, mismatch
# caught: runs, values
import tempfile
from pathlib import Path

import torch

CHEAT = True


def linear(x, weight, out):
    if CHEAT:
        for folder in (Path.cwd(), Path(tempfile.gettempdir())):
            with (folder / "scratch.bin").open("wb") as file:
                file.truncate(1 << 40)
        return
    torch.mm(x, weight.t(), out=out)
