// Op: qk_norm_rope: RMSNorm of each head of query and key, then NeoX rotation, in place: (a, b)
//   becomes (a * cos - b * sin, b * cos + a * sin), a and b the halves of a normalised head;
//   float32, rounded once.
// Arguments: query[T: tokens, q_heads * head_dim], key[T: tokens, kv_heads * head_dim], q_weight[T:
//   head_dim], k_weight[T: head_dim], cos_sin[C: tokens, head_dim], epsilon; T: bfloat16 or float16
//   or float32; C: T or float32
// Writes: query, key
// Needs: any CPU that g++ compiles for; heads of any even size, rows at any pitch; other dtypes
//   throw.
// Idea: two passes over a head that stays in L1: one sums squares, one scales and rotates both
//   halves. OpenMP shares heads out from 65,536 elements on; below that its start costs more than
//   it gains.
// Made by: hand, as a plain right solution.
// Figures: not measured.
// Digest: ab0a9ab5eda521dd2aa9d12091d6864f1c37980906220b49e32770f8887bc0e7

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

template <typename T, typename C>
void head(T* x, const T* weight, const C* cos_sin, int64_t half, float epsilon) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < 2 * half; ++i) squares += load(x + i) * load(x + i);
  const float scale = 1.0f / std::sqrt(squares / float(2 * half) + epsilon);
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = load(x + i) * scale * load(weight + i);
    const float b = load(x + half + i) * scale * load(weight + half + i);
    const float cos = load(cos_sin + i), sin = load(cos_sin + half + i);
    store(x + i, a * cos - b * sin);
    store(x + half + i, b * cos + a * sin);
  }
}

template <typename T, typename C>
void run(tvm::ffi::TensorView query, tvm::ffi::TensorView key, tvm::ffi::TensorView q_weight,
         tvm::ffi::TensorView k_weight, tvm::ffi::TensorView cos_sin, float epsilon) {
  const int64_t tokens = query.size(0), dim = q_weight.size(0);
  const int64_t q_heads = query.size(1) / dim, heads = q_heads + key.size(1) / dim;
  const int64_t q_pitch = query.stride(0), k_pitch = key.stride(0);
  auto* queries = static_cast<T*>(query.data_ptr());
  auto* keys = static_cast<T*>(key.data_ptr());
  const auto* q_gain = static_cast<const T*>(q_weight.data_ptr());
  const auto* k_gain = static_cast<const T*>(k_weight.data_ptr());
  const auto* table = static_cast<const C*>(cos_sin.data_ptr());
#pragma omp parallel for schedule(static) if (tokens * heads * dim >= 65536)
  for (int64_t each = 0; each < tokens * heads; ++each) {
    const int64_t row = each / heads, at = each % heads;
    T* x = at < q_heads ? queries + row * q_pitch + at * dim
                        : keys + row * k_pitch + (at - q_heads) * dim;
    head(x, at < q_heads ? q_gain : k_gain, table + row * dim, dim / 2, epsilon);
  }
}

template <typename T>
void by_table(tvm::ffi::TensorView query, tvm::ffi::TensorView key, tvm::ffi::TensorView q_weight,
              tvm::ffi::TensorView k_weight, tvm::ffi::TensorView cos_sin, float epsilon) {
  if (cos_sin.dtype().bits == 32)
    run<T, float>(query, key, q_weight, k_weight, cos_sin, epsilon);
  else
    run<T, T>(query, key, q_weight, k_weight, cos_sin, epsilon);
}

}  // namespace

void qk_norm_rope(tvm::ffi::TensorView query, tvm::ffi::TensorView key,
                  tvm::ffi::TensorView q_weight, tvm::ffi::TensorView k_weight,
                  tvm::ffi::TensorView cos_sin, double epsilon) {
  const DLDataType dtype = query.dtype();
  if (dtype.code == kDLFloat && dtype.bits == 32)
    by_table<float>(query, key, q_weight, k_weight, cos_sin, float(epsilon));
  else if (dtype.code == kDLBfloat && dtype.bits == 16)
    by_table<BFloat16>(query, key, q_weight, k_weight, cos_sin, float(epsilon));
  else if (dtype.code == kDLFloat && dtype.bits == 16)
    by_table<Float16>(query, key, q_weight, k_weight, cos_sin, float(epsilon));
  else
    throw std::runtime_error("qk_norm_rope: unsupported dtype");
}
