// honest: hand-written AVX2 for float32 where the machine has it, plain code elsewhere
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

// shared: fused_add_rms_norm.cpp

template <typename T, typename W>
void one_row(T* x, T* r, const W* w, int64_t hidden, float epsilon) {
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

#if defined(__AVX2__) && defined(__FMA__)
inline float across(__m256 v) {
  __m128 low = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  low = _mm_add_ps(low, _mm_movehl_ps(low, low));
  return _mm_cvtss_f32(_mm_add_ss(low, _mm_shuffle_ps(low, low, 1)));
}

void one_row(float* x, float* r, const float* w, int64_t hidden, float epsilon) {
  __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  for (int64_t i = 0; i < hidden; i += 8) {  // hidden is a multiple of 8
    const __m256 value = _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(r + i));
    _mm256_storeu_ps(r + i, value);
    sum[(i >> 3) & 1] = _mm256_fmadd_ps(value, value, sum[(i >> 3) & 1]);
  }
  const float squares = across(_mm256_add_ps(sum[0], sum[1]));
  const __m256 scale = _mm256_set1_ps(1.0f / std::sqrt(squares / float(hidden) + epsilon));
  for (int64_t i = 0; i < hidden; i += 8) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(r + i), scale);
    _mm256_storeu_ps(x + i, _mm256_mul_ps(scaled, _mm256_loadu_ps(w + i)));
  }
}
#endif

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row)
      one_row(x + row * hidden, r + row * hidden, w, hidden, float(epsilon));
  });
}
