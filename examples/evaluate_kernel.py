"""Judge a kernel: python evaluate_kernel.py kernel.cpp (by default a solution of the library)."""

import sys
from pathlib import Path

import patcher

OP = "fused_add_rms_norm"
SOLUTION = Path(__file__).parents[1] / f"kernels/{OP}/solutions/cpu_simd/{OP}.cpp"

v = patcher.evaluate(OP, sys.argv[1] if len(sys.argv) > 1 else SOLUTION, pairs=3)
print(v)
for check in v.checks:
    print("ok  " if check.passed else "fail", check.name)
if v.timings:
    print(
        v.to_pandas()[["tokens", "candidate_us", "baseline_us", "speedup", "sol_pct"]].to_string(
            index=False
        )
    )
    print("drawn:", v.plot().save("evaluation.svg"))
