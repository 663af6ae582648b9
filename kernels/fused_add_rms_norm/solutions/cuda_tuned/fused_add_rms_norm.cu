#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace farn {

// ---- conversions ----------------------------------------------------------

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) { return v; }
template <>
__device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// ---- 8 elements, aligned to 16 bytes --------------------------------------

__device__ __forceinline__ void unpack_bf16x8(const uint4 u, float (&o)[8]) {
  o[0] = __uint_as_float(u.x << 16); o[1] = __uint_as_float(u.x & 0xffff0000u);
  o[2] = __uint_as_float(u.y << 16); o[3] = __uint_as_float(u.y & 0xffff0000u);
  o[4] = __uint_as_float(u.z << 16); o[5] = __uint_as_float(u.z & 0xffff0000u);
  o[6] = __uint_as_float(u.w << 16); o[7] = __uint_as_float(u.w & 0xffff0000u);
}

__device__ __forceinline__ void load8_vec(const float* p, float (&o)[8]) {
  const float4 a = reinterpret_cast<const float4*>(p)[0];
  const float4 b = reinterpret_cast<const float4*>(p)[1];
  o[0] = a.x; o[1] = a.y; o[2] = a.z; o[3] = a.w;
  o[4] = b.x; o[5] = b.y; o[6] = b.z; o[7] = b.w;
}

__device__ __forceinline__ void load8_vec(const __nv_bfloat16* p, float (&o)[8]) {
  unpack_bf16x8(*reinterpret_cast<const uint4*>(p), o);
}

__device__ __forceinline__ float2 unpack_half2(unsigned u) {
  const __half2 h = *reinterpret_cast<const __half2*>(&u);
  return __half22float2(h);
}

__device__ __forceinline__ void load8_vec(const __half* p, float (&o)[8]) {
  const uint4 u = *reinterpret_cast<const uint4*>(p);
  const float2 a = unpack_half2(u.x);
  const float2 b = unpack_half2(u.y);
  const float2 c = unpack_half2(u.z);
  const float2 d = unpack_half2(u.w);
  o[0] = a.x; o[1] = a.y; o[2] = b.x; o[3] = b.y;
  o[4] = c.x; o[5] = c.y; o[6] = d.x; o[7] = d.y;
}

__device__ __forceinline__ void store8_vec(float* p, const float (&v)[8]) {
  reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

__device__ __forceinline__ unsigned pack_bf16(float lo, float hi) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const unsigned*>(&h);
}

__device__ __forceinline__ unsigned pack_half(float lo, float hi) {
  const __half2 h = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const unsigned*>(&h);
}

__device__ __forceinline__ uint4 pack_bf16x8(const float (&v)[8]) {
  return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                    pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

__device__ __forceinline__ void store8_vec(__nv_bfloat16* p, const float (&v)[8]) {
  *reinterpret_cast<uint4*>(p) = pack_bf16x8(v);
}

__device__ __forceinline__ void store8_vec(__half* p, const float (&v)[8]) {
  *reinterpret_cast<uint4*>(p) = make_uint4(pack_half(v[0], v[1]), pack_half(v[2], v[3]),
                                            pack_half(v[4], v[5]), pack_half(v[6], v[7]));
}

template <bool ALIGNED, typename T>
__device__ __forceinline__ void load8(const T* p, float (&o)[8]) {
  if constexpr (ALIGNED) {
    load8_vec(p, o);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) o[i] = to_float(p[i]);
  }
}

template <bool ALIGNED, typename T>
__device__ __forceinline__ void store8(T* p, const float (&v)[8]) {
  if constexpr (ALIGNED) {
    store8_vec(p, v);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) p[i] = from_float<T>(v[i]);
  }
}

// ---- raw 16-byte loads, kept in program order -----------------------------

__device__ __forceinline__ uint4 load_raw(const uint4* p) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}

// Zeros where `on` is 0; nothing is read there.
__device__ __forceinline__ uint4 load_raw_if(const uint4* p, unsigned on) {
  uint4 r = make_uint4(0u, 0u, 0u, 0u);
  asm volatile(
      "{\n\t"
      ".reg .pred q;\n\t"
      "setp.ne.u32 q, %5, 0;\n\t"
      "@q ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
      "}"
      : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)
      : "l"(p), "r"(on));
  return r;
}

