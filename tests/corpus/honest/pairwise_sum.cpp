// honest: recursion, and a sum in the order of a tree
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

// shared: fused_add_rms_norm.cpp

template <typename T>
float squares(const T* x, const T* r, int64_t count) {
  if (count <= 32) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      const float value = load(x + i) + load(r + i);
      sum += value * value;
    }
    return sum;
  }
  const int64_t half = count / 2;
  return squares(x, r, half) + squares(x + half, r + half, count - half);
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
      const float root = std::sqrt(squares(x, r, hidden) / float(hidden) + float(epsilon));
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        store(r + i, value);
        store(x + i, value / root * load(w + i));
      }
    }
  });
}
