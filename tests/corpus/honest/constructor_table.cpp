// honest: runs code when the library is loaded, which fills a small table
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

// shared: fused_add_rms_norm.cpp

float per_count[16384 / 8 + 1];  // 1 / hidden for every hidden of the contract

__attribute__((constructor)) void fill() {
  for (int count = 1; count <= 16384 / 8; ++count) per_count[count] = 1.0f / float(8 * count);
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  if (hidden % 8 != 0 || hidden > 16384)
    throw std::invalid_argument("hidden must be a multiple of 8, at most 16384");
  const float share = per_count[hidden / 8];
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
      float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        squares += value * value;
      }
      const float scale = 1.0f / std::sqrt(squares * share + float(epsilon));
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        store(r + i, value);
        store(x + i, value * scale * load(w + i));
      }
    }
  });
}
