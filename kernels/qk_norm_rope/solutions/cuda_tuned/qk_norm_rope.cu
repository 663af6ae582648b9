// Op: qk_norm_rope: per head n = x * rsqrt(mean(x^2) + epsilon) * weight, then with (a, b) the
//   halves of n: (a * cos - b * sin, b * cos + a * sin), in place for query and key.
// Arguments: query[T: tokens, q_heads * head_dim], key[T: tokens, kv_heads * head_dim], q_weight[T:
//   head_dim], k_weight[T: head_dim], cos_sin[C: tokens, head_dim], epsilon; T: bfloat16 or float16
//   or float32; C: T or float32
// Writes: query, key
// Needs: any NVIDIA GPU (dependent launch from compute capability 9.0 on); head_dim a multiple of
//   16, at most 256; fastest if rows are aligned to 4 elements, others get a scalar variant.
// Idea: 8, 16 or 32 lanes own one head; a lane keeps 4 elements of each half in registers, so that
//   the rotation is local and the norm is a shuffle; all loads come first; one launch, no division.
// Made by: the agent loop, run 20261129-030112-optimize-e989, candidate 0, answered from its prompt
//   alone; not recorded.
// Figures: NVIDIA H200, geometric means, bench/results/kernels: sweep bf16 1.87x against vllm,
//   1.80x to 1.97x at tokens 1 to 128 (qk_norm_rope-cuda_tuned.json.xz).
// Digest: ae4c041fc3d25fa2a157266e3b86fddda98102e0dbd6680d55a30b0123fbcca9

// Op: qk_norm_rope: per head n = x * rsqrt(mean(x^2) + epsilon) * weight, then with (a, b) the halves of n:
//   (a * cos - b * sin, b * cos + a * sin), in place for query and key.
// Arguments: query[T: tokens, q_heads * head_dim], key[T: tokens, kv_heads * head_dim], q_weight[T:
//   head_dim], k_weight[T: head_dim], cos_sin[C: tokens, head_dim], epsilon; T: bfloat16 or float16
//   or float32; C: T or float32
// Writes: query, key
// Needs: any NVIDIA GPU (dependent launch only if built for sm_90 or later); head_dim a multiple of 16, at
//   most 256, else TypeError; fastest if pointers and row strides are aligned to 4 elements, others get a
//   scalar variant; row strides of query and key are free.
// Idea: 8, 16 or 32 lanes own one head; a lane keeps 4 elements of each half in registers, so the rotation
//   is local to it and the norm is a sub-warp shuffle; all loads are issued before the first use; one
//   launch for query and key, no shared memory, no division. A common scheme for rope and norm kernels.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kThreads = 128;

// A dependent launch is asked for only if every architecture of this build has the wait in its code.
#ifdef __CUDA_ARCH_LIST__
constexpr bool built_for_dependent_launch() {
  constexpr int archs[] = {__CUDA_ARCH_LIST__};
  for (int arch : archs) {
    if (arch < 900) return false;
  }
  return true;
}
#else
constexpr bool built_for_dependent_launch() { return false; }
#endif

template <int BYTES>
struct Raw;
template <>
struct Raw<2> {
  using type = unsigned short;
};
template <>
struct Raw<4> {
  using type = unsigned int;
};
template <>
struct Raw<8> {
  using type = uint2;
};
template <>
struct Raw<16> {
  using type = uint4;
};

template <typename T, int VEC>
using RawOf = typename Raw<int(sizeof(T)) * VEC>::type;

template <typename T>
struct Number;

template <>
struct Number<float> {
  static __device__ __forceinline__ float wide(float x) { return x; }
  static __device__ __forceinline__ float narrow(float x) { return x; }
};

template <>
struct Number<__nv_bfloat16> {
  static __device__ __forceinline__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __forceinline__ __nv_bfloat16 narrow(float x) { return __float2bfloat16_rn(x); }
  static __device__ __forceinline__ unsigned int pair(float x, float y) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    unsigned int bits;
    memcpy(&bits, &both, sizeof(bits));
    return bits;
  }
};

template <>
struct Number<__half> {
  static __device__ __forceinline__ float wide(__half x) { return __half2float(x); }
  static __device__ __forceinline__ __half narrow(float x) { return __float2half_rn(x); }
  static __device__ __forceinline__ unsigned int pair(float x, float y) {
    const __half2 both = __floats2half2_rn(x, y);
    unsigned int bits;
    memcpy(&bits, &both, sizeof(bits));
    return bits;
  }
};

template <typename T, int VEC>
__device__ __forceinline__ RawOf<T, VEC> load(const T* from) {
  return *reinterpret_cast<const RawOf<T, VEC>*>(from);
}

template <typename T, int VEC>
__device__ __forceinline__ void widen(const RawOf<T, VEC>& raw, float (&to)[VEC]) {
  T values[VEC];
  memcpy(values, &raw, sizeof(raw));
#pragma unroll
  for (int i = 0; i < VEC; ++i) to[i] = Number<T>::wide(values[i]);
}

