// Op: moe_finalize: output[t] = sum over k of scales[t, k] * (rows[row_map[k, t]] + bias[experts[t,
//   k]]), no bias where that has 0 rows; float32, rounded once.
// Arguments: rows[T: tokens * top_k, hidden], row_map[I: top_k, tokens], scales[S: tokens, top_k],
//   bias[T: biased * experts, hidden], experts[I: tokens, top_k], output[T: tokens, hidden]; T:
//   bfloat16 or float16 or float32; S: float32; I: int32
// Writes: output
// Needs: compute capability 9.0 or later; fast for 16-byte aligned tensors, rows of whole 16 bytes,
//   top_k at most 8; a scalar kernel takes the rest; graph-safe.
// Idea: map, then rows, are two trips to memory. Up to 16 tokens a block takes 64 bytes of columns
//   and copies all rows and biases of them to shared memory while the map is on its way. Above, all
//   indices, then all rows and biases of a token are loaded at once. The next launch is let in
//   first.
// Made by: the agent loop, recording bench/results/loop/moe_finalize-cuda, candidate 4, made of
//   candidate 2.
// Figures: NVIDIA H200, geometric means, bench/results/kernels: sweep bf16 2.28x against
//   flashinfer, 1.60x to 2.65x at tokens 1 to 128 (moe_finalize-cuda_tuned.json.xz).
// Digest: 37dc70a333bb50db3b11bca1e7646094e95288903de158fe388d27fa60617d77

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace moe_finalize_impl {

constexpr int kSlabBytes = 64;       // columns of one block, in bytes
constexpr int kSlabThreads = 512;    // most threads of a slab block
constexpr int kSlabTokens = 16;      // most tokens of the slab kernel
constexpr int kSlabRows = 256;       // most rows and biases in shared memory (16 KiB)
constexpr int kSlabExperts = 128;    // most biases worth reading unasked
constexpr int kGatherBytes = 2048;   // most columns of a gather block, in bytes
constexpr int kGatherWide = 64;      // tokens from which a gather thread takes 16 bytes, not 8

// Order of every kernel here: trigger, address setup, synchronise, then the first touch of a
// tensor. The trigger only lets the next grid become resident; that grid's own synchronise
// still waits until this grid has completed and its writes are visible. Every thread of every
// block synchronises before it may return, so completion stays ordered along a chain.

// ---------------------------------------------------------------- 32-bit words of T

template <typename T>
struct Word;

template <>
struct Word<float> {
  static constexpr int kCount = 1;
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return __float_as_uint(values[0]);
  }
};

template <>
struct Word<__nv_bfloat16> {
  static constexpr int kCount = 2;
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[0], values[1]);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

template <>
struct Word<__half> {
  static constexpr int kCount = 2;
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xffffu)));
    values[1] = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    const uint32_t low = __half_as_ushort(__float2half_rn(values[0]));
    const uint32_t high = __half_as_ushort(__float2half_rn(values[1]));
    return low | (high << 16);
  }
};

// Plain vector read of W words (shared or global).
template <int W>
__device__ __forceinline__ void read_words(uint32_t (&words)[W], const void* from) {
  static_assert(W == 1 || W == 2 || W == 4, "words");
  if constexpr (W == 1) {
    words[0] = *static_cast<const uint32_t*>(from);
  } else if constexpr (W == 2) {
    const uint2 v = *static_cast<const uint2*>(from);
    words[0] = v.x;
    words[1] = v.y;
  } else {
    const uint4 v = *static_cast<const uint4*>(from);
    words[0] = v.x;
    words[1] = v.y;
    words[2] = v.z;
    words[3] = v.w;
  }
}

template <int W>
__device__ __forceinline__ void write_words(void* to, const uint32_t (&words)[W]) {
  static_assert(W == 1 || W == 2 || W == 4, "words");
  if constexpr (W == 1) {
    *static_cast<uint32_t*>(to) = words[0];
  } else if constexpr (W == 2) {
    *static_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
    *static_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Early reads: volatile, so that they stay ahead of what follows them, in this order.
__device__ __forceinline__ uint32_t read_early(const void* from) {
  uint32_t value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(from)));
  return value;
}

