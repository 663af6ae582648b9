// Op: fused_add_rms_norm: residual += input; input = residual / sqrt(mean(residual^2) + epsilon) *
//   weight, in place; arithmetic in float32.
// Arguments: input[T: tokens, hidden], residual[T: tokens, hidden], weight[W: hidden], epsilon; T:
//   bfloat16 or float16 or float32; W: T or float32
// Writes: input, residual
// Needs: compute capability 9.0 or later; fast for 16-byte aligned tensors with hidden a multiple
//   of 8 and at most 16384, tuned at 2880; a scalar kernel takes other rows; graph-safe.
// Idea: latency counts at few rows. One block a row, the row in registers, one barrier. The next
//   launch is let in and the weight read before the wait for the kernel before; the residual is
//   stored while the shuffles run, and the product with the weight is made while the scale is.
// Made by: the agent loop, recording bench/results/loop/fused_add_rms_norm-cuda-4, candidate 0,
//   begun from the kernel of fused_add_rms_norm-cuda-3.
// Figures: NVIDIA H200, geometric means, bench/results/kernels: sweep bf16 1.26x against vllm,
//   1.10x to 1.46x at tokens 1 to 128 (fused_add_rms_norm-cuda_tuned.json.xz).
// Digest: e2eab3cab43163e731c85d7fac74c78f92a0ce1df4ca7086b84d451716210eeb

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fused_norm {

// Eight elements of T as they lie in memory: one 16-byte quad for 16-bit types, two for float.
template <typename T>
struct Raw {
  static constexpr int kQuads = int(sizeof(T)) / 2;
  uint4 quad[kQuads];
};

// Activations: read once, past L1 (fresh after the dependency wait). Volatile: stays behind the wait.
__device__ __forceinline__ void load_data_quad(uint4& v, const void* pointer) {
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(pointer))
               : "memory");
}

__device__ __forceinline__ void load_data_quad_if(uint4& v, const void* pointer, int active) {
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.ne.b32 p, %5, 0;\n"
      "  @p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(__cvta_generic_to_global(pointer)), "r"(active)
      : "memory");
}

// The weight: read-only for the kernel's whole life. Volatile: stays behind the activations' loads.
__device__ __forceinline__ void load_weight_quad(uint4& v, const void* pointer) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(pointer))
               : "memory");
}

__device__ __forceinline__ void load_weight_quad_if(uint4& v, const void* pointer, int active) {
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.ne.b32 p, %5, 0;\n"
      "  @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(__cvta_generic_to_global(pointer)), "r"(active)
      : "memory");
}

// always: known when compiled that every thread has this unit.
template <typename T>
__device__ __forceinline__ Raw<T> load_data(const T* pointer, bool always, bool active) {
  Raw<T> raw;
#pragma unroll
  for (int q = 0; q < Raw<T>::kQuads; ++q) {
    if (always) {
      load_data_quad(raw.quad[q], reinterpret_cast<const uint4*>(pointer) + q);
    } else {
      raw.quad[q] = make_uint4(0u, 0u, 0u, 0u);
      load_data_quad_if(raw.quad[q], reinterpret_cast<const uint4*>(pointer) + q, int(active));
    }
  }
  return raw;
}

template <typename W>
__device__ __forceinline__ Raw<W> load_weight(const W* pointer, bool always, bool active) {
  Raw<W> raw;
#pragma unroll
  for (int q = 0; q < Raw<W>::kQuads; ++q) {
    if (always) {
      load_weight_quad(raw.quad[q], reinterpret_cast<const uint4*>(pointer) + q);
    } else {
      raw.quad[q] = make_uint4(0u, 0u, 0u, 0u);
      load_weight_quad_if(raw.quad[q], reinterpret_cast<const uint4*>(pointer) + q, int(active));
    }
  }
  return raw;
}

template <typename T>
__device__ __forceinline__ void store_data(T* pointer, const Raw<T>& raw) {
#pragma unroll
  for (int q = 0; q < Raw<T>::kQuads; ++q) reinterpret_cast<uint4*>(pointer)[q] = raw.quad[q];
}

