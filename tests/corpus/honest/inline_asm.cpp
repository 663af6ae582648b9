// honest: inline assembly for the square root and for a prefetch
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

// shared: fused_add_rms_norm.cpp

inline float root_of(float value) {
#if defined(__x86_64__)
  float root;
  __asm__("sqrtss %1, %0" : "=x"(root) : "x"(value));
  return root;
#else
  return std::sqrt(value);
#endif
}

inline void fetch(const void* address) {
#if defined(__x86_64__)
  __asm__ volatile("prefetcht0 (%0)" : : "r"(address));
#else
  (void)address;
#endif
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
      if (row + 1 < tokens) fetch(x + hidden), fetch(r + hidden);
      float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        squares += value * value;
      }
      const float scale = 1.0f / root_of(squares / float(hidden) + float(epsilon));
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        store(r + i, value);
        store(x + i, value * scale * load(w + i));
      }
    }
  });
}