template <int K>
__device__ __forceinline__ void read_early_group(uint32_t (&values)[K], const uint32_t* from) {
  if constexpr (K % 4 == 0) {
#pragma unroll
    for (int k = 0; k < K; k += 4) {
      asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(values[k]), "=r"(values[k + 1]), "=r"(values[k + 2]),
                     "=r"(values[k + 3])
                   : "l"(__cvta_generic_to_global(from + k)));
    }
  } else if constexpr (K % 2 == 0) {
#pragma unroll
    for (int k = 0; k < K; k += 2) {
      asm volatile("ld.global.v2.b32 {%0, %1}, [%2];"
                   : "=r"(values[k]), "=r"(values[k + 1])
                   : "l"(__cvta_generic_to_global(from + k)));
    }
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = read_early(from + k);
  }
}

// W words of a row, ahead of all arithmetic.
template <int W>
__device__ __forceinline__ void read_row(uint32_t (&words)[W], const void* from) {
  static_assert(W == 2 || W == 4, "words");
  if constexpr (W == 2) {
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(__cvta_generic_to_global(from)));
  } else {
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(__cvta_generic_to_global(from)));
  }
}

// W words of a bias, or zeros: predicated, so that the loads stay back-to-back.
template <int W>
__device__ __forceinline__ void read_bias(uint32_t (&words)[W], const void* from, int biased) {
  static_assert(W == 2 || W == 4, "words");
#pragma unroll
  for (int w = 0; w < W; ++w) words[w] = 0u;
  if constexpr (W == 2) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.s32 p, %3, 0;\n\t"
        "@p ld.global.nc.v2.b32 {%0, %1}, [%2];\n\t"
        "}"
        : "+r"(words[0]), "+r"(words[1])
        : "l"(__cvta_generic_to_global(from)), "r"(biased));
  } else {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.s32 p, %5, 0;\n\t"
        "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n\t"
        "}"
        : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
        : "l"(__cvta_generic_to_global(from)), "r"(biased));
  }
}

__device__ __forceinline__ void copy_async(uint32_t to_shared, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to_shared),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}

// sum over k of scale[k] * (a[k] + b[k]), rounded once.
template <typename T, int K, int W>
__device__ __forceinline__ void combine(uint32_t (&out)[W], const uint32_t (&a)[K][W],
                                        const uint32_t (&b)[K][W], const uint32_t (&scale)[K]) {
  constexpr int N = Word<T>::kCount;
#pragma unroll
  for (int w = 0; w < W; ++w) {
    float sum[N];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const float s = __uint_as_float(scale[k]);
      float x[N], y[N];
      Word<T>::unpack(a[k][w], x);
      Word<T>::unpack(b[k][w], y);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float term = x[n] + y[n];
        sum[n] = k == 0 ? s * term : fmaf(s, term, sum[n]);
      }
    }
    out[w] = Word<T>::pack(sum);
  }
}

// ---------------------------------------------------------------- few tokens