__device__ __forceinline__ void pdl_enter() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // Let the next kernel become resident; wait for all of the previous one's work.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- kernel for bf16, hidden = 2880 ---------------------------------------

constexpr int kHidden = 2880;
constexpr int kVecs = kHidden / 8;    // 360
constexpr int kThreads = 192;         // two vectors a thread: 384 slots
constexpr int kWarps = kThreads / 32; // 6
static_assert(2 * kThreads >= kVecs && kThreads <= kVecs, "two vectors a thread");

__global__ void __launch_bounds__(kThreads)
    fused_add_rms_norm_bf16_2880_kernel(uint4* input, uint4* residual, const uint4* weight,
                                        float epsilon) {
  __shared__ float4 partial[kWarps];

  const int tid = int(threadIdx.x);
  const int lane = tid & 31;
  const unsigned second = tid < kVecs - kThreads ? 1u : 0u;

  uint4* in_row = input + (int64_t(blockIdx.x) * kVecs + tid);
  uint4* res_row = residual + (int64_t(blockIdx.x) * kVecs + tid);
  const uint4* w_row = weight + tid;

  pdl_enter();

  const uint4 a0 = load_raw(in_row);
  const uint4 r0 = load_raw(res_row);
  const uint4 a1 = load_raw_if(in_row + kThreads, second);
  const uint4 r1 = load_raw_if(res_row + kThreads, second);
  const uint4 w0 = load_raw(w_row);
  const uint4 w1 = load_raw_if(w_row + kThreads, second);

  float x0[8];
  float x1[8];
  {
    float r[8];
    unpack_bf16x8(a0, x0);
    unpack_bf16x8(r0, r);
#pragma unroll
    for (int i = 0; i < 8; ++i) x0[i] += r[i];
    unpack_bf16x8(a1, x1);
    unpack_bf16x8(r1, r);
#pragma unroll
    for (int i = 0; i < 8; ++i) x1[i] += r[i];
  }

  float s0 = x0[0] * x0[0];
  float s1 = x0[1] * x0[1];
  float s2 = x1[0] * x1[0];
  float s3 = x1[1] * x1[1];
#pragma unroll
  for (int i = 2; i < 8; i += 2) {
    s0 = fmaf(x0[i], x0[i], s0);
    s1 = fmaf(x0[i + 1], x0[i + 1], s1);
    s2 = fmaf(x1[i], x1[i], s2);
    s3 = fmaf(x1[i + 1], x1[i + 1], s3);
  }
  float sum = (s0 + s1) + (s2 + s3);

  // The residual stream goes out while the reduction runs.
  res_row[0] = pack_bf16x8(x0);
  if (second) res_row[kThreads] = pack_bf16x8(x1);

  // Lanes 0 to 3 end with the sums of the lanes congruent to them modulo 4.
  sum += __shfl_xor_sync(0xffffffffu, sum, 16);
  sum += __shfl_xor_sync(0xffffffffu, sum, 8);
  sum += __shfl_xor_sync(0xffffffffu, sum, 4);
  if (lane < 4) reinterpret_cast<float*>(partial)[(tid >> 5) * 4 + lane] = sum;
  __syncthreads();

  const float4 p0 = partial[0];
  const float4 p1 = partial[1];
  const float4 p2 = partial[2];
  const float4 p3 = partial[3];
  const float4 p4 = partial[4];
  const float4 p5 = partial[5];
  const float tx = ((p0.x + p1.x) + (p2.x + p3.x)) + (p4.x + p5.x);
  const float ty = ((p0.y + p1.y) + (p2.y + p3.y)) + (p4.y + p5.y);
  const float tz = ((p0.z + p1.z) + (p2.z + p3.z)) + (p4.z + p5.z);
  const float tw = ((p0.w + p1.w) + (p2.w + p3.w)) + (p4.w + p5.w);
  const float total = (tx + ty) + (tz + tw);

  const float scale = rsqrtf(fmaf(total, 1.0f / float(kHidden), epsilon));

  {
    float w[8];
    unpack_bf16x8(w0, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) x0[i] = (x0[i] * scale) * w[i];
    in_row[0] = pack_bf16x8(x0);
  }
  if (second) {
    float w[8];
    unpack_bf16x8(w1, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) x1[i] = (x1[i] * scale) * w[i];
    in_row[kThreads] = pack_bf16x8(x1);
  }
}

