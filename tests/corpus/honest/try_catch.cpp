// honest: catches a failed allocation and takes a path that needs no memory
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

// shared: fused_add_rms_norm.cpp

constexpr size_t MOST = size_t(1) << 16;  // more scratch than this is not worth it

std::vector<float> scratch(size_t floats) {
  if (floats > MOST) throw std::bad_alloc();
  return std::vector<float>(floats);
}

template <typename T, typename W>
void normalise(T* x, T* r, const W* w, float* sum, int64_t hidden, float epsilon) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < hidden; ++i) {
    const float value = load(x + i) + load(r + i);
    if (sum) sum[i] = value;
    squares += value * value;
  }
  const float scale = 1.0f / std::sqrt(squares / float(hidden) + epsilon);
  for (int64_t i = 0; i < hidden; ++i) {
    const float value = sum ? sum[i] : load(x + i) + load(r + i);
    store(r + i, value);
    store(x + i, value * scale * load(w + i));
  }
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  std::vector<float> sums;
  try {
    sums = scratch(size_t(tokens * hidden));
  } catch (const std::bad_alloc&) {
    sums.clear();
  }
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row) {
      const int64_t at = row * hidden;
      normalise(x + at, r + at, w, sums.empty() ? nullptr : sums.data() + at, hidden,
                float(epsilon));
    }
  });
}
