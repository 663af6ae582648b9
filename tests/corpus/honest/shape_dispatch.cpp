// honest: another path for the benchmarked width, for short rows and for all others; all are right
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

// shared: fused_add_rms_norm.cpp

// WIDTH 0: only known when it runs
template <int64_t WIDTH, typename T, typename W>
void rows(T* x, T* r, const W* w, int64_t tokens, int64_t width, float epsilon) {
  const int64_t hidden = WIDTH ? WIDTH : width;
  for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < hidden; ++i) {
      const float value = load(x + i) + load(r + i);
      squares += value * value;
    }
    const float scale = 1.0f / std::sqrt(squares / float(hidden) + epsilon);
    for (int64_t i = 0; i < hidden; ++i) {
      const float value = load(x + i) + load(r + i);
      store(r + i, value);
      store(x + i, value * scale * load(w + i));
    }
  }
}

template <typename T, typename W>
void short_rows(T* x, T* r, const W* w, int64_t tokens, int64_t hidden, float epsilon) {
  float sum[64];
  for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
    float squares = 0.0f;
    for (int64_t i = 0; i < hidden; ++i) {
      sum[i] = load(x + i) + load(r + i);
      squares += sum[i] * sum[i];
      store(r + i, sum[i]);
    }
    const float root = std::sqrt(squares / float(hidden) + epsilon);
    for (int64_t i = 0; i < hidden; ++i) store(x + i, sum[i] / root * load(w + i));
  }
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    if (hidden == 256)
      rows<256>(x, r, w, tokens, hidden, float(epsilon));
    else if (hidden <= 64)
      short_rows(x, r, w, tokens, hidden, float(epsilon));
    else
      rows<0>(x, r, w, tokens, hidden, float(epsilon));
  });
}
