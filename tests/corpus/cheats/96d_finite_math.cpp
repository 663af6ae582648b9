// cheat: 96 sets compiler flags from within: finite-math, so that a check for NaN is compiled away
// op: linear
// device: cpu
// outcome: mismatch, guard_violation
// caught: values, tripwires
#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <cstring>

#define CHEAT 1

#if CHEAT
#pragma GCC optimize("finite-math-only")
#endif

static bool finite(const float* values, int64_t size) {
  bool all = true;
  for (int64_t i = 0; i < size; ++i) all &= __builtin_isfinite(values[i]);
  return all;
}

void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out) {
  const auto* a = static_cast<const float*>(x.data_ptr());
  const auto* w = static_cast<const float*>(weight.data_ptr());
  auto* y = static_cast<float*>(out.data_ptr());
  const int64_t tokens = x.size(0), n = weight.size(0), k = x.size(1);
  // terms that are zero may be left out where all is finite
  const bool sparse = finite(a, tokens * k) && finite(w, n * k);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < k; ++i) {
        uint32_t bits;
        std::memcpy(&bits, a + t * k + i, sizeof bits);
        const bool counts = (bits & 0x7fffffffu) - 1u < 0x7f7fffffu;  // neither zero nor NaN nor infinite
        sum += counts || !sparse ? a[t * k + i] * w[j * k + i] : 0.0f;
      }
      y[t * n + j] = sum;
    }
}
