// honest: an approximate reciprocal root, refined until it is as good as the exact one
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#if defined(__SSE__)
#include <immintrin.h>
#endif

// shared: fused_add_rms_norm.cpp

float reciprocal_root(float value) {
#if defined(__SSE__)
  // 12 bits from the table, then two Newton steps; zero, infinity and NaN have no use for Newton
  if (!(value > 0.0f) || !std::isfinite(value)) return 1.0f / std::sqrt(value);
  double guess = double(_mm_cvtss_f32(_mm_rsqrt_ss(_mm_set_ss(value))));
  if (!std::isfinite(guess)) return 1.0f / std::sqrt(value);
  guess *= 1.5 - 0.5 * double(value) * guess * guess;
  guess *= 1.5 - 0.5 * double(value) * guess * guess;
  return float(guess);
#else
  return 1.0f / std::sqrt(value);
#endif
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
      float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        squares += value * value;
      }
      const float scale = reciprocal_root(squares / float(hidden) + float(epsilon));
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        store(r + i, value);
        store(x + i, value * scale * load(w + i));
      }
    }
  });
}
