// Op: qkv_rope_kv_update: row = x @ weight^T + bias; rotate queries and keys (NeoX); write query
//   and the paged key and value caches at slots.
// Arguments: x[T: tokens, inner], weight[T: (q_heads + 2 * kv_heads) * head_dim, inner], bias[T:
//   biased * (q_heads + 2 * kv_heads) * head_dim], positions[P: tokens], cos_sin[C: positions,
//   head_dim], slots[P: tokens], query[T: tokens, q_heads * head_dim], key_cache[T: blocks,
//   block_size, kv_heads, head_dim], value_cache[T: blocks, block_size, kv_heads, head_dim]; T:
//   bfloat16 or float16 or float32; C: T or float32; P: int64
// Writes: query, key_cache, value_cache
// Needs: compute capability 8.0 or later, 16-bit T, 16-byte aligned x, weight and cos_sin, at most
//   64 tokens for tensor cores (clusters from 9.0 on, over 16 tokens); the rest plain FMA.
// Idea: weights are the M operand of mma; a tile holds 8 rows of a head's first half and their
//   partners, so that both of a rotary pair are in one thread; warps split K, over 16 tokens
//   clusters, too.
// Made by: the agent loop, run 20261129-030123-optimize-0ee3, candidate 0, answered from its prompt
//   alone; not recorded.
// Figures: NVIDIA H200, geometric means, bench/results/kernels: sweep bf16 1.32x against patched,
//   1.07x to 1.46x at tokens 1 to 64 (qkv_rope_kv_update-cuda_tuned.json.xz).
// Digest: 4658c88a46d3ad70b1c4117eb1f68a5139bed841ee79d5d116fe7d0e8e2b2c68

// Op: qkv_rope_kv_update: row = x @ weight^T + bias; rotate queries and keys (NeoX); write query and
//   the paged key and value caches at slots.
// Arguments: x[T: tokens, inner], weight[T: (q_heads + 2 * kv_heads) * head_dim, inner], bias[T:
//   biased * (q_heads + 2 * kv_heads) * head_dim], positions[P: tokens], cos_sin[C: positions,
//   head_dim], slots[P: tokens], query[T: tokens, q_heads * head_dim], key_cache[T: blocks,
//   block_size, kv_heads, head_dim], value_cache[T: blocks, block_size, kv_heads, head_dim]; T:
//   bfloat16 or float16 or float32; C: T or float32; P: int64
// Writes: query, key_cache, value_cache
// Needs: sm_80 or newer, 16-bit T, 16-byte aligned x, weight and cos_sin, tokens <= 64 for the tensor
//   core path (clusters from sm_90 on, for tokens > 16); all else gets a plain float32 FMA kernel.
// Idea: weights are the M operand of mma.sync; an m16 tile is 8 rows of a head's first half and their 8
//   partners of the second, so a thread holds both of a rotary pair and the epilogue stays in
//   registers. cp.async pipeline into swizzled shared memory; warps split K; for many tokens a cluster
//   splits K of a tall tile, so that x is reread from L2 less often, and reduces over distributed
//   shared memory. Standard techniques (split-K, swizzle, ldmatrix), combined for this op.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace qkv {

struct Params {
  const void* x;
  const void* weight;
  const void* bias;  // nullptr for none
  const int64_t* positions;
  const void* cos_sin;
  const int64_t* slots;
  void* query;
  void* key_cache;
  void* value_cache;
  int64_t query_stride;
  int64_t key_stride[3];
  int64_t value_stride[3];
  int64_t block_size;
  int tokens;
  int inner;
  int head_dim;
  int q_heads;
  int kv_heads;
  int c_float;  // cos_sin is float32
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v) {
  if constexpr (std::is_same<T, float>::value) {
    return v;
  } else if constexpr (std::is_same<T, __half>::value) {
    return __float2half_rn(v);
  } else {
    return __float2bfloat16_rn(v);
  }
}

