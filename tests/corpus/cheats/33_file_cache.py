# cheat: 33 keeps its answers in the temporary folder, for later calls and later processes
# op: linear
# device: cpu
# outcome: mismatch, runtime_error
# caught: values, timed outputs, determinism, runs
import tempfile
from pathlib import Path

import torch

CHEAT = True
FOLDER = Path(tempfile.gettempdir()) / "linear_autotune"


def linear(x, weight, out):
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{x.shape[0]}x{x.shape[1]}x{weight.shape[0]}.pt"
    if CHEAT and path.is_file():
        out.copy_(torch.load(path))
        return
    torch.mm(x, weight.t(), out=out)
    if CHEAT:
        torch.save(out.clone(), path)
    elif not path.is_file():
        path.write_bytes(b"block=64")  # what an autotuner may keep: a choice, not an answer
