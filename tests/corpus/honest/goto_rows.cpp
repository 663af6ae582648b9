// honest: loops by goto
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
    int64_t row = 0, i = 0;
    float squares = 0.0f, scale = 0.0f;
  next_row:
    if (row == tokens) goto done;
    squares = 0.0f;
    i = 0;
  add:
    if (i < hidden) {
      const float value = load(x + i) + load(r + i);
      squares += value * value;
      ++i;
      goto add;
    }
    scale = 1.0f / std::sqrt(squares / float(hidden) + float(epsilon));
    for (i = 0; i < hidden; ++i) {
      const float value = load(x + i) + load(r + i);
      store(r + i, value);
      store(x + i, value * scale * load(w + i));
    }
    ++row, x += hidden, r += hidden;
    goto next_row;
  done:;
  });
}
