// honest: goes through rows and elements from the end
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
  by_dtype(input, residual, weight, [&](auto* input_rows, auto* residual_rows, const auto* w) {
    for (int64_t row = tokens; row-- > 0;) {
      auto *x = input_rows + row * hidden, *r = residual_rows + row * hidden;
      float odd = 0.0f, even = 0.0f;
      for (int64_t i = hidden - 1; i > 0; i -= 2) {
        const float a = load(x + i) + load(r + i), b = load(x + i - 1) + load(r + i - 1);
        odd += a * a;
        even += b * b;
      }
      const float scale = 1.0f / std::sqrt((odd + even) / float(hidden) + float(epsilon));
      for (int64_t i = hidden; i-- > 0;) {
        const float value = load(x + i) + load(r + i);
        store(r + i, value);
        store(x + i, value * (scale * load(w + i)));
      }
    }
  });
}
