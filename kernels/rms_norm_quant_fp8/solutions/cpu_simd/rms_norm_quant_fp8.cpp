// Op: rms_norm_quant_fp8: x = input / sqrt(mean(input^2) + epsilon) * weight; scales[t, g] = the
//   largest absolute x of the g-th group of row t over 448, of at least 1 / (448 * 512); output = x
//   over its group's scale, rounded to the nearest fp8; float32.
// Arguments: input[T: tokens, groups * group], weight[W: groups * group], output[Q: tokens, groups
//   * group], scales[F: tokens, groups], epsilon; T: bfloat16 or float16 or float32; W: T or
//   float32; Q: float8_e4m3fn; F: float32
// Writes: output, scales
// Needs: any CPU that g++ compiles for; rows of any size, at any pitch in input; other dtypes
//   throw.
// Idea: a pass sums squares, a second finds a group's largest, a third rounds to fp8 in operations
//   that vector units have; the row stays in cache. OpenMP shares rows out from 65,536 elements on.
// Made by: hand, as a plain right solution.
// Figures: not measured.
// Digest: 7660d5d544469b5160b41b09a1d37e04ac1b1d85a83dfc6beff2dc7899678aef

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

// float8_e4m3fn of a number of at most 448, to nearest even
inline uint8_t narrow(float value) {
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  const uint32_t sign = (wide >> 24) & 0x80u, size = wide & 0x7fffffffu;
  // 3 bits of mantissa are left of 23, and the exponent's bias is 7 instead of 127
  const uint32_t normal = ((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - (120u << 3);
  // below 2^-6, a multiple of 2^-9: the sum with 2^14 has just these as its last bits
  float sum = std::fabs(value) + 16384.0f;
  uint32_t small;
  std::memcpy(&small, &sum, sizeof small);
  return uint8_t(sign | (size < (121u << 23) ? small & 0xfu : normal));
}

template <typename T, typename W>
void row(const T* x, const W* weight, uint8_t* y, float* scales, int64_t groups, int64_t group,
         float epsilon) {
  const int64_t wide = groups * group;
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < wide; ++i) squares += load(x + i) * load(x + i);
  const float rms = 1.0f / std::sqrt(squares / float(wide) + epsilon);
  for (int64_t g = 0; g < groups; ++g) {
    const T* part = x + g * group;
    const W* gain = weight + g * group;
    float largest = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < group; ++i) {
      const float size = std::fabs(load(part + i) * rms * load(gain + i));
      largest = size > largest ? size : largest;
    }
    const float share = largest / 448.0f, least = 1.0f / (448.0f * 512.0f);
    const float scale = share > least ? share : least;
    scales[g] = scale;
#pragma omp simd
    for (int64_t i = 0; i < group; ++i) {
      float number = load(part + i) * rms * load(gain + i) / scale;
      number = number > 448.0f ? 448.0f : number;
      number = number < -448.0f ? -448.0f : number;
      y[g * group + i] = narrow(number);
    }
  }
}

template <typename T, typename W>
void run(tvm::ffi::TensorView input, tvm::ffi::TensorView weight, tvm::ffi::TensorView output,
         tvm::ffi::TensorView scales, float epsilon) {
  const int64_t tokens = input.size(0), wide = input.size(1), groups = scales.size(1);
  const int64_t pitch = input.stride(0);
  const auto* inputs = static_cast<const T*>(input.data_ptr());
  const auto* gain = static_cast<const W*>(weight.data_ptr());
  auto* outputs = static_cast<uint8_t*>(output.data_ptr());
  auto* factors = static_cast<float*>(scales.data_ptr());
#pragma omp parallel for schedule(static) if (tokens * wide >= 65536)
  for (int64_t at = 0; at < tokens; ++at)
    row(inputs + at * pitch, gain, outputs + at * wide, factors + at * groups, groups,
        wide / groups, epsilon);
}

template <typename T>
void by_weight(tvm::ffi::TensorView input, tvm::ffi::TensorView weight,
               tvm::ffi::TensorView output, tvm::ffi::TensorView scales, float epsilon) {
  if (weight.dtype().bits == 32)
    run<T, float>(input, weight, output, scales, epsilon);
  else
    run<T, T>(input, weight, output, scales, epsilon);
}

}  // namespace

void rms_norm_quant_fp8(tvm::ffi::TensorView input, tvm::ffi::TensorView weight,
                        tvm::ffi::TensorView output, tvm::ffi::TensorView scales,
                        double epsilon) {
  const DLDataType dtype = input.dtype();
  if (dtype.code == kDLFloat && dtype.bits == 32)
    by_weight<float>(input, weight, output, scales, float(epsilon));
  else if (dtype.code == kDLBfloat && dtype.bits == 16)
    by_weight<BFloat16>(input, weight, output, scales, float(epsilon));
  else if (dtype.code == kDLFloat && dtype.bits == 16)
    by_weight<Float16>(input, weight, output, scales, float(epsilon));
  else
    throw std::runtime_error("rms_norm_quant_fp8: unsupported dtype");
}
