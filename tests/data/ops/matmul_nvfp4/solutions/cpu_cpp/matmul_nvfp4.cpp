#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <vector>

static const float fp4[16] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0.f, -.5, -1, -1.5, -2, -3, -4, -6};
constexpr int block = 16;

float e4m3(uint8_t code) {
  const int exponent = (code & 0x7f) >> 3, fraction = code & 7;
  if ((code & 0x7f) == 0x7f) return NAN;
  const float size = exponent ? std::ldexp(float(8 + fraction), exponent - 10) : std::ldexp(float(fraction), -9);
  return code & 0x80 ? -size : size;
}

void matmul_nvfp4(tvm::ffi::TensorView x, tvm::ffi::TensorView weights, tvm::ffi::TensorView scales,
                  tvm::ffi::TensorView out) {
  const float* a = static_cast<const float*>(x.data_ptr());
  const uint8_t* w = static_cast<const uint8_t*>(weights.data_ptr());
  const uint8_t* s = static_cast<const uint8_t*>(scales.data_ptr());
  float* to = static_cast<float*>(out.data_ptr());
  const int64_t rows = x.size(0), depth = x.size(1), columns = out.size(1), blocks = depth / block;
  std::vector<float> wide(depth);
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t b = 0; b < blocks; ++b) {
      const float scale = e4m3(s[c * blocks + b]);
      for (int64_t k = b * block; k < (b + 1) * block; k += 2) {
        const uint8_t both = w[(c * depth + k) / 2];
        wide[k] = fp4[both & 15] * scale;
        wide[k + 1] = fp4[both >> 4] * scale;
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t k = 0; k < depth; ++k) sum += a[r * depth + k] * wide[k];
      to[r * columns + c] = sum;
    }
  }
}