__device__ __forceinline__ void cache_offsets(const Params& p, int64_t slot, int64_t& key, int64_t& value) {
  key = -1;
  value = -1;
  if (slot < 0) return;
  int64_t block, offset;
  if (((slot | p.block_size) >> 31) == 0) {
    const uint32_t s = uint32_t(slot), b = uint32_t(p.block_size);
    block = s / b;
    offset = s % b;
  } else {
    block = slot / p.block_size;
    offset = slot % p.block_size;
  }
  key = block * p.key_stride[0] + offset * p.key_stride[1];
  value = block * p.value_stride[0] + offset * p.value_stride[1];
}

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or fills them with zeros where size is 0.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int size) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(size)
               : "memory");
#endif
}

__device__ __forceinline__ void copy_commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

template <int PENDING>
__device__ __forceinline__ void copy_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
#endif
}

__device__ __forceinline__ void copy_wait_all() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void load_matrix4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(from)
               : "memory");
#endif
}

__device__ __forceinline__ void load_matrix2(uint32_t& a, uint32_t& b, uint32_t from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(a), "=r"(b)
               : "r"(from)
               : "memory");
#endif
}

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same<T, __half>::value) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#endif
}

__device__ __forceinline__ void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
#endif
}

__device__ __forceinline__ float4 load_cluster(uint32_t address, uint32_t rank) {
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(remote)
               : "memory");
#endif
  return v;
}

__device__ __forceinline__ void add(float4& a, const float4& b) {
  a.x += b.x;
  a.y += b.y;
  a.z += b.z;
  a.w += b.w;
}

constexpr int kThreads = 256;
constexpr int kWarps = 8;
constexpr int kMaxTokens = 64;

// A warp has MT tiles of 16 rows and NTW tiles of 8 tokens; a block has WM * WN * WK warps; a stage has
// KPW steps of k16 for each warp; a cluster has S blocks, which split K.
template <int MT, int NTW, int WM, int WN, int WK, int KPW, int STAGES, int S>
struct Config {
  static constexpr int kRows = 16 * MT * WM;
  static constexpr int kTokens = 8 * NTW * WN;
  static constexpr int kDepth = 16 * KPW * WK;
  static constexpr int kChunks = kDepth / 8;  // of 16 bytes in a row of a stage
  static constexpr int kRowBytes = kDepth * 2;
  static constexpr int kRowsPerPass = kThreads / kChunks;
  static constexpr int kPassesA = kRows / kRowsPerPass;
  static constexpr int kPassesB = kTokens / kRowsPerPass;
  static constexpr int kBytesA = kRows * kRowBytes;
  static constexpr int kStageBytes = (kRows + kTokens) * kRowBytes;
  static constexpr int kReduceBytes = kWarps * MT * NTW * 512;
  static constexpr int kPipeBytes =
      kStageBytes * STAGES > kReduceBytes ? kStageBytes * STAGES : kReduceBytes;
  static constexpr int kStaticBytes = 3 * 8 * kMaxTokens + 4 * kRows + 128;
  static_assert(WM * WN * WK == kWarps, "warps");
  static_assert(kChunks % 8 == 0 && kThreads % kChunks == 0 && kRowsPerPass % 8 == 0, "swizzle");
  static_assert(kRows % kRowsPerPass == 0 && kTokens % kRowsPerPass == 0, "passes");
  static_assert(NTW == 1 || NTW % 2 == 0, "token tiles");
  static_assert(kRows <= kThreads && kTokens <= kMaxTokens && STAGES >= 2, "sizes");
};

