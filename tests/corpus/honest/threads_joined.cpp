// honest: starts threads in the call and joins them before it returns
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

// shared: fused_add_rms_norm.cpp

template <typename T, typename W>
void rows(T* x, T* r, const W* w, int64_t tokens, int64_t hidden, float epsilon) {
  for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < hidden; ++i) {
      const float value = load(x + i) + load(r + i);
      squares += value * value;
    }
    const float root = std::sqrt(squares / float(hidden) + epsilon);
    for (int64_t i = 0; i < hidden; ++i) {
      const float value = load(x + i) + load(r + i);
      store(r + i, value);
      store(x + i, value / root * load(w + i));
    }
  }
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  const int64_t pieces = tokens * hidden < 16384 ? 1 : std::min<int64_t>(tokens, 3);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    std::vector<std::thread> threads;
    for (int64_t piece = 1; piece < pieces; ++piece) {
      const int64_t from = tokens * piece / pieces, to = tokens * (piece + 1) / pieces;
      threads.emplace_back([=] {
        rows(x + from * hidden, r + from * hidden, w, to - from, hidden, float(epsilon));
      });
    }
    rows(x, r, w, tokens / pieces, hidden, float(epsilon));
    for (auto& thread : threads) thread.join();
  });
}
