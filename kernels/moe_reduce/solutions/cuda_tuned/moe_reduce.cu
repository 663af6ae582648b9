// Op: moe_reduce: output[t] = sum over k of scales[t, k] * sum over s of rows[s, row_map[t, k]],
//   entries of -1 skipped, scales 1 where there are none; float32, rounded once.
// Arguments: rows[X: splits, tokens * top_k + spare, hidden], row_map[I: tokens, top_k], scales[S:
//   scaled * tokens, top_k], output[T: tokens, hidden]; T: bfloat16 or float16 or float32; X: T or
//   float32; S: float32 or T; I: int32
// Writes: output
// Needs: an NVIDIA GPU, measured on compute capability 9.0 (before that the wait is compiled out);
//   fast for 16-bit, top_k 4 or 8, one split, aligned; two plainer kernels take the rest;
//   graph-safe.
// Idea: map, then rows, are two trips to memory. With four rows a token and 4, 8, 16, 32 or 64
//   tokens a block loads all rows of 16 columns to shared memory beside the map, one 16-byte load a
//   thread, no loop. One token loads its four rows beside the map; more rows are brought to L2
//   while it comes.
// Made by: the agent loop, recording bench/results/loop/moe_reduce-cuda, candidate 4, made of
//   candidate 2.
// Figures: NVIDIA H200, geometric means, bench/results/kernels: sweep bf16 1.73x against vllm,
//   1.34x to 2.37x at tokens 1 to 128 (moe_reduce-cuda_tuned.json.xz).
// Digest: 94db49baf0e583aaabe4f50c0dc38e2c412ed2a3027797f45b086bcb453adc71

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

// ---------------------------------------------------------------- device helpers

__device__ __forceinline__ void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

__device__ __forceinline__ void let_next_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ float2 up(uint32_t w) {
    return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
  }
  static __device__ __forceinline__ uint32_t down(float a, float b) {
    __nv_bfloat162 p = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<uint32_t*>(&p);
  }
};

template <>
struct Pair<__half> {
  static __device__ __forceinline__ float2 up(uint32_t w) {
    __half2 p = *reinterpret_cast<__half2*>(&w);
    return __half22float2(p);
  }
  static __device__ __forceinline__ uint32_t down(float a, float b) {
    __half2 p = __floats2half2_rn(a, b);
    return *reinterpret_cast<uint32_t*>(&p);
  }
};

// N words from global memory, or zeros where `on` is 0; never a branch.
template <int N>
__device__ __forceinline__ void load_if(uint32_t (&w)[N], const void* p, int on) {
#pragma unroll
  for (int i = 0; i < N; ++i) w[i] = 0u;
  if constexpr (N == 1) {
    asm volatile(
        "{\n"
        ".reg .pred q;\n"
        "setp.ne.s32 q, %2, 0;\n"
        "@q ld.global.u32 %0, [%1];\n"
        "}\n"
        : "+r"(w[0])
        : "l"(p), "r"(on));
  } else if constexpr (N == 2) {
    asm volatile(
        "{\n"
        ".reg .pred q;\n"
        "setp.ne.s32 q, %3, 0;\n"
        "@q ld.global.v2.u32 {%0, %1}, [%2];\n"
        "}\n"
        : "+r"(w[0]), "+r"(w[1])
        : "l"(p), "r"(on));
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      asm volatile(
          "{\n"
          ".reg .pred q;\n"
          "setp.ne.s32 q, %5, 0;\n"
          "@q ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
          "}\n"
          : "+r"(w[i]), "+r"(w[i + 1]), "+r"(w[i + 2]), "+r"(w[i + 3])
          : "l"(static_cast<const char*>(p) + 4 * i), "r"(on));
    }
  }
}

// 16 bytes, aligned, from global memory.
__device__ __forceinline__ uint4 load_chunk(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// K (a multiple of 4) map entries, 16-byte aligned.
template <int K>
__device__ __forceinline__ void load_map(int (&m)[K], const int32_t* p) {
#pragma unroll
  for (int i = 0; i < K; i += 4) {
    asm volatile("ld.global.v4.s32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(m[i]), "=r"(m[i + 1]), "=r"(m[i + 2]), "=r"(m[i + 3])
                 : "l"(p + i));
  }
}

// kind: 1 float32, 2 T
template <typename T>
__device__ __forceinline__ float scale_at(const void* p, int kind, int64_t i) {
  return kind == 1 ? static_cast<const float*>(p)[i]
                   : static_cast<float>(static_cast<const T*>(p)[i]);
}

template <typename T, int K, bool SCALED>
__device__ __forceinline__ void load_scales(float (&s)[K], const void* p, int kind, int64_t base) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if constexpr (SCALED) {
      s[k] = scale_at<T>(p, kind, base + k);
    } else {
      s[k] = 1.0f;
    }
  }
}

