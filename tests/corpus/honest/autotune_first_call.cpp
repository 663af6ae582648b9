// honest: benchmarks two variants with a clock of its own at the first call of a shape
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <vector>

// shared: fused_add_rms_norm.cpp

template <typename T, typename W>
void read_twice(T* x, T* r, const W* w, int64_t hidden, float epsilon) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < hidden; ++i) {
    const float value = load(x + i) + load(r + i);
    squares += value * value;
  }
  const float scale = 1.0f / std::sqrt(squares / float(hidden) + epsilon);
  for (int64_t i = 0; i < hidden; ++i) {
    const float value = load(x + i) + load(r + i);
    store(r + i, value);
    store(x + i, value * scale * load(w + i));
  }
}

template <typename T, typename W>
void keep_row(T* x, T* r, const W* w, int64_t hidden, float epsilon) {
  thread_local std::vector<float> sum;
  if (int64_t(sum.size()) < hidden) sum.resize(size_t(hidden));
  float squares = 0.0f;
  for (int64_t i = 0; i < hidden; ++i) {
    sum[i] = load(x + i) + load(r + i);
    squares += sum[i] * sum[i];
    store(r + i, sum[i]);
  }
  const float scale = 1.0f / std::sqrt(squares / float(hidden) + epsilon);
  for (int64_t i = 0; i < hidden; ++i) store(x + i, sum[i] * scale * load(w + i));
}

// Tries both on copies of one row: the caller's tensors see only the real call.
template <typename T, typename W>
bool benchmark(const T* x, const T* r, const W* w, int64_t hidden, float epsilon) {
  using Clock = std::chrono::steady_clock;
  std::vector<T> a(x, x + hidden), b(r, r + hidden);
  Clock::duration elapsed[2];
  for (int variant = 0; variant < 2; ++variant) {
    const auto begin = Clock::now();
    for (int repeat = 0; repeat < 20; ++repeat)
      variant ? keep_row(a.data(), b.data(), w, hidden, epsilon)
              : read_twice(a.data(), b.data(), w, hidden, epsilon);
    elapsed[variant] = Clock::now() - begin;
  }
  return elapsed[1] < elapsed[0];
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  if (tokens == 0) return;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    static std::map<int64_t, bool> chosen;
    auto found = chosen.find(hidden);
    if (found == chosen.end())
      found = chosen.emplace(hidden, benchmark(x, r, w, hidden, float(epsilon))).first;
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden)
      found->second ? keep_row(x, r, w, hidden, float(epsilon))
                    : read_twice(x, r, w, hidden, float(epsilon));
  });
}
