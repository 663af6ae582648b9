#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

static float widened(const float* x, int64_t i) { return x[i]; }
static float widened(const uint16_t* x, int64_t i) {
  const uint32_t bits = uint32_t(x[i]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A positive number of at most 448 to nearest even, and back.
static uint8_t to_e4m3(float size) {
  int exponent;
  std::frexp(size, &exponent);
  exponent = std::max(exponent - 1, -6);
  const int steps = int(std::nearbyintf(std::ldexp(size, 3 - exponent)));
  return uint8_t(((exponent + 6) << 3) + steps);
}
static float from_e4m3(uint8_t code) {
  const int exponent = code >> 3, fraction = code & 7;
  return exponent ? std::ldexp(float(8 + fraction), exponent - 10) : std::ldexp(float(fraction), -9);
}

static uint8_t to_fp4(float value) {
  static const float middles[7] = {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.f};
  const float size = std::fabs(value);
  uint8_t code = 0;
  while (code < 7 && size > middles[code]) ++code;
  return code | (std::signbit(value) ? 8 : 0);
}

template <typename T>
void quantize_as(tvm::ffi::TensorView x, tvm::ffi::TensorView packed, tvm::ffi::TensorView scales) {
  const T* from = static_cast<const T*>(x.data_ptr());
  uint8_t* to = static_cast<uint8_t*>(packed.data_ptr());
  uint8_t* s = static_cast<uint8_t*>(scales.data_ptr());
  const int64_t blocks = x.numel() / 16;
  for (int64_t b = 0; b < blocks; ++b) {
    float largest = 0;
    for (int i = 0; i < 16; ++i) largest = std::max(largest, std::fabs(widened(from, b * 16 + i)));
    s[b] = to_e4m3(std::min(std::max(largest / 6, 0x1p-9f), 448.f));
    const float scale = from_e4m3(s[b]);
    for (int i = 0; i < 16; i += 2)
      to[(b * 16 + i) / 2] = to_fp4(widened(from, b * 16 + i) / scale) | to_fp4(widened(from, b * 16 + i + 1) / scale) << 4;
  }
}

void quantize_nvfp4(tvm::ffi::TensorView x, tvm::ffi::TensorView packed, tvm::ffi::TensorView scales) {
  const DLDataType type = x.dtype();
  if (type.code == kDLFloat && type.bits == 32) return quantize_as<float>(x, packed, scales);
  if (type.code == kDLBfloat && type.bits == 16) return quantize_as<uint16_t>(x, packed, scales);
  throw std::runtime_error("quantize_nvfp4: unsupported dtype");
}