template <typename T, bool SCALED, int N>
__device__ __forceinline__ void accumulate(float (&acc)[2 * N], const uint32_t (&w)[N], float s) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float2 f = Pair<T>::up(w[i]);
    if constexpr (SCALED) {
      acc[2 * i] = fmaf(s, f.x, acc[2 * i]);
      acc[2 * i + 1] = fmaf(s, f.y, acc[2 * i + 1]);
    } else {
      acc[2 * i] += f.x;
      acc[2 * i + 1] += f.y;
    }
  }
}

template <typename T, int N>
__device__ __forceinline__ void store_pairs(T* p, const float (&acc)[2 * N]) {
  uint32_t w[N];
#pragma unroll
  for (int i = 0; i < N; ++i) w[i] = Pair<T>::down(acc[2 * i], acc[2 * i + 1]);
  if constexpr (N == 1) {
    *reinterpret_cast<uint32_t*>(p) = w[0];
  } else if constexpr (N == 2) {
    *reinterpret_cast<uint2*>(p) = make_uint2(w[0], w[1]);
  } else {
    static_assert(N == 4, "1, 2 or 4 words");
    *reinterpret_cast<uint4*>(p) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

// The fast kernels let the next grid launch first of all. That is safe as every thread of every
// block then waits, before it touches a tensor and before it may return: a grid's completion
// implies that of all grids before it.

// ---------------------------------------------------------------- one token, four rows

constexpr int kOneThreads = 64;

template <typename T, bool SCALED>
__global__ void __launch_bounds__(kOneThreads)
    one_kernel(const T* rows, int64_t row_stride, const int32_t* map, const void* scales, int kind,
               T* out, int pairs) {
  let_next_launch();
  const int p = int(blockIdx.x) * kOneThreads + int(threadIdx.x);
  const T* from = rows + 2 * p;
  wait_for_inputs();
  if (p >= pairs) return;
  int m[4];
  load_map<4>(m, map);
  uint32_t v[4][1];
#pragma unroll
  for (int r = 0; r < 4; ++r) load_if<1>(v[r], from + r * row_stride, 1);
  float s[4];
  load_scales<T, 4, SCALED>(s, scales, kind, 0);
  float acc[2] = {0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t low = m[k] == 0 ? v[0][0] : v[1][0];
    const uint32_t high = m[k] == 2 ? v[2][0] : v[3][0];
    uint32_t w[1] = {m[k] < 2 ? low : high};
    if (m[k] < 0) {
      w[0] = 0u;
      s[k] = 0.0f;
    }
    accumulate<T, SCALED, 1>(acc, w, s[k]);
  }
  store_pairs<T, 1>(out + 2 * p, acc);
}

// ---------------------------------------------------------------- exact tile: 16 columns a block

// TOKENS tokens of four choices, exactly 4 * TOKENS rows, hidden a multiple of 16. A block's
// columns are 8 * TOKENS chunks of 16 bytes and give 8 * TOKENS output words: one thread each.
template <typename T, int TOKENS, bool SCALED>
__global__ void __launch_bounds__(8 * TOKENS)
    tile_kernel(const T* rows, int64_t row_stride, const int32_t* map, const void* scales,
                int kind, T* out, int hidden) {
  __shared__ __align__(16) uint4 tile[8 * TOKENS];  // two chunks a row
  let_next_launch();
  const int tid = int(threadIdx.x);
  const int column0 = int(blockIdx.x) * 16;
  const int token = tid / 8;
  const int word = tid % 8;
  const T* from = rows + int64_t(tid / 2) * row_stride + (column0 + (tid % 2) * 8);
  const int32_t* my_map = map + token * 4;
  T* to = out + int64_t(token) * hidden + (column0 + word * 2);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(tile) + word;

  wait_for_inputs();
  const uint4 chunk = load_chunk(from);
  int m[4];
  load_map<4>(m, my_map);
  float s[4];
  load_scales<T, 4, SCALED>(s, scales, kind, int64_t(token) * 4);
  tile[tid] = chunk;
  if constexpr (TOKENS == 4) {
    __syncwarp();  // the block is one warp
  } else {
    __syncthreads();
  }

  uint32_t w[4][1];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int row = m[k] < 0 ? 0 : m[k];
    w[k][0] = words[row * 8];
  }
  float acc[2] = {0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const bool skipped = m[k] < 0;
    w[k][0] = skipped ? 0u : w[k][0];
    accumulate<T, SCALED, 1>(acc, w[k], skipped ? 0.0f : s[k]);
  }
  store_pairs<T, 1>(to, acc);
}

// ---------------------------------------------------------------- few rows: a slab of columns

constexpr int kSlabRows = 192;
constexpr int kSlabColumns = 32;
constexpr int kSlabChunks = 4;  // of 16 bytes, in a row of the slab

template <typename T, int K, int VEC, bool SCALED>
__global__ void __launch_bounds__(512)
    slab_kernel(const T* rows, int64_t row_stride, const int32_t* map, const void* scales, int kind,
                T* out, int tokens, int expert_rows, int hidden) {
  __shared__ __align__(16) uint4 slab[kSlabRows * kSlabChunks];
  constexpr int PER = kSlabColumns / VEC;  // threads of one token
  constexpr int N = VEC / 2;               // words of one thread
  let_next_launch();
  const int tid = int(threadIdx.x);
  const int token = tid / PER;
  const int part = tid % PER;
  const int column0 = int(blockIdx.x) * kSlabColumns;

  int m[K];
  float s[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    m[k] = -1;
    s[k] = 0.0f;
  }

  // A block is a multiple of 32 threads: a thread's chunks are all of the same columns.
  const int from_column = column0 + (tid % kSlabChunks) * 8;
  const int threads = int(blockDim.x);
  const int chunks = from_column < hidden ? expert_rows * kSlabChunks : 0;
  const T* from = rows + int64_t(tid / kSlabChunks) * row_stride + from_column;
  const int64_t from_step = int64_t(threads / kSlabChunks) * row_stride;
  uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(slab)) + uint32_t(tid) * 16u;
  const uint32_t to_step = uint32_t(threads) * 16u;
  const int32_t* my_map = map + token * K;

  wait_for_inputs();
  if (token < tokens) load_map<K>(m, my_map);
  for (int i = tid; i < chunks; i += threads) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
    from += from_step;
    to += to_step;
  }
  if (token < tokens) load_scales<T, K, SCALED>(s, scales, kind, int64_t(token) * K);
  asm volatile("cp.async.wait_all;\n" ::: "memory");
  __syncthreads();

  const int column = column0 + part * VEC;
  if (token >= tokens || column >= hidden) return;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(slab) + part * N;
  uint32_t w[K][N];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int row = m[k] < 0 ? 0 : m[k];
    const uint32_t* p = words + row * (kSlabChunks * 4);
    if constexpr (N == 1) {
      w[k][0] = *p;
    } else {
      static_assert(N == 2, "1 or 2 words");
      const uint2 both = *reinterpret_cast<const uint2*>(p);
      w[k][0] = both.x;
      w[k][1] = both.y;
    }
  }
  float acc[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) acc[i] = 0.0f;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const bool skipped = m[k] < 0;
