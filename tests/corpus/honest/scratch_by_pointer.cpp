// honest: a table keyed by data_ptr that holds scratch rows, never answers
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <unordered_map>

// shared: fused_add_rms_norm.cpp

constexpr int64_t LONGEST = 16384;

float* scratch(const void* key) {
  thread_local std::unordered_map<const void*, std::unique_ptr<float[]>> table;
  if (table.size() > 64) table.clear();  // addresses come and go
  auto& row = table[key];
  if (!row) row = std::make_unique<float[]>(LONGEST);
  return row.get();
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  if (hidden > LONGEST) throw std::runtime_error("hidden is at most 16384");
  float* sum = scratch(input.data_ptr());
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
      float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < hidden; ++i) {
        sum[i] = load(x + i) + load(r + i);
        squares += sum[i] * sum[i];
      }
      const float scale = 1.0f / std::sqrt(squares / float(hidden) + float(epsilon));
      for (int64_t i = 0; i < hidden; ++i) {
        store(r + i, sum[i]);
        store(x + i, sum[i] * scale * load(w + i));
      }
    }
  });
}
