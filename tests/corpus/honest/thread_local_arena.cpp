// honest: aligned scratch memory from posix_memalign, kept for the life of the thread
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

// shared: fused_add_rms_norm.cpp

struct Free {
  void operator()(float* p) const { std::free(p); }
};

float* arena(int64_t floats) {
  thread_local std::unique_ptr<float, Free> held;
  thread_local int64_t size = 0;
  if (floats > size) {
    void* fresh = nullptr;
    if (posix_memalign(&fresh, 64, size_t(floats) * sizeof(float)) != 0) throw std::bad_alloc();
    held.reset(static_cast<float*>(fresh));
    size = floats;
  }
  return held.get();
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  float* sum = static_cast<float*>(__builtin_assume_aligned(arena(hidden), 64));
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
      float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < hidden; ++i) {
        sum[i] = load(x + i) + load(r + i);
        squares += sum[i] * sum[i];
      }
      const float root = std::sqrt(squares / float(hidden) + float(epsilon));
      for (int64_t i = 0; i < hidden; ++i) {
        store(r + i, sum[i]);
        store(x + i, sum[i] / root * load(w + i));
      }
    }
  });
}
