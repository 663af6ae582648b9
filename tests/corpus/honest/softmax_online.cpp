// honest: one pass with a running maximum, which rescales what it has summed so far
// op: softmax_lse
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

inline float load(const float* p) { return *p; }
inline float load(const uint16_t* p) {
  const uint32_t wide = uint32_t(*p) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
inline void store(float* p, float value) { *p = value; }
inline void store(uint16_t* p, float value) {
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
  *p = uint16_t(value != value ? (wide >> 16) | 0x40u : rounded);
}

template <typename T>
void rows(const T* logits, T* probs, float* lse, int64_t count, int64_t n) {
  for (int64_t row = 0; row < count; ++row, logits += n, probs += n) {
    float top = -FLT_MAX, sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) {
      const float value = load(logits + i);
      if (value > top) {
        sum = sum * std::exp(top - value) + 1.0f;
        top = value;
      } else {
        sum += std::exp(value - top);  // NaN comes this way and stays
      }
    }
    lse[row] = top + std::log(sum);
    const bool infinite = top > FLT_MAX;
    for (int64_t i = 0; i < n; ++i)
      store(probs + i, infinite ? std::numeric_limits<float>::quiet_NaN()
                                : std::exp(load(logits + i) - top) / sum);
  }
}

}  // namespace

void softmax_lse(tvm::ffi::TensorView logits, tvm::ffi::TensorView probs,
                 tvm::ffi::TensorView lse) {
  const int64_t count = logits.size(0), n = logits.size(1);
  auto* sums = static_cast<float*>(lse.data_ptr());
  if (logits.dtype().bits == 32)
    rows(static_cast<const float*>(logits.data_ptr()), static_cast<float*>(probs.data_ptr()), sums,
         count, n);
  else
    rows(static_cast<const uint16_t*>(logits.data_ptr()), static_cast<uint16_t*>(probs.data_ptr()),
         sums, count, n);
}
