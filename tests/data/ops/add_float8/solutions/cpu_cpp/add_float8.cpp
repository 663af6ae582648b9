#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

// Sign, exponent and mantissa in 8 bits; `fn`: no infinity, one NaN.
template <int mantissa, bool fn>
struct float8 {
  static constexpr int bias = (1 << (6 - mantissa)) - 1;
  static constexpr int last = fn ? 0x7e : 0x7b;

  static const float* table() {
    static const std::array<float, 256> made = [] {
      std::array<float, 256> t{};
      for (int code = 0; code < 256; ++code) {
        const int exponent = (code & 0x7f) >> mantissa, fraction = code & ((1 << mantissa) - 1);
        float value = exponent ? std::ldexp(float((1 << mantissa) + fraction), exponent - bias - mantissa)
                               : std::ldexp(float(fraction), 1 - bias - mantissa);
        if ((code & 0x7f) > last) value = !fn && fraction == 0 ? INFINITY : NAN;
        t[code] = code & 0x80 ? -value : value;
      }
      return t;
    }();
    return made.data();
  }

  // To nearest even, cut off at the largest number.
  static uint8_t encode(float value) {
    const uint8_t sign = std::signbit(value) ? 0x80 : 0;
    if (std::isnan(value)) return sign | 0x7f;
    const float size = std::fabs(value);
    if (size == 0) return sign;
    if (size >= table()[last]) return sign | last;
    int exponent;
    std::frexp(size, &exponent);  // size = f * 2^exponent, f in [0.5, 1)
    exponent = std::max(exponent - 1, 1 - bias);
    const int steps = int(std::nearbyintf(std::ldexp(size, mantissa - exponent)));
    // the mantissa's overflow is the next exponent's first code
    return sign | uint8_t(((exponent + bias - 1) << mantissa) + steps);
  }
};

template <typename F>
void add_as(tvm::ffi::TensorView x, tvm::ffi::TensorView y, tvm::ffi::TensorView out, float scale) {
  const uint8_t* a = static_cast<const uint8_t*>(x.data_ptr());
  const uint8_t* b = static_cast<const uint8_t*>(y.data_ptr());
  uint8_t* to = static_cast<uint8_t*>(out.data_ptr());
  const float* number = F::table();
  for (int64_t row = 0; row < x.size(0); ++row)
    for (int64_t i = 0; i < x.size(1); ++i)
      to[row * out.stride(0) + i] =
          F::encode(number[a[row * x.stride(0) + i]] + scale * number[b[row * y.stride(0) + i]]);
}

void add_float8(tvm::ffi::TensorView x, tvm::ffi::TensorView y, tvm::ffi::TensorView out, double scale) {
  switch (out.dtype().code) {
    case kDLFloat8_e4m3fn: return add_as<float8<3, true>>(x, y, out, float(scale));
    case kDLFloat8_e5m2: return add_as<float8<2, false>>(x, y, out, float(scale));
  }
  throw std::runtime_error("add_float8: unsupported dtype");
}
