// honest: returns early on nothing to do, and throws for what the contract does not allow
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

// shared: fused_add_rms_norm.cpp

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument("fused_add_rms_norm: " + what);
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  require(input.ndim() == 2 && residual.ndim() == 2 && weight.ndim() == 1, "wrong ranks");
  const int64_t tokens = input.size(0), hidden = input.size(1);
  require(residual.size(0) == tokens && residual.size(1) == hidden, "shapes differ");
  require(weight.size(0) == hidden, "the weight is not as long as a row");
  require(hidden % 8 == 0 && hidden <= 16384, "hidden must be a multiple of 8, at most 16384");
  require(input.data_ptr() != residual.data_ptr(), "input and residual are one tensor");
  if (tokens == 0 || hidden == 0) return;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
      float lanes[8] = {};
      for (int64_t i = 0; i < hidden; i += 8)
        for (int lane = 0; lane < 8; ++lane) {
          const float value = load(x + i + lane) + load(r + i + lane);
          lanes[lane] += value * value;
        }
      const float squares = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
                            ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
      const float scale = 1.0f / std::sqrt(squares / float(hidden) + float(epsilon));
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        store(r + i, value);
        store(x + i, value * scale * load(w + i));
      }
    }
  });
}