template <typename T, int VEC>
__device__ __forceinline__ void store(T* to, const float (&from)[VEC]) {
  RawOf<T, VEC> raw;
  if constexpr (sizeof(T) == 2 && VEC % 2 == 0) {
    unsigned int words[VEC / 2];
#pragma unroll
    for (int i = 0; i < VEC / 2; ++i) words[i] = Number<T>::pair(from[2 * i], from[2 * i + 1]);
    memcpy(&raw, words, sizeof(raw));
  } else {
    T values[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[i] = Number<T>::narrow(from[i]);
    memcpy(&raw, values, sizeof(raw));
  }
  *reinterpret_cast<RawOf<T, VEC>*>(to) = raw;
}

// LANES lanes own one head; each has CHUNKS vectors of VEC elements in either half.
template <typename T, typename C, int VEC, int LANES, int CHUNKS>
__global__ void __launch_bounds__(kThreads)
    qk_norm_rope_kernel(T* query, T* key, const T* q_weight, const T* k_weight, const C* cos_sin,
                        int64_t q_stride, int64_t k_stride, int64_t tokens, int64_t q_heads,
                        int64_t heads, int half, float inverse_dim, float epsilon) {
  constexpr int kGroups = kThreads / LANES;
  const int lane = int(threadIdx.x) % LANES;
  const int64_t head = int64_t(blockIdx.x) * kGroups + int(threadIdx.x) / LANES;
  const int64_t token = int64_t(blockIdx.z) * gridDim.y + blockIdx.y;
  const bool valid = head < heads && token < tokens;
  const bool is_query = head < q_heads;
  const T* weight = is_query ? q_weight : k_weight;

  // Weights may be read before the wait: no kernel in front writes them.
  RawOf<T, VEC> raw_wa[CHUNKS], raw_wb[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int at = (c * LANES + lane) * VEC;
    raw_wa[c] = RawOf<T, VEC>{};
    raw_wb[c] = RawOf<T, VEC>{};
    if (valid && at < half) {
      raw_wa[c] = load<T, VEC>(weight + at);
      raw_wb[c] = load<T, VEC>(weight + half + at);
    }
  }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif

  T* row = is_query ? query + token * q_stride + head * (2 * half)
                    : key + token * k_stride + (head - q_heads) * (2 * half);
  const C* turn = cos_sin + token * (2 * half);

  RawOf<T, VEC> raw_a[CHUNKS], raw_b[CHUNKS];
  RawOf<C, VEC> raw_cos[CHUNKS], raw_sin[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int at = (c * LANES + lane) * VEC;
    raw_a[c] = RawOf<T, VEC>{};
    raw_b[c] = RawOf<T, VEC>{};
    raw_cos[c] = RawOf<C, VEC>{};
    raw_sin[c] = RawOf<C, VEC>{};
    if (valid && at < half) {
      raw_a[c] = load<T, VEC>(row + at);
      raw_b[c] = load<T, VEC>(row + half + at);
      raw_cos[c] = load<C, VEC>(turn + at);
      raw_sin[c] = load<C, VEC>(turn + half + at);
    }
  }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // The kernel behind may be set up now; its own wait still waits for the end of this grid.
  cudaTriggerProgrammaticLaunchCompletion();
#endif

  float a[CHUNKS][VEC], b[CHUNKS][VEC];
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    widen<T, VEC>(raw_a[c], a[c]);
    widen<T, VEC>(raw_b[c], b[c]);
    float sum_a = 0.0f, sum_b = 0.0f;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      sum_a = fmaf(a[c][i], a[c][i], sum_a);
      sum_b = fmaf(b[c][i], b[c][i], sum_b);
    }
    sum += sum_a + sum_b;
  }
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset, LANES);
  }
  const float scale = rsqrtf(fmaf(sum, inverse_dim, epsilon));

#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int at = (c * LANES + lane) * VEC;
    if (valid && at < half) {
      float wa[VEC], wb[VEC], cosine[VEC], sine[VEC], first[VEC], second[VEC];
      widen<T, VEC>(raw_wa[c], wa);
      widen<T, VEC>(raw_wb[c], wb);
      widen<C, VEC>(raw_cos[c], cosine);
      widen<C, VEC>(raw_sin[c], sine);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const float na = a[c][i] * scale * wa[i];
        const float nb = b[c][i] * scale * wb[i];
        first[i] = fmaf(na, cosine[i], -(nb * sine[i]));
        second[i] = fmaf(nb, cosine[i], na * sine[i]);
      }
      store<T, VEC>(row + at, first);
      store<T, VEC>(row + half + at, second);
    }
  }
}

struct Problem {
  void* query;
  void* key;
  const void* q_weight;
  const void* k_weight;
  const void* cos_sin;
  int64_t q_stride;
  int64_t k_stride;
  int64_t tokens;
  int64_t q_heads;
  int64_t heads;
  int half;
  float epsilon;
  cudaStream_t stream;
};

