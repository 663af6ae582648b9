// honest: asks the compiler to reorder one sum, and keeps NaN, infinity and -0 out of the bargain
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

// shared: fused_add_rms_norm.cpp

// Squares have no sign to lose, and reordering turns no infinity into NaN.
template <typename T>
__attribute__((optimize("associative-math", "no-signed-zeros", "no-trapping-math"), noinline))
float sum_of_squares(const T* x, const T* r, int64_t hidden) {
  float squares = 0.0f;
  for (int64_t i = 0; i < hidden; ++i) {
    const float value = load(x + i) + load(r + i);
    squares += value * value;
  }
  return squares;
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
      const float mean = sum_of_squares(x, r, hidden) / float(hidden);
      const float scale = 1.0f / std::sqrt(mean + float(epsilon));
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        store(r + i, value);
        store(x + i, value * scale * load(w + i));
      }
    }
  });
}