// ---- generic kernel -------------------------------------------------------

inline int threads_for(int vecs) { return (vecs + 31) / 32 * 32; }

// One block per token; NV vectors of 8 elements per thread.
template <typename T, typename W, int NV, bool ALIGNED>
__global__ void __launch_bounds__(1024)
    fused_add_rms_norm_kernel(T* input, T* residual, const W* weight, float epsilon, int hidden) {
  __shared__ float partial[32];

  const int vecs = hidden >> 3;
  const int tid = int(threadIdx.x);
  const int block_threads = int(blockDim.x);

  T* in_row = input + int64_t(blockIdx.x) * hidden;
  T* res_row = residual + int64_t(blockIdx.x) * hidden;

  pdl_enter();

  float x[NV][8];
  float w[NV][8];
  float sum = 0.0f;

#pragma unroll
  for (int v = 0; v < NV; ++v) {
    const int index = tid + v * block_threads;
    if (index < vecs) {
      float r[8];
      load8<ALIGNED>(in_row + index * 8, x[v]);
      load8<ALIGNED>(res_row + index * 8, r);
      if constexpr (NV == 1) load8<ALIGNED>(weight + index * 8, w[v]);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[v][i] += r[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[v][i] = 0.0f;
        w[v][i] = 0.0f;
      }
    }
  }

#pragma unroll
  for (int v = 0; v < NV; ++v) {
    float a = x[v][0] * x[v][0];
    float b = x[v][1] * x[v][1];
#pragma unroll
    for (int i = 2; i < 8; i += 2) {
      a = fmaf(x[v][i], x[v][i], a);
      b = fmaf(x[v][i + 1], x[v][i + 1], b);
    }
    sum += a + b;
  }

  // The residual stream goes out while the reduction runs.
#pragma unroll
  for (int v = 0; v < NV; ++v) {
    const int index = tid + v * block_threads;
    if (index < vecs) store8<ALIGNED>(res_row + index * 8, x[v]);
  }

#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }

  const int lane = tid & 31;
  if (lane == 0) partial[tid >> 5] = sum;
  __syncthreads();

  float total = lane < (block_threads >> 5) ? partial[lane] : 0.0f;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    total += __shfl_xor_sync(0xffffffffu, total, offset);
  }

  const float mean = total / float(hidden);
  const float scale = rsqrtf(mean + epsilon);

#pragma unroll
  for (int v = 0; v < NV; ++v) {
    const int index = tid + v * block_threads;
    if (index < vecs) {
      if constexpr (NV != 1) load8<ALIGNED>(weight + index * 8, w[v]);
      float y[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = (x[v][i] * scale) * w[v][i];
      store8<ALIGNED>(in_row + index * 8, y);
    }
  }
}

// ---- host -----------------------------------------------------------------

inline void check_launch(cudaError_t status) {
  if (status != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << "fused_add_rms_norm: " << cudaGetErrorString(status);
  }
}

inline cudaLaunchConfig_t make_config(int64_t tokens, int threads, cudaStream_t stream,
                                      cudaLaunchAttribute* attribute) {
  attribute->id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute->val.programmaticStreamSerializationAllowed = 1;

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(tokens), 1, 1);
  config.blockDim = dim3(unsigned(threads), 1, 1);
  config.dynamicSmemBytes = 0;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

template <typename T, typename W, int NV, bool ALIGNED>
void launch_kernel(T* input, T* residual, const W* weight, float epsilon, int64_t tokens,
                   int hidden, int threads, cudaStream_t stream) {
  cudaLaunchAttribute attribute[1];
  const cudaLaunchConfig_t config = make_config(tokens, threads, stream, attribute);
  check_launch(cudaLaunchKernelEx(&config, fused_add_rms_norm_kernel<T, W, NV, ALIGNED>, input,
                                  residual, weight, epsilon, hidden));
}