#pragma unroll
    for (int i = 0; i < N; ++i) w[k][i] = skipped ? 0u : w[k][i];
    accumulate<T, SCALED, N>(acc, w[k], skipped ? 0.0f : s[k]);
  }
  store_pairs<T, N>(out + int64_t(token) * hidden + column, acc);
}

// ---------------------------------------------------------------- direct gather

template <typename T, int K, int VEC, bool SCALED>
__global__ void __launch_bounds__(256)
    direct_kernel(const T* rows, int64_t row_stride, const int32_t* map, const void* scales,
                  int kind, T* out, int chunks, int hidden, int prefetch) {
  constexpr int N = VEC / 2;
  constexpr unsigned GROUP = 32 / VEC;  // threads that share 64 bytes
  let_next_launch();
  const int64_t token = blockIdx.x;
  const unsigned c = blockIdx.y * blockDim.x + threadIdx.x;
  const int32_t* my_map = map + token * K;
  const T* near = rows + token * K * row_stride + (c / GROUP) * 32u;
  const T* from = rows + int64_t(c) * VEC;

  wait_for_inputs();
  if (c >= unsigned(chunks)) return;
  int m[K];
  load_map<K>(m, my_map);
  if (prefetch) {
    // While the map comes: all blocks together bring every row to L2, 64 bytes a request.
#pragma unroll
    for (unsigned j = 0; j < unsigned(K); j += GROUP) {
      const unsigned k = j + c % GROUP;
      if (k < unsigned(K)) {
        asm volatile("prefetch.global.L2 [%0];\n" ::"l"(near + int64_t(k) * row_stride));
      }
    }
  }
  float s[K];
  load_scales<T, K, SCALED>(s, scales, kind, token * K);
  uint32_t w[K][N];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    load_if<N>(w[k], from + int64_t(m[k]) * row_stride, m[k] >= 0 ? 1 : 0);
  }
  float acc[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) acc[i] = 0.0f;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    accumulate<T, SCALED, N>(acc, w[k], m[k] < 0 ? 0.0f : s[k]);
  }
  store_pairs<T, N>(out + token * hidden + int64_t(c) * VEC, acc);
}

