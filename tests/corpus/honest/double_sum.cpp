// honest: more precise than asked for, and it divides where others multiply
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

// shared: fused_add_rms_norm.cpp

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
      double squares = 0.0;
      for (int64_t i = 0; i < hidden; ++i) {
        const double value = double(load(x + i) + load(r + i));
        squares += value * value;
      }
      const double root = std::sqrt(squares / double(hidden) + epsilon);
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        store(r + i, value);
        store(x + i, float(double(value) / root * double(load(w + i))));
      }
    }
  });
}