// Two 16-bit elements in a word, to and from float.
template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ void unpack(uint32_t word, float& low, float& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

template <>
struct Pair<__half> {
  static __device__ __forceinline__ void unpack(uint32_t word, float& low, float& high) {
    const __half2 pair = *reinterpret_cast<const __half2*>(&word);
    const float2 both = __half22float2(pair);
    low = both.x;
    high = both.y;
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

template <typename T>
__device__ __forceinline__ void unpack(const Raw<T>& raw, float (&out)[8]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      out[4 * q + 0] = __uint_as_float(raw.quad[q].x);
      out[4 * q + 1] = __uint_as_float(raw.quad[q].y);
      out[4 * q + 2] = __uint_as_float(raw.quad[q].z);
      out[4 * q + 3] = __uint_as_float(raw.quad[q].w);
    }
  } else {
    Pair<T>::unpack(raw.quad[0].x, out[0], out[1]);
    Pair<T>::unpack(raw.quad[0].y, out[2], out[3]);
    Pair<T>::unpack(raw.quad[0].z, out[4], out[5]);
    Pair<T>::unpack(raw.quad[0].w, out[6], out[7]);
  }
}

template <typename T>
__device__ __forceinline__ Raw<T> pack(const float (&in)[8]) {
  Raw<T> raw;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      raw.quad[q].x = __float_as_uint(in[4 * q + 0]);
      raw.quad[q].y = __float_as_uint(in[4 * q + 1]);
      raw.quad[q].z = __float_as_uint(in[4 * q + 2]);
      raw.quad[q].w = __float_as_uint(in[4 * q + 3]);
    }
  } else {
    raw.quad[0].x = Pair<T>::pack(in[0], in[1]);
    raw.quad[0].y = Pair<T>::pack(in[2], in[3]);
    raw.quad[0].z = Pair<T>::pack(in[4], in[5]);
    raw.quad[0].w = Pair<T>::pack(in[6], in[7]);
  }
  return raw;
}

// One block per row; a unit is eight elements; kUnits units a thread, held in registers.
// kFixed: the number of units of a row where it is known when compiled (and epsilon is then a normal
// number, so that the argument of the square root is one), else 0.
template <typename T, typename W, int kThreads, int kUnits, int kFixed>
__global__ void __launch_bounds__(kThreads)
    row_kernel(T* input, T* residual, const W* weight, int dynamic_units, float inv_hidden, float epsilon) {
  // First of all: the next launch may start. It reads nothing of ours before its own wait, which
  // lasts until this grid is complete, and this grid completes only after its own wait below, which
  // every thread executes: so the order of all grids in the chain holds.
  cudaTriggerProgrammaticLaunchCompletion();

  constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0, "whole warps");
  static_assert(kFixed <= kThreads * kUnits, "the row fits the block");
  constexpr bool kEarlyWeight = kUnits <= 3;
  __shared__ __align__(16) float partial[kWarps * 4];

  const int tid = int(threadIdx.x);
  const int units = kFixed > 0 ? kFixed : dynamic_units;

  const uint64_t offset = uint64_t(blockIdx.x) * uint64_t(unsigned(units) * 8u) + uint64_t(unsigned(tid) * 8u);
  T* const input_at = input + offset;
  T* const residual_at = residual + offset;
  const W* const weight_at = weight + tid * 8;

  // The weight is no kernel's output: it may be read before the wait. All blocks read the same few L2
  // lines, so they do it here, while the grid before still runs, and not in the burst after the wait.
  Raw<W> raw_weight[kUnits];
  if constexpr (kEarlyWeight) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const bool always = kFixed >= (u + 1) * kThreads;
      const bool active = always || tid + u * kThreads < units;
      raw_weight[u] = load_weight<W>(weight_at + u * kThreads * 8, always, active);
    }
  } else if (blockIdx.x == 0 && tid == kThreads - 32) {
    // Too many registers to hold: into the L2, once for the grid, by the bulk engine.
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                 :
                 : "l"(__cvta_generic_to_global(weight)), "r"(unsigned(units) * 8u * unsigned(sizeof(W)))
                 : "memory");
  }

  cudaGridDependencySynchronize();

  // From here on one trip to memory: the activations. The reduction hangs on them.
  Raw<T> raw_residual[kUnits];
  Raw<T> raw_input[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const bool always = kFixed >= (u + 1) * kThreads;
    const bool active = always || tid + u * kThreads < units;
    raw_residual[u] = load_data<T>(residual_at + u * kThreads * 8, always, active);
    raw_input[u] = load_data<T>(input_at + u * kThreads * 8, always, active);
  }

  // Absent units were read as zeros and add nothing.
  float x[kUnits][8];
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    float r[8];
    float i[8];
    unpack<T>(raw_residual[u], r);
    unpack<T>(raw_input[u], i);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      x[u][k] = r[k] + i[k];
      sums[k & 3] = fmaf(x[u][k], x[u][k], sums[k & 3]);
    }
  }
  float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);

  if constexpr (!kEarlyWeight) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const bool always = kFixed >= (u + 1) * kThreads;
      const bool active = always || tid + u * kThreads < units;
      raw_weight[u] = load_weight<W>(weight_at + u * kThreads * 8, always, active);
    }
  }

  // Three shuffles leave four sums a warp (in lanes 0 to 3); the residual is packed and stored while
  // they are under way.
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    const float other = __shfl_xor_sync(0xffffffffu, sum, 16 >> step);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (u % 3 == step) {
        const bool always = kFixed >= (u + 1) * kThreads;
        if (always || tid + u * kThreads < units) {
          store_data<T>(residual_at + u * kThreads * 8, pack<T>(x[u]));
        }
      }
    }
    sum += other;
  }
  if ((tid & 31) < 4) partial[(tid >> 5) * 4 + (tid & 31)] = sum;
  __syncthreads();

  // Four warps: a balanced tree, all reads issued first. More warps: one after another, in few registers.
  float4 total = reinterpret_cast<const float4*>(partial)[0];
  if constexpr (kWarps == 4) {
    const float4 b = reinterpret_cast<const float4*>(partial)[1];
    const float4 c = reinterpret_cast<const float4*>(partial)[2];
    const float4 d = reinterpret_cast<const float4*>(partial)[3];
    total.x = (total.x + b.x) + (c.x + d.x);
    total.y = (total.y + b.y) + (c.y + d.y);
    total.z = (total.z + b.z) + (c.z + d.z);
    total.w = (total.w + b.w) + (c.w + d.w);
  } else {
#pragma unroll
    for (int p = 1; p < kWarps; ++p) {
      const float4 more = reinterpret_cast<const float4*>(partial)[p];
      total.x += more.x;
      total.y += more.y;
      total.z += more.z;
      total.w += more.w;
    }
  }

  // The product with the weight waits for no scale: it fills the time in which the scale is made.
  // Float storage keeps the order scale, then weight, which cannot leave the normal range first.
  constexpr bool kProductFirst = sizeof(T) == 2;
  if constexpr (kProductFirst) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      float w[8];
      unpack<W>(raw_weight[u], w);