// One block: 64 bytes of columns, every token. All rows and biases of these columns go to
// shared memory while the indices are still on their way.
template <typename T, int K, int W>
__global__ void __launch_bounds__(kSlabThreads)
    slab_kernel(const unsigned char* rows, const uint32_t* row_map, const uint32_t* scales,
                const unsigned char* bias, const uint32_t* experts, unsigned char* output,
                int tokens, int row_bytes, int n_rows, int n_all) {
  cudaTriggerProgrammaticLaunchCompletion();

  extern __shared__ __align__(128) unsigned char slab[];
  constexpr int kLanes = kSlabBytes / (4 * W);  // threads of one token

  const int tid = static_cast<int>(threadIdx.x);
  const int begin = static_cast<int>(blockIdx.x) * kSlabBytes;
  const int token = tid / kLanes;
  const int column = (tid % kLanes) * (4 * W);
  const bool active = token < tokens && begin + column < row_bytes;

  const int part = (tid & 3) * 16;
  const uint32_t to_shared = static_cast<uint32_t>(__cvta_generic_to_shared(slab)) + part;

  cudaGridDependencySynchronize();

  uint32_t row[K], expert[K], scale[K];
  if (active) {
#pragma unroll
    for (int k = 0; k < K; ++k) row[k] = read_early(row_map + k * tokens + token);
    read_early_group<K>(expert, experts + token * K);
    read_early_group<K>(scale, scales + token * K);
  }

  if (begin + part < row_bytes) {
    const int step = static_cast<int>(blockDim.x) >> 2;
#pragma unroll 1
    for (int r = tid >> 2; r < n_all; r += step) {
      const bool is_row = r < n_rows;
      const unsigned char* from = is_row ? rows : bias;
      const int index = is_row ? r : r - n_rows;
      copy_async(to_shared + r * kSlabBytes,
                 from + static_cast<size_t>(index) * row_bytes + (begin + part));
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  if (!active) return;

  const unsigned char* mine = slab + column;
  uint32_t a[K][W], b[K][W];
#pragma unroll
  for (int k = 0; k < K; ++k) read_words<W>(a[k], mine + row[k] * kSlabBytes);
  if (n_all > n_rows) {
    const unsigned char* mine_bias = mine + n_rows * kSlabBytes;
#pragma unroll
    for (int k = 0; k < K; ++k) read_words<W>(b[k], mine_bias + expert[k] * kSlabBytes);
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int w = 0; w < W; ++w) b[k][w] = 0u;
    }
  }

  uint32_t out[W];
  combine<T, K, W>(out, a, b, scale);
  write_words<W>(output + static_cast<size_t>(token) * row_bytes + (begin + column), out);
}

// ---------------------------------------------------------------- many tokens

// One thread: W words of one token. Grid: (tokens, chunks of a row).
template <typename T, int K, int W>
__global__ void __launch_bounds__(kGatherBytes / (4 * W))
    gather_kernel(const unsigned char* rows, const uint32_t* row_map, const uint32_t* scales,
                  const unsigned char* bias, const uint32_t* experts, unsigned char* output,
                  int64_t tokens, uint32_t row_bytes, int biased) {
  cudaTriggerProgrammaticLaunchCompletion();

  const int64_t token = static_cast<int64_t>(blockIdx.x);
  const uint32_t column = (blockIdx.y * blockDim.x + threadIdx.x) * (4u * W);
  const unsigned char* my_rows = rows + column;
  const unsigned char* my_bias = bias + column;
  const uint32_t* my_map = row_map + token;
  const uint32_t* my_experts = experts + token * K;
  const uint32_t* my_scales = scales + token * K;

  cudaGridDependencySynchronize();
  if (column >= row_bytes) return;

  // All indices and scales in flight together.
  uint32_t row[K], expert[K], scale[K];
#pragma unroll
  for (int k = 0; k < K; ++k) row[k] = read_early(my_map + k * tokens);
  read_early_group<K>(expert, my_experts);
  read_early_group<K>(scale, my_scales);

  // All rows and biases in flight together.
  uint32_t a[K][W], b[K][W];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    read_row<W>(a[k], my_rows + static_cast<uint64_t>(row[k]) * row_bytes);
  }
#pragma unroll
  for (int k = 0; k < K; ++k) {
    read_bias<W>(b[k], my_bias + static_cast<uint64_t>(expert[k]) * row_bytes, biased);
  }

  uint32_t out[W];
  combine<T, K, W>(out, a, b, scale);
  write_words<W>(output + static_cast<uint64_t>(blockIdx.x) * row_bytes + column, out);
}

// ---------------------------------------------------------------- whatever is not aligned

template <typename T>
__global__ void __launch_bounds__(256)
    scalar_kernel(const T* rows, const int32_t* row_map, const float* scales, const T* bias,
                  const int32_t* experts, T* output, int64_t tokens, int64_t hidden, int top_k,
                  int biased) {
  cudaTriggerProgrammaticLaunchCompletion();
  const int64_t count = tokens * hidden;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  cudaGridDependencySynchronize();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    const int64_t token = i / hidden;
    const int64_t column = i - token * hidden;
    float sum = 0.0f;
    for (int k = 0; k < top_k; ++k) {
      const int64_t row = row_map[k * tokens + token];
      float term = static_cast<float>(rows[row * hidden + column]);
      if (biased) {
        const int64_t expert = experts[token * top_k + k];
        term += static_cast<float>(bias[expert * hidden + column]);
      }
      sum = fmaf(scales[token * top_k + k], term, sum);
    }
    output[i] = static_cast<T>(sum);
  }
}