template <typename T, typename C, int VEC, int LANES, int CHUNKS>
void launch(const Problem& p) {
  constexpr int64_t kGroups = kThreads / LANES;
  constexpr int64_t kMost = 65535;
  const int64_t y = p.tokens < kMost ? p.tokens : kMost;
  const int64_t z = (p.tokens + y - 1) / y;

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned((p.heads + kGroups - 1) / kGroups), unsigned(y), unsigned(z));
  config.blockDim = dim3(kThreads, 1, 1);
  config.dynamicSmemBytes = 0;
  config.stream = p.stream;
  cudaLaunchAttribute attribute[1] = {};
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute;
  config.numAttrs = built_for_dependent_launch() ? 1 : 0;

  const cudaError_t status = cudaLaunchKernelEx(
      &config, qk_norm_rope_kernel<T, C, VEC, LANES, CHUNKS>, static_cast<T*>(p.query),
      static_cast<T*>(p.key), static_cast<const T*>(p.q_weight), static_cast<const T*>(p.k_weight),
      static_cast<const C*>(p.cos_sin), p.q_stride, p.k_stride, p.tokens, p.q_heads, p.heads, p.half,
      1.0f / float(2 * p.half), p.epsilon);
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}

bool aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

template <typename T, typename C>
void choose(const Problem& p) {
  constexpr int kVec = 4;
  const bool vectors = aligned(p.query, kVec * sizeof(T)) && aligned(p.key, kVec * sizeof(T)) &&
                       aligned(p.q_weight, kVec * sizeof(T)) && aligned(p.k_weight, kVec * sizeof(T)) &&
                       aligned(p.cos_sin, kVec * sizeof(C)) && p.q_stride % kVec == 0 &&
                       p.k_stride % kVec == 0;
  if (!vectors) return launch<T, C, 1, 32, 4>(p);
  if (p.half <= 8 * kVec) return launch<T, C, kVec, 8, 1>(p);
  if (p.half <= 16 * kVec) return launch<T, C, kVec, 16, 1>(p);
  return launch<T, C, kVec, 32, 1>(p);
}

bool is_type(DLDataType type, int code, int bits) {
  return int(type.code) == code && int(type.bits) == bits && int(type.lanes) == 1;
}

bool same_type(DLDataType x, DLDataType y) {
  return x.code == y.code && x.bits == y.bits && x.lanes == y.lanes;
}

}  // namespace

void qk_norm_rope(tvm::ffi::TensorView query, tvm::ffi::TensorView key, tvm::ffi::TensorView q_weight,
                  tvm::ffi::TensorView k_weight, tvm::ffi::TensorView cos_sin, double epsilon) {
  const DLDataType type = query.dtype();
  const DLDataType turn_type = cos_sin.dtype();
  if (!same_type(type, key.dtype()) || !same_type(type, q_weight.dtype()) ||
      !same_type(type, k_weight.dtype())) {
    TVM_FFI_THROW(TypeError) << "qk_norm_rope: query, key and weights differ in dtype";
  }
  const int64_t head_dim = q_weight.size(0);
  if (head_dim < 16 || head_dim > 256 || head_dim % 16 != 0) {
    TVM_FFI_THROW(TypeError) << "qk_norm_rope: head_dim must be a multiple of 16, at most 256";
  }
  const int64_t tokens = query.size(0);
  if (key.size(0) != tokens || cos_sin.size(0) != tokens || cos_sin.size(1) != head_dim ||
      k_weight.size(0) != head_dim || query.size(1) % head_dim != 0 || key.size(1) % head_dim != 0) {
    TVM_FFI_THROW(TypeError) << "qk_norm_rope: shapes do not match";
  }

  const DLDevice device = query.device();
  Problem p;
  p.query = query.data_ptr();
  p.key = key.data_ptr();
  p.q_weight = q_weight.data_ptr();
  p.k_weight = k_weight.data_ptr();
  p.cos_sin = cos_sin.data_ptr();
  p.q_stride = tokens > 1 ? query.stride(0) : 0;  // the stride of a lone row means nothing
  p.k_stride = tokens > 1 ? key.stride(0) : 0;
  p.tokens = tokens;
  p.q_heads = query.size(1) / head_dim;
  p.heads = p.q_heads + key.size(1) / head_dim;
  p.half = int(head_dim / 2);
  p.epsilon = float(epsilon);
  p.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));

  const bool wide_turn = is_type(turn_type, kDLFloat, 32);
  const bool same_turn = same_type(type, turn_type);
  if (!wide_turn && !same_turn) {
    TVM_FFI_THROW(TypeError) << "qk_norm_rope: cos_sin must be float32 or of the dtype of query";
  }
  if (tokens == 0 || p.heads == 0) return;

  if (is_type(type, kDLBfloat, 16)) {
    if (wide_turn) return choose<__nv_bfloat16, float>(p);
    return choose<__nv_bfloat16, __nv_bfloat16>(p);
  }
  if (is_type(type, kDLFloat, 16)) {
    if (wide_turn) return choose<__half, float>(p);
    return choose<__half, __half>(p);
  }
  if (is_type(type, kDLFloat, 32)) return choose<float, float>(p);
  TVM_FFI_THROW(TypeError) << "qk_norm_rope: unsupported dtype";
}