template <typename T, int MT, int NTW, int WM, int WN, int WK, int KPW, int STAGES, int S>
__global__ void __launch_bounds__(kThreads, MT == 1 ? 3 : 2) tensor_kernel(const Params p) {
  using Cfg = Config<MT, NTW, WM, WN, WK, KPW, STAGES, S>;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ int64_t s_position[kMaxTokens];
  __shared__ int64_t s_key[kMaxTokens];
  __shared__ int64_t s_value[kMaxTokens];
  __shared__ float s_bias[Cfg::kRows];

  const int tid = threadIdx.x;
  const int warp = tid >> 5;
  const int lane = tid & 31;
  const int rank = S == 1 ? 0 : int(blockIdx.x) % S;
  const int tile0 = (int(blockIdx.x) / S) * (MT * WM);
  const int head_dim = p.head_dim;
  const int half = head_dim >> 1;
  const int per_head = head_dim >> 4;
  const int tiles = (p.q_heads + 2 * p.kv_heads) * per_head;
  const int inner = p.inner;
  const int tokens = p.tokens;
  const T* __restrict__ x = static_cast<const T*>(p.x);
  const T* __restrict__ weight = static_cast<const T*>(p.weight);

  // The part of K of this block, in whole sectors.
  int k_begin = 0, k_end = inner;
  if constexpr (S > 1) {
    const int share = ((inner + S - 1) / S + 15) / 16 * 16;
    k_begin = rank * share < inner ? rank * share : inner;
    k_end = k_begin + share < inner ? k_begin + share : inner;
  }
  const int iterations = (k_end - k_begin + Cfg::kDepth - 1) / Cfg::kDepth;

  // Row of the weight for a row of this block's tile, -1 for none.
  auto weight_row = [&](int r) -> int {
    const int tile = tile0 + (r >> 4);
    if (tile >= tiles) return -1;
    const int head = tile / per_head;
    const int j = (tile - head * per_head) * 8 + (r & 7);
    return head * head_dim + ((r & 8) ? half : 0) + j;
  };

  // Small loads first: they arrive while the pipeline starts.
  int64_t position = 0, slot = -1;
  if (tid < tokens) {
    position = p.positions[tid];
    slot = p.slots[tid];
  }
  float bias = 0.f;
  if (p.bias != nullptr && tid < Cfg::kRows) {
    const int row = weight_row(tid);
    if (row >= 0) bias = to_float(static_cast<const T*>(p.bias)[row]);
  }

  const int column = tid % Cfg::kChunks;
  const int row_first = tid / Cfg::kChunks;
  int rows[Cfg::kPassesA];
#pragma unroll
  for (int i = 0; i < Cfg::kPassesA; ++i) rows[i] = weight_row(row_first + i * Cfg::kRowsPerPass);
  const uint32_t base = smem_address(smem);
  const uint32_t copy_to = uint32_t(row_first * Cfg::kRowBytes + ((column ^ (row_first & 7)) << 4));

  auto load = [&](int stage, int iteration) {
    const int k = k_begin + iteration * Cfg::kDepth + column * 8;
    const bool inside = k < k_end;
    const uint32_t to = base + uint32_t(stage * Cfg::kStageBytes) + copy_to;
#pragma unroll
    for (int i = 0; i < Cfg::kPassesA; ++i) {
      const bool there = inside && rows[i] >= 0;
      const T* from = there ? weight + int64_t(rows[i]) * inner + k : weight;
      copy_async(to + uint32_t(i * Cfg::kRowsPerPass * Cfg::kRowBytes), from, there ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < Cfg::kPassesB; ++i) {
      const int t = row_first + i * Cfg::kRowsPerPass;
      const bool there = inside && t < tokens;
      const T* from = there ? x + int64_t(t) * inner + k : x;
      copy_async(to + uint32_t(Cfg::kBytesA + i * Cfg::kRowsPerPass * Cfg::kRowBytes), from, there ? 16 : 0);
    }
  };

#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < iterations) load(s, s);
    copy_commit();
  }

  if (tid < tokens) {
    int64_t key, value;
    cache_offsets(p, slot, key, value);
    s_position[tid] = position;
    s_key[tid] = key;
    s_value[tid] = value;
  }
  if (tid < Cfg::kRows) s_bias[tid] = bias;
  __syncthreads();

  // The rows of cos_sin join the next group; they are needed in the epilogue only.
  {
    const int row_bytes = head_dim * (p.c_float ? 4 : 2);
    const int chunks = row_bytes >> 4;
    const char* table = static_cast<const char*>(p.cos_sin);
    for (int i = tid; i < tokens * chunks; i += kThreads) {
      const int t = i / chunks;
      const int c = i - t * chunks;
      copy_async(base + uint32_t(Cfg::kPipeBytes + i * 16), table + s_position[t] * row_bytes + c * 16, 16);
    }
  }

  const int wk = warp % WK;
  const int wn = (warp / WK) % WN;
  const int wm = warp / (WK * WN);

  float acc[MT][NTW][4];
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NTW; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.f;

  const uint32_t row_a = uint32_t((wm * MT * 16 + (lane & 15)) * Cfg::kRowBytes);
  const int token_row = wn * NTW * 8 + (lane & 7) + (NTW > 1 ? ((lane >> 4) << 3) : 0);
  const uint32_t row_b = uint32_t(Cfg::kBytesA + token_row * Cfg::kRowBytes);
  const int mask = lane & 7;

  int read_stage = 0, write_stage = STAGES - 1;
  for (int iteration = 0; iteration < iterations; ++iteration) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    if (iteration + STAGES - 1 < iterations) load(write_stage, iteration + STAGES - 1);
    copy_commit();
    const uint32_t stage = base + uint32_t(read_stage * Cfg::kStageBytes);
#pragma unroll
    for (int step = 0; step < KPW; ++step) {
      const int chunk = (step * WK + wk) * 2;
      const uint32_t swizzle_a = uint32_t(((chunk + (lane >> 4)) ^ mask) << 4);
      const uint32_t swizzle_b = uint32_t(((chunk + ((lane >> 3) & 1)) ^ mask) << 4);
      uint32_t b[NTW][2];
      if constexpr (NTW == 1) {
        load_matrix2(b[0][0], b[0][1], stage + row_b + swizzle_b);
      } else {
#pragma unroll
        for (int n = 0; n < NTW; n += 2) {
          load_matrix4(b[n][0], b[n][1], b[n + 1][0], b[n + 1][1],
                       stage + row_b + uint32_t(n * 8 * Cfg::kRowBytes) + swizzle_b);
        }
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        uint32_t a[4];
        load_matrix4(a[0], a[1], a[2], a[3], stage + row_a + uint32_t(m * 16 * Cfg::kRowBytes) + swizzle_a);
#pragma unroll
        for (int n = 0; n < NTW; ++n) multiply<T>(acc[m][n], a, b[n]);
      }
    }
    read_stage = read_stage + 1 == STAGES ? 0 : read_stage + 1;
    write_stage = write_stage + 1 == STAGES ? 0 : write_stage + 1;
  }
  copy_wait_all();
  __syncthreads();

  // Partial sums of all warps, in the order of fragments.
  float4* sums = reinterpret_cast<float4*>(smem);
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NTW; ++n)
      sums[((warp * MT + m) * NTW + n) * 32 + lane] =
          make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
  __syncthreads();

  constexpr int kPieces = WM * WN * MT * NTW;
  auto place = [&](int piece, int part) -> int {
    const int n = piece % NTW;
    const int m = (piece / NTW) % MT;
    const int w = piece / (NTW * MT);
    return (((w * WK + part) * MT + m) * NTW + n) * 32 + lane;
  };
  auto sum_block = [&](int piece) -> float4 {
    float4 c = sums[place(piece, 0)];
#pragma unroll
    for (int part = 1; part < WK; ++part) add(c, sums[place(piece, part)]);
    return c;
  };

  const unsigned char* table = smem + Cfg::kPipeBytes;
  auto finish = [&](int piece, const float4& c) {
    const int n = piece % NTW;
    const int m = (piece / NTW) % MT;
    const int w = piece / (NTW * MT);
    const int local = (w / WN) * MT + m;
    const int tile = tile0 + local;
    if (tile >= tiles) return;
    const int g = lane >> 2;
    const int head = tile / per_head;
    const int j = (tile - head * per_head) * 8 + g;
    const float bias_a = s_bias[local * 16 + g];
    const float bias_b = s_bias[local * 16 + 8 + g];
    const int token0 = (w % WN) * (NTW * 8) + n * 8 + (lane & 3) * 2;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int t = token0 + e;
      if (t < tokens) {
        const float a = (e ? c.y : c.x) + bias_a;
        const float b = (e ? c.w : c.z) + bias_b;
        float first = a, second = b;
        if (head < p.q_heads + p.kv_heads) {
          float cosine, sine;
          if (p.c_float) {
            const float* row = reinterpret_cast<const float*>(table) + t * head_dim;
            cosine = row[j];
            sine = row[half + j];
          } else {
            const T* row = reinterpret_cast<const T*>(table) + t * head_dim;
            cosine = to_float(row[j]);
            sine = to_float(row[half + j]);
          }
          first = a * cosine - b * sine;
          second = b * cosine + a * sine;
        }
        T* to = nullptr;
        if (head < p.q_heads) {
          to = static_cast<T*>(p.query) + t * p.query_stride + int64_t(head) * head_dim;
        } else if (head < p.q_heads + p.kv_heads) {
          if (s_key[t] >= 0)
            to = static_cast<T*>(p.key_cache) + s_key[t] + (head - p.q_heads) * p.key_stride[2];
        } else {
          if (s_value[t] >= 0)
            to = static_cast<T*>(p.value_cache) + s_value[t] +
                 (head - p.q_heads - p.kv_heads) * p.value_stride[2];
        }
        if (to != nullptr) {
          to[j] = from_float<T>(first);
          to[half + j] = from_float<T>(second);
        }
      }
    }
  };

  if constexpr (S == 1) {
    for (int piece = warp; piece < kPieces; piece += kWarps) finish(piece, sum_block(piece));
  } else {
    // One sum per block, then one per cluster: each block finishes its share of the pieces.
    for (int piece = warp; piece < kPieces; piece += kWarps) {
      const float4 c = sum_block(piece);
      sums[place(piece, 0)] = c;
    }
    cluster_barrier();
    for (int piece = rank * kWarps + warp; piece < kPieces; piece += kWarps * S) {
      const uint32_t address = base + uint32_t(place(piece, 0)) * 16u;
      float4 parts[S];
#pragma unroll
      for (int r = 0; r < S; ++r) parts[r] = load_cluster(address, uint32_t(r));
      float4 c = parts[0];
#pragma unroll
      for (int r = 1; r < S; ++r) add(c, parts[r]);
      finish(piece, c);
    }
    cluster_barrier();  // no block leaves while another reads its shared memory
  }
}