// ---------------------------------------------------------------- host

struct Problem {
  const void* rows;
  const void* row_map;
  const void* scales;
  const void* bias;
  const void* experts;
  void* output;
  int64_t tokens;
  int64_t top_k;
  int64_t hidden;
  int64_t n_bias;
  cudaStream_t stream;
};

template <typename... P, typename... A>
void launch(cudaStream_t stream, dim3 grid, unsigned block, size_t shared,
            void (*kernel)(P...), A... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(block, 1, 1);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[1];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = 1;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}

template <typename T, int K>
void launch_slab(const Problem& p) {
  constexpr int W = 1;
  constexpr int kLanes = kSlabBytes / (4 * W);
  static_assert(kSlabTokens * kLanes <= kSlabThreads, "threads of a slab block");
  const int row_bytes = static_cast<int>(p.hidden * static_cast<int64_t>(sizeof(T)));
  const int tokens = static_cast<int>(p.tokens);
  const int n_rows = tokens * K;
  const int n_all = n_rows + static_cast<int>(p.n_bias);
  int threads = n_all * (kSlabBytes / 16);
  if (threads > kSlabThreads) threads = kSlabThreads;
  if (threads < tokens * kLanes) threads = tokens * kLanes;
  threads = (threads + 31) / 32 * 32;
  const unsigned blocks = static_cast<unsigned>((row_bytes + kSlabBytes - 1) / kSlabBytes);
  launch(p.stream, dim3(blocks, 1, 1), static_cast<unsigned>(threads),
         static_cast<size_t>(n_all) * kSlabBytes, slab_kernel<T, K, W>,
         static_cast<const unsigned char*>(p.rows), static_cast<const uint32_t*>(p.row_map),
         static_cast<const uint32_t*>(p.scales), static_cast<const unsigned char*>(p.bias),
         static_cast<const uint32_t*>(p.experts), static_cast<unsigned char*>(p.output), tokens,
         row_bytes, n_rows, n_all);
}

template <typename T, int K, int W>
void launch_gather_words(const Problem& p) {
  constexpr int kThreads = kGatherBytes / (4 * W);
  const int row_bytes = static_cast<int>(p.hidden * static_cast<int64_t>(sizeof(T)));
  const int vectors = row_bytes / (4 * W);
  const int chunks = (vectors + kThreads - 1) / kThreads;
  const int threads = ((vectors + chunks - 1) / chunks + 31) / 32 * 32;
  if (p.tokens > 0x7fffffffLL) TVM_FFI_THROW(TypeError) << "moe_finalize: too many tokens";
  launch(p.stream, dim3(static_cast<unsigned>(p.tokens), static_cast<unsigned>(chunks), 1),
         static_cast<unsigned>(threads), size_t(0), gather_kernel<T, K, W>,
         static_cast<const unsigned char*>(p.rows), static_cast<const uint32_t*>(p.row_map),
         static_cast<const uint32_t*>(p.scales), static_cast<const unsigned char*>(p.bias),
         static_cast<const uint32_t*>(p.experts), static_cast<unsigned char*>(p.output), p.tokens,
         static_cast<uint32_t>(row_bytes), static_cast<int>(p.n_bias > 0));
}

template <typename T, int K>
void launch_gather(const Problem& p) {
  if (p.tokens < kGatherWide) return launch_gather_words<T, K, 2>(p);
  return launch_gather_words<T, K, 4>(p);
}

