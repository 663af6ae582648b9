// Op: rms_norm: output = input / sqrt(mean(input^2) + epsilon) * weight for each row; arithmetic in
//   float32.
// Arguments: input[T: tokens, hidden], weight[W: hidden], output[T: tokens, hidden], epsilon; T:
//   bfloat16 or float16 or float32; W: T or float32
// Writes: output
// Needs: any CPU that g++ compiles for; rows of any size, at any pitch in input; other dtypes
//   throw.
// Idea: two passes over a row that stays in L1: one sums squares, one scales. OpenMP shares rows
//   out from 65,536 elements on; below that its start costs more than it gains.
// Made by: hand, as a plain right solution.
// Figures: not measured.
// Digest: b02eb5c25ef2ddf242c225173f11d2dbdb399cbe76faa688980fd65a5208a66e

#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  _Float16 value;
};

inline float load(const float* p) { return *p; }
inline float load(const BFloat16* p) {
  uint32_t wide = uint32_t(p->bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
inline float load(const Float16* p) { return float(p->value); }

inline void store(float* p, float value) { *p = value; }
inline void store(BFloat16* p, float value) {  // round to nearest even; NaN stays NaN
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
  p->bits = uint16_t(value != value ? (wide >> 16) | 0x40u : rounded);
}
inline void store(Float16* p, float value) { p->value = _Float16(value); }

template <typename T, typename W>
void run(const T* input, const W* weight, T* output, int64_t tokens, int64_t hidden, int64_t pitch,
         float epsilon) {
#pragma omp parallel for schedule(static) if (tokens * hidden >= 65536)
  for (int64_t row = 0; row < tokens; ++row) {
    const T* x = input + row * pitch;
    T* y = output + row * hidden;
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < hidden; ++i) squares += load(x + i) * load(x + i);
    const float scale = 1.0f / std::sqrt(squares / float(hidden) + epsilon);
#pragma omp simd
    for (int64_t i = 0; i < hidden; ++i) store(y + i, load(x + i) * scale * load(weight + i));
  }
}

template <typename T>
void by_weight(tvm::ffi::TensorView input, tvm::ffi::TensorView weight, tvm::ffi::TensorView output, float epsilon) {
  const auto* x = static_cast<const T*>(input.data_ptr());
  auto* y = static_cast<T*>(output.data_ptr());
  const int64_t tokens = input.size(0), hidden = input.size(1), pitch = input.stride(0);
  if (weight.dtype().bits == 32)
    run(x, static_cast<const float*>(weight.data_ptr()), y, tokens, hidden, pitch, epsilon);
  else
    run(x, static_cast<const T*>(weight.data_ptr()), y, tokens, hidden, pitch, epsilon);
}

}  // namespace

void rms_norm(tvm::ffi::TensorView input, tvm::ffi::TensorView weight, tvm::ffi::TensorView output, double epsilon) {
  const DLDataType dtype = input.dtype();
  if (dtype.code == kDLFloat && dtype.bits == 32)
    by_weight<float>(input, weight, output, float(epsilon));
  else if (dtype.code == kDLBfloat && dtype.bits == 16)
    by_weight<BFloat16>(input, weight, output, float(epsilon));
  else if (dtype.code == kDLFloat && dtype.bits == 16)
    by_weight<Float16>(input, weight, output, float(epsilon));
  else
    throw std::runtime_error("rms_norm: unsupported dtype");
}
