// honest: a table of all half-precision values, filled at the first call that needs it
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>

// shared: fused_add_rms_norm.cpp

const float* half_table() {
  static const std::unique_ptr<float[]> table = [] {
    auto made = std::make_unique<float[]>(65536);
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const uint16_t narrow = uint16_t(bits);
      Float16 value;
      std::memcpy(&value, &narrow, sizeof narrow);
      made[bits] = float(value.value);
    }
    return made;
  }();
  return table.get();
}

inline float look_up(const float* p, const float*) { return *p; }
inline float look_up(const BFloat16* p, const float*) { return load(p); }
inline float look_up(const Float16* p, const float* table) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return table[bits];
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  const DLDataType dtype = input.dtype();
  const float* table = dtype.code == kDLFloat && dtype.bits == 16 ? half_table() : nullptr;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
      float squares = 0.0f;
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = look_up(x + i, table) + look_up(r + i, table);
        squares += value * value;
      }
      const float scale = 1.0f / std::sqrt(squares / float(hidden) + float(epsilon));
      for (int64_t i = 0; i < hidden; ++i) {
        const float value = look_up(x + i, table) + look_up(r + i, table);
        store(r + i, value);
        store(x + i, value * scale * look_up(w + i, table));
      }
    }
  });
}