template <typename T>
void launch_scalar(const Problem& p) {
  int64_t blocks = (p.tokens * p.hidden + 255) / 256;
  if (blocks > 8192) blocks = 8192;
  launch(p.stream, dim3(static_cast<unsigned>(blocks), 1, 1), 256u, size_t(0), scalar_kernel<T>,
         static_cast<const T*>(p.rows), static_cast<const int32_t*>(p.row_map),
         static_cast<const float*>(p.scales), static_cast<const T*>(p.bias),
         static_cast<const int32_t*>(p.experts), static_cast<T*>(p.output), p.tokens, p.hidden,
         static_cast<int>(p.top_k), static_cast<int>(p.n_bias > 0));
}

inline bool aligned16(const void* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & 15u) == 0;
}

template <typename T>
void dispatch(const Problem& p) {
  const bool aligned = aligned16(p.rows) && (p.n_bias == 0 || aligned16(p.bias)) &&
                       aligned16(p.output) && aligned16(p.scales) && aligned16(p.experts) &&
                       (p.hidden * static_cast<int64_t>(sizeof(T))) % 16 == 0 &&
                       p.hidden <= 65536;
  if (!aligned || p.top_k > 8) return launch_scalar<T>(p);

  if (p.tokens <= kSlabTokens && p.n_bias <= kSlabExperts &&
      p.tokens * p.top_k + p.n_bias <= kSlabRows) {
    switch (p.top_k) {
      case 1: return launch_slab<T, 1>(p);
      case 2: return launch_slab<T, 2>(p);
      case 4: return launch_slab<T, 4>(p);
      case 8: return launch_slab<T, 8>(p);
      default: break;
    }
  }
  switch (p.top_k) {
    case 1: return launch_gather<T, 1>(p);
    case 2: return launch_gather<T, 2>(p);
    case 3: return launch_gather<T, 3>(p);
    case 4: return launch_gather<T, 4>(p);
    case 5: return launch_gather<T, 5>(p);
    case 6: return launch_gather<T, 6>(p);
    case 7: return launch_gather<T, 7>(p);
    case 8: return launch_gather<T, 8>(p);
    default: return launch_scalar<T>(p);
  }
}

}  // namespace moe_finalize_impl

void moe_finalize(tvm::ffi::TensorView rows, tvm::ffi::TensorView row_map,
                  tvm::ffi::TensorView scales, tvm::ffi::TensorView bias,
                  tvm::ffi::TensorView experts, tvm::ffi::TensorView output) {
  using namespace moe_finalize_impl;
  const DLDataType type = output.dtype();
  const DLDataType rows_type = rows.dtype();
  const DLDataType bias_type = bias.dtype();
  const DLDataType scale_type = scales.dtype();
  const DLDataType map_type = row_map.dtype();
  const DLDataType expert_type = experts.dtype();
  if (rows_type.code != type.code || rows_type.bits != type.bits ||
      bias_type.code != type.code || bias_type.bits != type.bits) {
    TVM_FFI_THROW(TypeError) << "moe_finalize: rows, bias and output differ in dtype";
  }
  if (scale_type.code != kDLFloat || scale_type.bits != 32) {
    TVM_FFI_THROW(TypeError) << "moe_finalize: scales must be float32";
  }
  if (map_type.code != kDLInt || map_type.bits != 32 || expert_type.code != kDLInt ||
      expert_type.bits != 32) {
    TVM_FFI_THROW(TypeError) << "moe_finalize: row_map and experts must be int32";
  }

  Problem p;
  p.rows = rows.data_ptr();
  p.row_map = row_map.data_ptr();
  p.scales = scales.data_ptr();
  p.bias = bias.data_ptr();
  p.experts = experts.data_ptr();
  p.output = output.data_ptr();
  p.tokens = scales.size(0);
  p.top_k = scales.size(1);
  p.hidden = output.size(1);
  p.n_bias = bias.size(0);
  if (p.tokens == 0 || p.hidden == 0) return;
  const DLDevice device = output.device();
  p.stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));

  if (type.code == kDLBfloat && type.bits == 16) return dispatch<__nv_bfloat16>(p);
  if (type.code == kDLFloat && type.bits == 16) return dispatch<__half>(p);
  if (type.code == kDLFloat && type.bits == 32) return dispatch<float>(p);
  TVM_FFI_THROW(TypeError) << "moe_finalize: unsupported dtype";
}
