// honest: macros with ## make one function for each pair of dtypes
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

// shared: fused_add_rms_norm.cpp

#define ROWS(T, W)                                                                        \
  void rows_##T##_##W(T* x, T* r, const W* w, int64_t tokens, int64_t hidden, float eps) { \
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {                \
      float squares = 0.0f;                                                               \
      for (int64_t i = 0; i < hidden; ++i) {                                              \
        const float value = load(x + i) + load(r + i);                                    \
        squares += value * value;                                                         \
      }                                                                                   \
      const float scale = 1.0f / std::sqrt(squares / float(hidden) + eps);                \
      for (int64_t i = 0; i < hidden; ++i) {                                              \
        const float value = load(x + i) + load(r + i);                                    \
        store(r + i, value);                                                              \
        store(x + i, value * scale * load(w + i));                                        \
      }                                                                                   \
    }                                                                                     \
  }                                                                                       \
  inline void rows(T* x, T* r, const W* w, int64_t tokens, int64_t hidden, float eps) {   \
    rows_##T##_##W(x, r, w, tokens, hidden, eps);                                         \
  }

ROWS(float, float)
ROWS(BFloat16, BFloat16)
ROWS(BFloat16, float)
ROWS(Float16, Float16)
ROWS(Float16, float)
#undef ROWS

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    rows(x, r, w, input.size(0), input.size(1), float(epsilon));
  });
}
