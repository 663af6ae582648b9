// honest: OpenMP with a dynamic schedule, however many threads there are
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <omp.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

// shared: fused_add_rms_norm.cpp

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  const int threads = tokens * hidden >= 32768 ? omp_get_max_threads() : 1;
  by_dtype(input, residual, weight, [&](auto* input_rows, auto* residual_rows, const auto* w) {
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
    for (int64_t row = 0; row < tokens; ++row) {
      auto *x = input_rows + row * hidden, *r = residual_rows + row * hidden;
      float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        squares += value * value;
      }
      const float scale = 1.0f / std::sqrt(squares / float(hidden) + float(epsilon));
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        store(r + i, value);
        store(x + i, value * scale * load(w + i));
      }
    }
  });
}
