// Op: gelu_tanh_and_mul: output = gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate^3)))
//   * up; arithmetic in float32.
// Arguments: gate[T: tokens, intermediate], up[T: tokens, intermediate], output[T: tokens,
//   intermediate]; T: bfloat16 or float16 or float32
// Writes: output
// Needs: any CPU that g++ compiles for; rows of any size, at any pitch in gate and up; other dtypes
//   throw.
// Idea: one pass; tanh by an exponential that vector units run: a polynomial (Cephes, expf) and a
//   power of two made of its bits. OpenMP shares rows out from 65,536 elements on.
// Made by: hand, as a plain right solution.
// Figures: not measured.
// Digest: af308e617fdbd7631d21b1d347422cab740422eb40769478632c097dad5e55b0

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

// e^v for v <= 0, to a unit or two in the last place, in operations that vector units have; 0 where
// it would be subnormal
inline float exponential(float v) {
  const bool vanishes = v < -87.0f;
  v = vanishes ? 0.0f : v;
  const float whole = std::nearbyint(v * 1.44269504f);
  const float rest = (v - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * rest + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * rest * rest + rest + 1.0f;
  const int32_t bits = (int32_t(whole) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return vanishes ? 0.0f : p * power;
}

// (1 + tanh(u)) / 2 is 1 / (1 + e^-2u): with the exponential of what is not positive, which cannot
// overflow
inline float gelu(float x) {
  const float v = 1.5957691216f * (x + 0.044715f * x * x * x);  // 2 u
  const float small = exponential(v < 0.0f ? v : -v);
  return x * (v < 0.0f ? small : 1.0f) / (1.0f + small);
}

template <typename T>
void run(tvm::ffi::TensorView gate, tvm::ffi::TensorView up, tvm::ffi::TensorView output) {
  const int64_t tokens = gate.size(0), inner = gate.size(1);
  const int64_t gate_pitch = gate.stride(0), up_pitch = up.stride(0);
  const auto* gates = static_cast<const T*>(gate.data_ptr());
  const auto* ups = static_cast<const T*>(up.data_ptr());
  auto* outputs = static_cast<T*>(output.data_ptr());
#pragma omp parallel for schedule(static) if (tokens * inner >= 65536)
  for (int64_t row = 0; row < tokens; ++row) {
    const T* g = gates + row * gate_pitch;
    const T* u = ups + row * up_pitch;
    T* y = outputs + row * inner;
#pragma omp simd
    for (int64_t i = 0; i < inner; ++i) store(y + i, gelu(load(g + i)) * load(u + i));
  }
}

}  // namespace

void gelu_tanh_and_mul(tvm::ffi::TensorView gate, tvm::ffi::TensorView up, tvm::ffi::TensorView output) {
  const DLDataType dtype = gate.dtype();
  if (dtype.code == kDLFloat && dtype.bits == 32)
    run<float>(gate, up, output);
  else if (dtype.code == kDLBfloat && dtype.bits == 16)
    run<BFloat16>(gate, up, output);
  else if (dtype.code == kDLFloat && dtype.bits == 16)
    run<Float16>(gate, up, output);
  else
    throw std::runtime_error("gelu_tanh_and_mul: unsupported dtype");
}