// ---------------------------------------------------------------- general, 8 elements a thread

constexpr int kGeneralThreads = 128;

template <typename T, typename X>
__global__ void __launch_bounds__(kGeneralThreads)
    general_kernel(const X* rows, int64_t split_stride, int64_t row_stride, int64_t splits,
                   const int32_t* map, int top_k, const void* scales, int kind, T* out, int hidden) {
  constexpr int G = 4;
  constexpr int NW = 8 * int(sizeof(X)) / 4;
  wait_for_inputs();
  const int64_t token = blockIdx.x;
  const int column = (int(blockIdx.y) * kGeneralThreads + int(threadIdx.x)) * 8;
  if (column >= hidden) return;
  float acc[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) acc[i] = 0.0f;
  for (int k0 = 0; k0 < top_k; k0 += G) {
    int m[G];
    float s[G];
#pragma unroll
    for (int j = 0; j < G; ++j) {
      const int k = k0 + j;
      m[j] = -1;
      s[j] = 1.0f;
      if (k < top_k) {
        m[j] = map[token * top_k + k];
        if (kind != 0) s[j] = scale_at<T>(scales, kind, token * top_k + k);
      }
    }
    float sum[G][8];
#pragma unroll
    for (int j = 0; j < G; ++j) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[j][i] = 0.0f;
    }
    for (int64_t part = 0; part < splits; ++part) {
      const X* base = rows + part * split_stride + column;
      uint32_t w[G][NW];
#pragma unroll
      for (int j = 0; j < G; ++j) {
        load_if<NW>(w[j], base + int64_t(m[j]) * row_stride, m[j] >= 0 ? 1 : 0);
      }
#pragma unroll
      for (int j = 0; j < G; ++j) {
        if constexpr (sizeof(X) == 2) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 f = Pair<X>::up(w[j][i]);
            sum[j][2 * i] += f.x;
            sum[j][2 * i + 1] += f.y;
          }
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[j][i] += __uint_as_float(w[j][i]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < G; ++j) {
      if (m[j] >= 0 && splits > 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] = fmaf(s[j], sum[j][i], acc[i]);
      }
    }
  }
  T* to = out + token * hidden + column;
  if constexpr (sizeof(T) == 2) {
    store_pairs<T, 4>(to, acc);
  } else {
    reinterpret_cast<float4*>(to)[0] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(acc[4], acc[5], acc[6], acc[7]);
  }
}

// ---------------------------------------------------------------- anything: one element a thread

constexpr int kScalarThreads = 256;

template <typename T, typename X>
__global__ void __launch_bounds__(kScalarThreads)
    scalar_kernel(const X* rows, int64_t split_stride, int64_t row_stride, int64_t splits,
                  const int32_t* map, int top_k, const void* scales, int kind, T* out, int hidden) {
  wait_for_inputs();
  const int64_t token = blockIdx.x;
  const int column = int(blockIdx.y) * kScalarThreads + int(threadIdx.x);
  if (column >= hidden) return;
  float acc = 0.0f;
  for (int k = 0; k < top_k; ++k) {
    const int row = map[token * top_k + k];
    if (row < 0 || splits <= 0) continue;
    const float s = kind != 0 ? scale_at<T>(scales, kind, token * top_k + k) : 1.0f;
    float sum = 0.0f;
    for (int64_t part = 0; part < splits; ++part) {
      sum += static_cast<float>(rows[part * split_stride + int64_t(row) * row_stride + column]);
    }
    acc = fmaf(s, sum, acc);
  }
  out[token * hidden + column] = T(acc);
}

// ---------------------------------------------------------------- host

