// Op: gated_delta_decode: one decode step of the gated delta rule: the state of each token's slot
//   decays, and gets the outer product of what its value lacks, times sigmoid(b), and the key; out
//   is its product with the query; queries and keys are normalised; float32.
// Arguments: state[S: slots, value_heads * value_dim * key_dim], qkv[T: tokens, 2 * heads * key_dim
//   + value_heads * value_dim], a[T: tokens, value_heads], b[T: tokens, value_heads], A_log[F:
//   value_heads], dt_bias[T: value_heads], slots[I: tokens], out[T: tokens, value_heads *
//   value_dim]; T: bfloat16 or float16 or float32; S: T or float32; F: float32; I: int32
// Writes: state, out
// Needs: any CPU that g++ compiles for; keys of at most 256, rows at any pitch; other dtypes and
//   longer keys throw.
// Idea: a row of a head's state stands by itself: it is read once for its product with the key, and
//   once more, from L1, to be changed, written and multiplied by the query. OpenMP shares tokens'
//   heads out from 65,536 elements of state on.
// Made by: hand, as a plain right solution.
// Figures: not measured.
// Digest: fec4917e5c01e1d9291de6507864944759038ff1364af08edfcc724d8ceeb09d

#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace {

constexpr int64_t kLongest = 256;

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

// x / sqrt(sum(x^2) + 1e-6) * factor
template <typename T>
void normalised(const T* x, float* y, int64_t size, float factor) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < size; ++i) squares += load(x + i) * load(x + i);
  const float length = std::sqrt(squares + 1e-6f);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) y[i] = load(x + i) / length * factor;
}

template <typename T, typename S>
void head(S* state, const T* query, const T* key, const T* value, T* out, int64_t value_dim,
          int64_t key_dim, float decay, float strength) {
  float q[kLongest], k[kLongest], now[kLongest];
  normalised(query, q, key_dim, 1.0f / std::sqrt(float(key_dim)));
  normalised(key, k, key_dim, 1.0f);
  for (int64_t v = 0; v < value_dim; ++v) {
    S* row = state + v * key_dim;
    float held = 0.0f, found = 0.0f;
#pragma omp simd reduction(+ : held)
    for (int64_t i = 0; i < key_dim; ++i) {
      now[i] = load(row + i) * decay;
      held += now[i] * k[i];
    }
    const float change = (load(value + v) - held) * strength;
#pragma omp simd reduction(+ : found)
    for (int64_t i = 0; i < key_dim; ++i) {
      const float after = now[i] + change * k[i];
      store(row + i, after);
      found += after * q[i];
    }
    store(out + v, found);
  }
}

struct Call {
  tvm::ffi::TensorView state, qkv, a, b, A_log, dt_bias, slots, out;
};

template <typename T, typename S>
void run(const Call& call) {
  const int64_t tokens = call.a.size(0), value_heads = call.a.size(1), inner = call.out.size(1);
  const int64_t value_dim = inner / value_heads, key_dim = call.state.size(1) / inner;
  const int64_t keys = (call.qkv.size(1) - inner) / 2, heads = keys / key_dim;
  if (key_dim > kLongest) throw std::runtime_error("gated_delta_decode: a key is too long");
  auto* states = static_cast<S*>(call.state.data_ptr());
  const auto* rows = static_cast<const T*>(call.qkv.data_ptr());
  const auto* as = static_cast<const T*>(call.a.data_ptr());
  const auto* bs = static_cast<const T*>(call.b.data_ptr());
  const auto* logs = static_cast<const float*>(call.A_log.data_ptr());
  const auto* biases = static_cast<const T*>(call.dt_bias.data_ptr());
  const auto* slots = static_cast<const int32_t*>(call.slots.data_ptr());
  auto* outs = static_cast<T*>(call.out.data_ptr());
  const int64_t state_pitch = call.state.stride(0), pitch = call.qkv.stride(0);
  const int64_t a_pitch = call.a.stride(0), b_pitch = call.b.stride(0);
#pragma omp parallel for schedule(static) if (tokens * inner * key_dim >= 65536)
  for (int64_t each = 0; each < tokens * value_heads; ++each) {
    const int64_t token = each / value_heads, h = each % value_heads;
    T* out = outs + token * inner + h * value_dim;
    if (slots[token] <= 0) {
      for (int64_t v = 0; v < value_dim; ++v) store(out + v, 0.0f);
      continue;
    }
    const float x = load(as + token * a_pitch + h) + load(biases + h);
    // above 20 float32 has no place for what the logarithm adds
    const float step = x > 20.0f ? x : std::log1p(std::exp(x));
    const float decay = std::exp(-std::exp(logs[h]) * step);
    const float strength = 1.0f / (1.0f + std::exp(-load(bs + token * b_pitch + h)));
    const T* row = rows + token * pitch;
    const int64_t at = h * heads / value_heads * key_dim;
    head(states + slots[token] * state_pitch + h * value_dim * key_dim, row + at, row + keys + at,
         row + 2 * keys + h * value_dim, out, value_dim, key_dim, decay, strength);
  }
}

template <typename T>
void by_state(const Call& call) {
  if (call.state.dtype().bits == 32)
    run<T, float>(call);
  else
    run<T, T>(call);
}

}  // namespace

void gated_delta_decode(tvm::ffi::TensorView state, tvm::ffi::TensorView qkv,
                        tvm::ffi::TensorView a, tvm::ffi::TensorView b, tvm::ffi::TensorView A_log,
                        tvm::ffi::TensorView dt_bias, tvm::ffi::TensorView slots,
                        tvm::ffi::TensorView out) {
  const Call call{state, qkv, a, b, A_log, dt_bias, slots, out};
  const DLDataType dtype = qkv.dtype();
  if (dtype.code == kDLFloat && dtype.bits == 32)
    by_state<float>(call);
  else if (dtype.code == kDLBfloat && dtype.bits == 16)
    by_state<BFloat16>(call);
  else if (dtype.code == kDLFloat && dtype.bits == 16)
    by_state<Float16>(call);
  else
    throw std::runtime_error("gated_delta_decode: unsupported dtype");
}
