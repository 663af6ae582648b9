// honest: compensated sum, in another order of operations than anybody's
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

// shared: fused_add_rms_norm.cpp

// Kahan: the carry would turn an infinite sum into NaN, so that case is summed again plainly
template <typename T>
float sum_of_squares(const T* x, const T* r, int64_t hidden) {
  float sum = 0.0f, carry = 0.0f;
  for (int64_t i = 0; i < hidden; ++i) {
    const float value = load(x + i) + load(r + i);
    const float term = value * value - carry;
    const float next = sum + term;
    carry = (next - sum) - term;
    sum = next;
  }
  if (std::isfinite(sum)) return sum;
  sum = 0.0f;
  for (int64_t i = 0; i < hidden; ++i) {
    const float value = load(x + i) + load(r + i);
    sum += value * value;
  }
  return sum;
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
