// honest: a static workspace per shape, kept for ever and written anew in every call
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

// shared: fused_add_rms_norm.cpp

float* workspace(int64_t tokens, int64_t hidden) {
  static std::mutex mutex;
  static std::map<std::pair<int64_t, int64_t>, std::vector<float>> cache;
  std::lock_guard<std::mutex> lock(mutex);
  auto& held = cache[{tokens, hidden}];
  if (held.empty()) held.resize(size_t(tokens * hidden) + 1);
  return held.data();
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  float* sums = workspace(tokens, hidden);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t i = 0; i < tokens * hidden; ++i) {
      sums[i] = load(x + i) + load(r + i);
      store(r + i, sums[i]);
    }
    for (int64_t row = 0; row < tokens; ++row) {
      const float* sum = sums + row * hidden;
      float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < hidden; ++i) squares += sum[i] * sum[i];
      const float scale = 1.0f / std::sqrt(squares / float(hidden) + float(epsilon));
      for (int64_t i = 0; i < hidden; ++i)
        store(x + row * hidden + i, sum[i] * scale * load(w + i));
    }
  });
}