struct Call {
  const void* rows;
  int64_t split_stride;
  int64_t row_stride;
  int64_t splits;
  int64_t expert_rows;
  const int32_t* map;
  int top_k;
  const void* scales;
  int kind;  // 0 none, 1 float32, 2 as the output
  void* out;
  int64_t tokens;
  int hidden;
  cudaStream_t stream;
};

template <typename... P, typename... A>
void start(void (*kernel)(P...), dim3 grid, unsigned threads, cudaStream_t stream, A... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads, 1, 1);
  config.dynamicSmemBytes = 0;
  config.stream = stream;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute;
  config.numAttrs = 1;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}

template <typename T, int TOKENS, bool SCALED>
void start_tile(const Call& a) {
  start(&tile_kernel<T, TOKENS, SCALED>, dim3(unsigned(a.hidden / 16), 1, 1),
        unsigned(8 * TOKENS), a.stream, static_cast<const T*>(a.rows), a.row_stride, a.map,
        a.scales, a.kind, static_cast<T*>(a.out), a.hidden);
}

template <typename T, int K, int VEC, bool SCALED>
void start_slab(const Call& a) {
  const int64_t wanted = a.tokens * (kSlabColumns / VEC);
  const unsigned threads = unsigned((wanted + 31) / 32 * 32);
  const unsigned blocks = unsigned((a.hidden + kSlabColumns - 1) / kSlabColumns);
  start(&slab_kernel<T, K, VEC, SCALED>, dim3(blocks, 1, 1), threads, a.stream,
        static_cast<const T*>(a.rows), a.row_stride, a.map, a.scales, a.kind,
        static_cast<T*>(a.out), int(a.tokens), int(a.expert_rows), a.hidden);
}

template <typename T, int K, int VEC, bool SCALED>
void start_direct(const Call& a) {
  const int chunks = a.hidden / VEC;
  const int most = VEC == 8 ? 128 : 256;
  const int blocks = (chunks + most - 1) / most;
  const int each = (chunks + blocks - 1) / blocks;
  const unsigned threads = unsigned((each + 31) / 32 * 32);
  const int prefetch = a.tokens <= 256 && a.expert_rows * 4 <= a.tokens * K * 5 ? 1 : 0;
  start(&direct_kernel<T, K, VEC, SCALED>, dim3(unsigned(a.tokens), unsigned(blocks), 1), threads,
        a.stream, static_cast<const T*>(a.rows), a.row_stride, a.map, a.scales, a.kind,
        static_cast<T*>(a.out), chunks, a.hidden, prefetch);
}

template <typename T, int K, bool SCALED>
void fast(const Call& a) {
  if constexpr (K == 4) {
    if (a.tokens == 1 && a.expert_rows == 4) {
      const int pairs = a.hidden / 2;
      const unsigned blocks = unsigned((pairs + kOneThreads - 1) / kOneThreads);
      start(&one_kernel<T, SCALED>, dim3(blocks, 1, 1), unsigned(kOneThreads), a.stream,
            static_cast<const T*>(a.rows), a.row_stride, a.map, a.scales, a.kind,
            static_cast<T*>(a.out), pairs);
      return;
    }
    if (a.expert_rows == 4 * a.tokens && a.hidden % 16 == 0) {
      switch (a.tokens) {
        case 4:
          return start_tile<T, 4, SCALED>(a);
        case 8:
          return start_tile<T, 8, SCALED>(a);
        case 16:
          return start_tile<T, 16, SCALED>(a);
        case 32:
          return start_tile<T, 32, SCALED>(a);
        case 64:
          return start_tile<T, 64, SCALED>(a);
        default:
          break;
      }
    }
  }
  if (a.tokens <= 48 && a.expert_rows <= kSlabRows && a.expert_rows <= 2 * a.tokens * K) {
    if (a.tokens <= 16) return start_slab<T, K, 2, SCALED>(a);
    return start_slab<T, K, 4, SCALED>(a);
  }
  if (a.tokens * (a.hidden / 8) <= 132 * 256) return start_direct<T, K, 4, SCALED>(a);
  start_direct<T, K, 8, SCALED>(a);
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <typename T, typename X>
void dispatch(const Call& a) {
  const int64_t bytes = int64_t(sizeof(X));
  const bool vectors = aligned(a.rows) && aligned(a.out) && a.hidden % 8 == 0 &&
                       a.row_stride * bytes % 16 == 0 &&
                       (a.splits <= 1 || a.split_stride * bytes % 16 == 0);
  if (!vectors) {
    const unsigned blocks = unsigned((a.hidden + kScalarThreads - 1) / kScalarThreads);
    start(&scalar_kernel<T, X>, dim3(unsigned(a.tokens), blocks, 1), unsigned(kScalarThreads),
          a.stream, static_cast<const X*>(a.rows), a.split_stride, a.row_stride, a.splits, a.map,
          a.top_k, a.scales, a.kind, static_cast<T*>(a.out), a.hidden);
    return;
  }
  if constexpr (sizeof(X) == 2) {
    // T is X here
    if (a.splits == 1 && aligned(a.map) && a.expert_rows >= a.tokens * a.top_k) {
      if (a.top_k == 4) return a.kind != 0 ? fast<T, 4, true>(a) : fast<T, 4, false>(a);
      if (a.top_k == 8) return a.kind != 0 ? fast<T, 8, true>(a) : fast<T, 8, false>(a);
    }
  }
  const int chunks = a.hidden / 8;
  const unsigned blocks = unsigned((chunks + kGeneralThreads - 1) / kGeneralThreads);
  start(&general_kernel<T, X>, dim3(unsigned(a.tokens), blocks, 1), unsigned(kGeneralThreads),
        a.stream, static_cast<const X*>(a.rows), a.split_stride, a.row_stride, a.splits, a.map,
        a.top_k, a.scales, a.kind, static_cast<T*>(a.out), a.hidden);
}

bool is_float32(DLDataType t) { return t.code == kDLFloat && t.bits == 32; }
bool is_float16(DLDataType t) { return t.code == kDLFloat && t.bits == 16; }
bool is_bfloat16(DLDataType t) { return t.code == kDLBfloat && t.bits == 16; }

}  // namespace

