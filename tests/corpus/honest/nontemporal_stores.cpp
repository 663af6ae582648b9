// honest: streaming stores where the address is aligned, a scalar head and tail elsewhere
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// shared: fused_add_rms_norm.cpp

template <typename T>
void write_out(T* out, const float* values, int64_t hidden) {
  for (int64_t i = 0; i < hidden; ++i) store(out + i, values[i]);
}

#if defined(__SSE2__)
void write_out(float* out, const float* values, int64_t hidden) {
  int64_t i = 0;
  while (i < hidden && reinterpret_cast<uintptr_t>(out + i) % 16 != 0) out[i] = values[i], ++i;
  for (; i + 4 <= hidden; i += 4) _mm_stream_ps(out + i, _mm_loadu_ps(values + i));
  for (; i < hidden; ++i) out[i] = values[i];
}
#endif

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  std::vector<float> sum(size_t(hidden), 0.0f), normed(size_t(hidden), 0.0f);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
      float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < hidden; ++i) {
        sum[i] = load(x + i) + load(r + i);
        squares += sum[i] * sum[i];
      }
      const float scale = 1.0f / std::sqrt(squares / float(hidden) + float(epsilon));
      for (int64_t i = 0; i < hidden; ++i) normed[i] = sum[i] * scale * load(w + i);
      write_out(r, sum.data(), hidden);
      write_out(x, normed.data(), hidden);
    }
  });
#if defined(__SSE2__)
  _mm_sfence();
#endif
}