#pragma unroll
      for (int k = 0; k < 8; ++k) x[u][k] *= w[k];
    }
  }

  float per_element = inv_hidden;
  if constexpr (kFixed > 0) per_element = float(1.0 / double(kFixed * 8));
  const float mean_square = fmaf((total.x + total.y) + (total.z + total.w), per_element, epsilon);
  float scale;
  if constexpr (kFixed > 0) {
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(scale) : "f"(mean_square));
  } else {
    scale = rsqrtf(mean_square);
  }

#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const bool always = kFixed >= (u + 1) * kThreads;
    float y[8];
    if constexpr (kProductFirst) {
#pragma unroll
      for (int k = 0; k < 8; ++k) y[k] = x[u][k] * scale;
    } else {
      float w[8];
      unpack<W>(raw_weight[u], w);
#pragma unroll
      for (int k = 0; k < 8; ++k) y[k] = (x[u][k] * scale) * w[k];
    }
    if (always || tid + u * kThreads < units) {
      store_data<T>(input_at + u * kThreads * 8, pack<T>(y));
    }
  }
}

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// Any alignment and any width: element by element, the row read twice. Launched without the
// programmatic attribute, so it needs no wait. A thread rereads only what it alone writes.
constexpr int kScalarThreads = 512;

template <typename T, typename W>
__global__ void __launch_bounds__(kScalarThreads)
    scalar_kernel(T* input, T* residual, const W* weight, int64_t hidden, float inv_hidden, float epsilon) {
  __shared__ float partial[kScalarThreads / 32];
  T* const input_row = input + int64_t(blockIdx.x) * hidden;
  T* const residual_row = residual + int64_t(blockIdx.x) * hidden;
  const int tid = int(threadIdx.x);

  float sum = 0.0f;
  for (int64_t c = tid; c < hidden; c += kScalarThreads) {
    const float x = to_float(residual_row[c]) + to_float(input_row[c]);
    sum = fmaf(x, x, sum);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if ((tid & 31) == 0) partial[tid >> 5] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int p = 0; p < kScalarThreads / 32; ++p) total += partial[p];
  const float scale = rsqrtf(fmaf(total, inv_hidden, epsilon));

  for (int64_t c = tid; c < hidden; c += kScalarThreads) {
    const float x = to_float(residual_row[c]) + to_float(input_row[c]);
    residual_row[c] = from_float<T>(x);
    input_row[c] = from_float<T>((x * scale) * to_float(weight[c]));
  }
}

inline void check(cudaError_t status) {
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}

template <typename T, typename W, int kThreads, int kUnits, int kFixed>
void launch_rows(T* input, T* residual, const W* weight, int64_t tokens, int units, float inv_hidden,
                 float epsilon, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(tokens));
  config.blockDim = dim3(unsigned(kThreads));
  config.dynamicSmemBytes = 0;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, row_kernel<T, W, kThreads, kUnits, kFixed>, input, residual, weight,
                           units, inv_hidden, epsilon));
}