void moe_reduce(tvm::ffi::TensorView rows, tvm::ffi::TensorView row_map,
                tvm::ffi::TensorView scales, tvm::ffi::TensorView output) {
  if (rows.ndim() != 3 || row_map.ndim() != 2 || scales.ndim() != 2 || output.ndim() != 2) {
    TVM_FFI_THROW(TypeError) << "moe_reduce: unsupported number of dimensions";
  }
  const int64_t tokens = row_map.size(0);
  const int64_t top_k = row_map.size(1);
  const int64_t hidden = output.size(1);
  if (output.size(0) != tokens || rows.size(2) != hidden ||
      (scales.size(0) != 0 && (scales.size(0) != tokens || scales.size(1) != top_k))) {
    TVM_FFI_THROW(TypeError) << "moe_reduce: shapes do not fit";
  }
  if (hidden > 1 && rows.stride(2) != 1) {
    TVM_FFI_THROW(TypeError) << "moe_reduce: elements of a row must be adjacent";
  }
  const DLDataType map_type = row_map.dtype();
  if (map_type.code != kDLInt || map_type.bits != 32) {
    TVM_FFI_THROW(TypeError) << "moe_reduce: row_map must be int32";
  }
  if (tokens == 0 || hidden == 0) return;

  const DLDataType t = output.dtype();
  const DLDataType x = rows.dtype();
  const DLDataType s = scales.dtype();
  int kind = 0;
  if (scales.size(0) != 0) {
    if (is_float32(s)) {
      kind = 1;
    } else if (s.code == t.code && s.bits == t.bits) {
      kind = 2;
    } else {
      TVM_FFI_THROW(TypeError) << "moe_reduce: unsupported dtype of scales";
    }
  }

  const DLDevice device = output.device();
  Call call{};
  call.rows = rows.data_ptr();
  call.split_stride = rows.stride(0);
  call.row_stride = rows.stride(1);
  call.splits = rows.size(0);
  call.expert_rows = rows.size(1);
  call.map = static_cast<const int32_t*>(row_map.data_ptr());
  call.top_k = int(top_k);
  call.scales = scales.data_ptr();
  call.kind = kind;
  call.out = output.data_ptr();
  call.tokens = tokens;
  call.hidden = int(hidden);
  call.stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));

  if (is_bfloat16(t)) {
    if (is_bfloat16(x)) return dispatch<__nv_bfloat16, __nv_bfloat16>(call);
    if (is_float32(x)) return dispatch<__nv_bfloat16, float>(call);
  } else if (is_float16(t)) {
    if (is_float16(x)) return dispatch<__half, __half>(call);
    if (is_float32(x)) return dispatch<__half, float>(call);
  } else if (is_float32(t)) {
    if (is_float32(x)) return dispatch<float, float>(call);
  }
  TVM_FFI_THROW(TypeError) << "moe_reduce: unsupported dtype";
}