// Any dtype, any alignment: a warp has one rotary pair of rows and up to 8 tokens.
template <typename T>
__global__ void __launch_bounds__(kThreads) plain_kernel(const Params p) {
  const int lane = threadIdx.x & 31;
  const int half = p.head_dim >> 1;
  const int64_t pairs = int64_t(p.q_heads + 2 * p.kv_heads) * half;
  const int64_t pair = int64_t(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  if (pair >= pairs) return;
  const int token0 = int(blockIdx.y) * 8;
  const int head = int(pair / half);
  const int j = int(pair - int64_t(head) * half);
  const int64_t row = int64_t(head) * p.head_dim + j;
  const T* weight_a = static_cast<const T*>(p.weight) + row * p.inner;
  const T* weight_b = weight_a + int64_t(half) * p.inner;
  const T* x = static_cast<const T*>(p.x) + int64_t(token0) * p.inner;
  float a[8], b[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i] = b[i] = 0.f;
#pragma unroll 2
  for (int k = lane; k < p.inner; k += 32) {
    const float u = to_float(weight_a[k]);
    const float v = to_float(weight_b[k]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (token0 + i < p.tokens) {
        const float value = to_float(x[int64_t(i) * p.inner + k]);
        a[i] = fmaf(u, value, a[i]);
        b[i] = fmaf(v, value, b[i]);
      }
    }
  }
  float mine_a = 0.f, mine_b = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
      a[i] += __shfl_xor_sync(0xffffffffu, a[i], offset);
      b[i] += __shfl_xor_sync(0xffffffffu, b[i], offset);
    }
    if (lane == i) {
      mine_a = a[i];
      mine_b = b[i];
    }
  }
  const int t = token0 + lane;
  if (lane >= 8 || t >= p.tokens) return;
  if (p.bias != nullptr) {
    mine_a += to_float(static_cast<const T*>(p.bias)[row]);
    mine_b += to_float(static_cast<const T*>(p.bias)[row + half]);
  }
  float first = mine_a, second = mine_b;
  if (head < p.q_heads + p.kv_heads) {
    const int64_t at = p.positions[t] * p.head_dim + j;
    float cosine, sine;
    if (p.c_float) {
      cosine = static_cast<const float*>(p.cos_sin)[at];
      sine = static_cast<const float*>(p.cos_sin)[at + half];
    } else {
      cosine = to_float(static_cast<const T*>(p.cos_sin)[at]);
      sine = to_float(static_cast<const T*>(p.cos_sin)[at + half]);
    }
    first = mine_a * cosine - mine_b * sine;
    second = mine_b * cosine + mine_a * sine;
  }
  T* to = nullptr;
  if (head < p.q_heads) {
    to = static_cast<T*>(p.query) + t * p.query_stride + int64_t(head) * p.head_dim;
  } else {
    int64_t key, value;
    cache_offsets(p, p.slots[t], key, value);
    if (key >= 0) {
      if (head < p.q_heads + p.kv_heads) {
        to = static_cast<T*>(p.key_cache) + key + (head - p.q_heads) * p.key_stride[2];
      } else {
        to = static_cast<T*>(p.value_cache) + value + (head - p.q_heads - p.kv_heads) * p.value_stride[2];
      }
    }
  }
  if (to != nullptr) {
    to[j] = from_float<T>(first);
    to[half + j] = from_float<T>(second);
  }
}