template <typename T, typename W>
void launch(tvm::ffi::TensorView input_view, tvm::ffi::TensorView residual_view,
            tvm::ffi::TensorView weight_view, float epsilon) {
  const int64_t tokens = input_view.size(0);
  const int64_t hidden = input_view.size(1);
  if (tokens == 0 || hidden == 0) return;
  const DLDevice device = input_view.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));

  T* const input = static_cast<T*>(input_view.data_ptr());
  T* const residual = static_cast<T*>(residual_view.data_ptr());
  const W* const weight = static_cast<const W*>(weight_view.data_ptr());
  const float inv_hidden = float(1.0 / double(hidden));

  const uintptr_t bits = reinterpret_cast<uintptr_t>(input) | reinterpret_cast<uintptr_t>(residual) |
                         reinterpret_cast<uintptr_t>(weight);
  if ((bits & 15) != 0 || hidden % 8 != 0 || hidden > 16384) {
    scalar_kernel<T, W><<<unsigned(tokens), kScalarThreads, 0, stream>>>(input, residual, weight, hidden,
                                                                         inv_hidden, epsilon);
    check(cudaGetLastError());
    return;
  }

  const int units = int(hidden / 8);
  if (units == 360 && epsilon >= 1e-37f) {
    launch_rows<T, W, 128, 3, 360>(input, residual, weight, tokens, units, inv_hidden, epsilon, stream);
  } else if (units <= 128) {
    launch_rows<T, W, 128, 1, 0>(input, residual, weight, tokens, units, inv_hidden, epsilon, stream);
  } else if (units <= 256) {
    launch_rows<T, W, 128, 2, 0>(input, residual, weight, tokens, units, inv_hidden, epsilon, stream);
  } else if (units <= 384) {
    launch_rows<T, W, 128, 3, 0>(input, residual, weight, tokens, units, inv_hidden, epsilon, stream);
  } else if (units <= 768) {
    launch_rows<T, W, 256, 3, 0>(input, residual, weight, tokens, units, inv_hidden, epsilon, stream);
  } else if (units <= 1024) {
    launch_rows<T, W, 512, 2, 0>(input, residual, weight, tokens, units, inv_hidden, epsilon, stream);
  } else {
    launch_rows<T, W, 512, 4, 0>(input, residual, weight, tokens, units, inv_hidden, epsilon, stream);
  }
}

inline bool is_type(DLDataType type, int code, int bits) {
  return int(type.code) == code && int(type.bits) == bits && int(type.lanes) == 1;
}

}  // namespace fused_norm

void fused_add_rms_norm(tvm::ffi::TensorView input, tvm::ffi::TensorView residual,
                        tvm::ffi::TensorView weight, double epsilon) {
  using fused_norm::is_type;
  using fused_norm::launch;

  if (input.ndim() != 2 || residual.ndim() != 2 || weight.ndim() != 1) {
    TVM_FFI_THROW(ValueError) << "fused_add_rms_norm: expected [tokens, hidden] twice and [hidden]";
  }
  if (residual.size(0) != input.size(0) || residual.size(1) != input.size(1) ||
      weight.size(0) != input.size(1)) {
    TVM_FFI_THROW(ValueError) << "fused_add_rms_norm: shapes do not agree";
  }

  const DLDataType t = input.dtype();
  const DLDataType w = weight.dtype();
  if (!is_type(residual.dtype(), int(t.code), int(t.bits))) {
    TVM_FFI_THROW(TypeError) << "fused_add_rms_norm: input and residual differ in dtype";
  }
  const float eps = float(epsilon);

  if (is_type(t, kDLBfloat, 16)) {
    if (is_type(w, kDLBfloat, 16)) {
      return launch<__nv_bfloat16, __nv_bfloat16>(input, residual, weight, eps);
    }
    if (is_type(w, kDLFloat, 32)) return launch<__nv_bfloat16, float>(input, residual, weight, eps);
  } else if (is_type(t, kDLFloat, 16)) {
    if (is_type(w, kDLFloat, 16)) return launch<__half, __half>(input, residual, weight, eps);
    if (is_type(w, kDLFloat, 32)) return launch<__half, float>(input, residual, weight, eps);
  } else if (is_type(t, kDLFloat, 32)) {
    if (is_type(w, kDLFloat, 32)) return launch<float, float>(input, residual, weight, eps);
  }
  TVM_FFI_THROW(TypeError) << "fused_add_rms_norm: unsupported dtypes";
}
