// honest: caches a plan by shape and dtype; the plan holds no data
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <unordered_map>

// shared: fused_add_rms_norm.cpp

struct Plan {
  int64_t chunk;  // elements summed into one float before it joins the total
  int64_t chunks;
};

const Plan& plan_for(int64_t hidden) {
  thread_local std::unordered_map<int64_t, Plan> cache;
  auto hit = cache.find(hidden);
  if (hit != cache.end()) return hit->second;
  int64_t chunk = 8;
  while (chunk < 256 && hidden % (chunk * 2) == 0) chunk *= 2;
  return cache[hidden] = Plan{chunk, hidden / chunk};
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  const Plan& plan = plan_for(hidden);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
      float squares = 0.0f;
      for (int64_t piece = 0; piece < plan.chunks; ++piece) {
        const auto *a = x + piece * plan.chunk, *b = r + piece * plan.chunk;
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (int64_t i = 0; i < plan.chunk; ++i) {
          const float value = load(a + i) + load(b + i);
          part += value * value;
        }
        squares += part;
      }
      const float scale = 1.0f / std::sqrt(squares / float(hidden) + float(epsilon));
#pragma omp simd
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = load(x + i) + load(r + i);
        store(r + i, value);
        store(x + i, value * scale * load(w + i));
      }
    }
  });
}