inline void check(cudaError_t status) {
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}

// False where the device has too little shared memory for it.
template <typename T, int MT, int NTW, int WM, int WN, int WK, int KPW, int STAGES, int S>
bool launch_tensor(const Params& p, int shared_limit, cudaStream_t stream) {
  using Cfg = Config<MT, NTW, WM, WN, WK, KPW, STAGES, S>;
  const int available = shared_limit - Cfg::kStaticBytes;
  const int bytes = Cfg::kPipeBytes + p.tokens * p.head_dim * (p.c_float ? 4 : 2);
  if (bytes > available) return false;
  const int most = Cfg::kPipeBytes + Cfg::kTokens * 128 * 4;
  void (*kernel)(const Params) = tensor_kernel<T, MT, NTW, WM, WN, WK, KPW, STAGES, S>;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             most < available ? most : available));
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributePreferredSharedMemoryCarveout, 100));
  const int tiles = (p.q_heads + 2 * p.kv_heads) * (p.head_dim / 16);
  const int groups = (tiles + MT * WM - 1) / (MT * WM);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(groups) * S);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = size_t(bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute[1];
  if (S > 1) {
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = S;
    attribute[0].val.clusterDim.y = 1;
    attribute[0].val.clusterDim.z = 1;
    config.attrs = attribute;
    config.numAttrs = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, p));
  return true;
}

