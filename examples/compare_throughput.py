"""Is the whole model faster? An A/B of a patch: python compare_throughput.py norm.zip"""

import sys
from pathlib import Path

import patcher

OP = "fused_add_rms_norm"
SOURCE = Path(__file__).parents[1] / f"kernels/{OP}/solutions/cpu_simd/{OP}.cpp"

if len(sys.argv) > 1:
    patch = Path(sys.argv[1])
else:
    patch = patcher.bundle(patcher.evaluate(OP, SOURCE, pairs=3), SOURCE, "norm.zip")

# six pairs are for a first look; a verdict to rely on takes the default
t = patcher.throughput(
    "gpt-oss-tiny",
    patches=[patch],
    device="cpu",
    batch=4,
    input_len=16,
    output_len=16,
    pairs=6,
    quality_steps=8,
    threads=1,
)
print(t)
for reason in t.decision.reasons:
    print("-", reason)

windows = t.to_pandas()
print(
    windows.groupby(["kind", "arm"])["tokens_per_s"]
    .describe()[["count", "mean", "std"]]
    .to_string()
)
print("drawn:", t.plot().save("throughput.svg"))
