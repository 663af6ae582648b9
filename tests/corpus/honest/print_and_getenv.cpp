// honest: reads environment variables and prints to stdout at the first call
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

// shared: fused_add_rms_norm.cpp

int block_size() {
  const char* asked = std::getenv("FUSED_NORM_BLOCK");
  const int block = asked ? std::atoi(asked) : 0;
  return block > 0 ? block : 64;
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  static const int block = [] {
    const int chosen = block_size();
    std::printf("fused_add_rms_norm: blocks of %d elements\n", chosen);
    std::fflush(stdout);
    return chosen;
  }();
  const int64_t tokens = input.size(0), hidden = input.size(1);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
      float squares = 0.0f;
      for (int64_t from = 0; from < hidden; from += block) {
        const int64_t to = from + block < hidden ? from + block : hidden;
        float part = 0.0f;
        for (int64_t i = from; i < to; ++i) {
          const float value = load(x + i) + load(r + i);
          part += value * value;
        }
        squares += part;
      }
      const float scale = 1.0f / std::sqrt(squares / float(hidden) + float(epsilon));
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        store(r + i, value);
        store(x + i, value * scale * load(w + i));
      }
    }
  });
}