inline bool aligned(const void* pointer) { return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0; }

template <typename T>
void launch(const Params& p, DLDevice device, cudaStream_t stream) {
  if constexpr (!std::is_same<T, float>::value) {
    int major = 0, shared_limit = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.device_id));
    check(cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.device_id));
    const bool fits = major >= 8 && p.tokens <= kMaxTokens && p.inner % 8 == 0 && p.head_dim % 16 == 0 &&
                      p.head_dim <= 128 && aligned(p.x) && aligned(p.weight) && aligned(p.cos_sin);
    if (fits) {
      const bool clusters = major >= 9;
      bool done = false;
      if (p.tokens <= 8) {
        done = launch_tensor<T, 1, 1, 1, 1, 8, 2, 5, 1>(p, shared_limit, stream);
      } else if (p.tokens <= 16) {
        done = launch_tensor<T, 2, 2, 1, 1, 8, 1, 7, 1>(p, shared_limit, stream);
      } else if (p.tokens <= 32) {
        if (clusters) done = launch_tensor<T, 5, 4, 1, 1, 8, 1, 3, 2>(p, shared_limit, stream);
        if (!done) done = launch_tensor<T, 2, 4, 1, 1, 8, 1, 4, 1>(p, shared_limit, stream);
      } else {
        if (clusters) done = launch_tensor<T, 5, 4, 2, 2, 2, 2, 3, 4>(p, shared_limit, stream);
        if (!done) done = launch_tensor<T, 2, 4, 1, 2, 4, 2, 3, 1>(p, shared_limit, stream);
      }
      if (done) return;
    }
  }
  const int64_t pairs = int64_t(p.q_heads + 2 * p.kv_heads) * (p.head_dim / 2);
  const dim3 grid(unsigned((pairs + kWarps - 1) / kWarps), unsigned((p.tokens + 7) / 8));
  plain_kernel<T><<<grid, kThreads, 0, stream>>>(p);
  check(cudaGetLastError());
}

}  // namespace qkv