inline void launch_2880(__nv_bfloat16* input, __nv_bfloat16* residual,
                        const __nv_bfloat16* weight, float epsilon, int64_t tokens,
                        cudaStream_t stream) {
  cudaLaunchAttribute attribute[1];
  const cudaLaunchConfig_t config = make_config(tokens, kThreads, stream, attribute);
  uint4* in = reinterpret_cast<uint4*>(input);
  uint4* res = reinterpret_cast<uint4*>(residual);
  const uint4* w = reinterpret_cast<const uint4*>(weight);
  check_launch(
      cudaLaunchKernelEx(&config, fused_add_rms_norm_bf16_2880_kernel, in, res, w, epsilon));
}

template <typename T, typename W>
struct IsTimedPair {
  static constexpr bool value = false;
};
template <>
struct IsTimedPair<__nv_bfloat16, __nv_bfloat16> {
  static constexpr bool value = true;
};

template <typename T, typename W>
void launch(const tvm::ffi::TensorView& input_view, const tvm::ffi::TensorView& residual_view,
            const tvm::ffi::TensorView& weight_view, float epsilon) {
  const int64_t tokens = input_view.size(0);
  const int64_t hidden64 = input_view.size(1);
  if (tokens == 0 || hidden64 == 0) return;
  if (hidden64 % 8 != 0 || hidden64 > 16384) {
    TVM_FFI_THROW(ValueError)
        << "fused_add_rms_norm: hidden must be a multiple of 8 and at most 16384";
  }
  const int hidden = int(hidden64);
  const int vecs = hidden / 8;

  T* input = static_cast<T*>(input_view.data_ptr());
  T* residual = static_cast<T*>(residual_view.data_ptr());
  const W* weight = static_cast<const W*>(weight_view.data_ptr());

  const DLDevice device = input_view.device();
  auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));

  const bool aligned = ((reinterpret_cast<uintptr_t>(input) |
                         reinterpret_cast<uintptr_t>(residual) |
                         reinterpret_cast<uintptr_t>(weight)) & 15u) == 0;

  if (aligned) {
    if constexpr (IsTimedPair<T, W>::value) {
      if (hidden == kHidden) {
        launch_2880(input, residual, weight, epsilon, tokens, stream);
        return;
      }
    }
    if (vecs <= 1024) {
      launch_kernel<T, W, 1, true>(input, residual, weight, epsilon, tokens, hidden,
                                   threads_for(vecs), stream);
    } else {
      launch_kernel<T, W, 2, true>(input, residual, weight, epsilon, tokens, hidden,
                                   threads_for((vecs + 1) / 2), stream);
    }
  } else {
    if (vecs <= 1024) {
      launch_kernel<T, W, 1, false>(input, residual, weight, epsilon, tokens, hidden,
                                    threads_for(vecs), stream);
    } else {
      launch_kernel<T, W, 2, false>(input, residual, weight, epsilon, tokens, hidden,
                                    threads_for((vecs + 1) / 2), stream);
    }
  }
}

inline bool is_f32(DLDataType t) { return t.code == kDLFloat && t.bits == 32; }
inline bool is_f16(DLDataType t) { return t.code == kDLFloat && t.bits == 16; }
inline bool is_bf16(DLDataType t) { return t.code == kDLBfloat && t.bits == 16; }

}  // namespace farn

void fused_add_rms_norm(tvm::ffi::TensorView input, tvm::ffi::TensorView residual,
                        tvm::ffi::TensorView weight, double epsilon) {
  const DLDataType t = input.dtype();
  const DLDataType r = residual.dtype();
  const DLDataType w = weight.dtype();
  const float eps = float(epsilon);
  if (r.code == t.code && r.bits == t.bits) {
    if (farn::is_bf16(t) && farn::is_bf16(w)) {
      return farn::launch<__nv_bfloat16, __nv_bfloat16>(input, residual, weight, eps);
    }
    if (farn::is_bf16(t) && farn::is_f32(w)) {
      return farn::launch<__nv_bfloat16, float>(input, residual, weight, eps);
    }
    if (farn::is_f16(t) && farn::is_f16(w)) {
      return farn::launch<__half, __half>(input, residual, weight, eps);
    }
    if (farn::is_f16(t) && farn::is_f32(w)) {
      return farn::launch<__half, float>(input, residual, weight, eps);
    }
    if (farn::is_f32(t) && farn::is_f32(w)) {
      return farn::launch<float, float>(input, residual, weight, eps);
    }
  }
  TVM_FFI_THROW(TypeError) << "fused_add_rms_norm: unsupported dtype";
}
