"""Write an op of your own, and judge a kernel for it: PATCHER_OPS names the folder of your ops."""

import os
from pathlib import Path

import patcher

# contract, reference, inputs and baselines: four short files in my_ops/relu_squared
os.environ["PATCHER_OPS"] = str(Path(__file__).parent / "my_ops")

KERNEL = """
#include <tvm/ffi/container/tensor.h>

#include <cstdint>

void relu_squared(tvm::ffi::TensorView x, tvm::ffi::TensorView out) {
  const float* from = static_cast<const float*>(x.data_ptr());
  float* to = static_cast<float*>(out.data_ptr());
  const int64_t n = x.size(0);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float positive = from[i] < 0.0f ? 0.0f : from[i];  // NaN stays NaN
    to[i] = positive * positive;
  }
}
"""

right = Path("relu_squared.cpp")
right.write_text(KERNEL)
wrong = Path("wrong.cpp")
wrong.write_text(KERNEL.replace("positive * positive", "positive"))

for source in (wrong, right):
    v = patcher.evaluate("relu_squared", source, pairs=3)
    print(f"{source}: {v.outcome}")
    for check in v.failed_checks:
        print(f"  {check.name}: {check.detail}")
    if v.timings:
        print(v.to_pandas()[["n", "candidate_us", "baseline_us", "speedup"]].to_string(index=False))