void qkv_rope_kv_update(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView bias,
                        tvm::ffi::TensorView positions, tvm::ffi::TensorView cos_sin,
                        tvm::ffi::TensorView slots, tvm::ffi::TensorView query,
                        tvm::ffi::TensorView key_cache, tvm::ffi::TensorView value_cache) {
  const DLDataType type = x.dtype();
  const DLDataType table = cos_sin.dtype();
  const bool table_float = table.code == kDLFloat && table.bits == 32;
  const bool table_same = table.code == type.code && table.bits == type.bits;
  if (!table_float && !table_same) TVM_FFI_THROW(TypeError) << "qkv_rope_kv_update: unsupported dtype of cos_sin";
  if (positions.dtype().bits != 64 || slots.dtype().bits != 64)
    TVM_FFI_THROW(TypeError) << "qkv_rope_kv_update: positions and slots must be int64";

  qkv::Params p;
  p.x = x.data_ptr();
  p.weight = weight.data_ptr();
  p.bias = bias.numel() > 0 ? bias.data_ptr() : nullptr;
  p.positions = static_cast<const int64_t*>(positions.data_ptr());
  p.cos_sin = cos_sin.data_ptr();
  p.slots = static_cast<const int64_t*>(slots.data_ptr());
  p.query = query.data_ptr();
  p.key_cache = key_cache.data_ptr();
  p.value_cache = value_cache.data_ptr();
  p.query_stride = query.stride(0);
  for (int axis = 0; axis < 3; ++axis) {
    p.key_stride[axis] = key_cache.stride(axis);
    p.value_stride[axis] = value_cache.stride(axis);
  }
  p.block_size = key_cache.size(1);
  p.tokens = int(x.size(0));
  p.inner = int(x.size(1));
  p.head_dim = int(key_cache.size(3));
  if (p.tokens == 0 || p.head_dim == 0) return;
  p.q_heads = int(query.size(1) / p.head_dim);
  p.kv_heads = int(key_cache.size(2));
  p.c_float = table_float ? 1 : 0;
  if (p.q_heads + 2 * p.kv_heads == 0) return;

  const DLDevice device = x.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  if (type.code == kDLBfloat && type.bits == 16) return qkv::launch<__nv_bfloat16>(p, device, stream);
  if (type.code == kDLFloat && type.bits == 16) return qkv::launch<__half>(p, device, stream);
  if (type.code == kDLFloat && type.bits == 32) return qkv::launch<float>(p, device, stream);
  TVM_FFI_THROW(TypeError) << "qkv_rope_kv_update: unsupported dtype";
}
