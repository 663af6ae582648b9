// Op: add_rms_norm_route: residual += input; input = norm(residual) * weight; logits = router_bias
//   + input @ router_weight^T; top-k, softmax and tables of these.
// Arguments: input[T: tokens, hidden], residual[T: tokens, hidden], weight[W: hidden],
//   router_weight[T: experts, hidden], router_bias[T: biased * experts], logits[T: tokens,
//   experts], gate_scales[T: tokens * top_k], gather_index[I: tokens * top_k], scatter_index[I:
//   tokens * top_k], histogram[I: experts], token_offsets[I: experts + 1], tile_offsets[I: 4,
//   experts + 1], tile_map[I: 4, min(tokens * top_k, experts - 1 + (tokens * top_k - experts + 16)
//   // 16)], epsilon; T: bfloat16 or float16 or float32; W: T or float32; I: int32
// Writes: input, residual, logits, gate_scales, gather_index, scatter_index, histogram,
//   token_offsets, tile_offsets, tile_map
// Needs: compute capability 9.0; one cluster for bfloat16, at most 32 experts, 16-byte alignment
//   and ceil(tokens / 16) * ceil(hidden / 1024) at most 12; all others two plain kernels in
//   float32.
// Idea: a cluster of 16 blocks splits hidden; the norm's factor is applied to the sums, so that one
//   exchange by st.async carries squares and logits; one warp a token picks; tables by bit masks.
// Made by: the agent loop, run 20261129-233909-optimize-a851, candidate 0, answered from its prompt
//   alone; not recorded.
// Figures: NVIDIA H200, geometric means, bench/results/kernels: sweep bf16 2.47x against patched,
//   2.34x to 2.64x at tokens 1 to 64 (add_rms_norm_route-cuda_tuned.json.xz).
// Digest: 9668e96df2a38f58273f8870f6cd22d4b89a2190aa0bc03e9259aaa63201bed2

// Op: add_rms_norm_route: residual += input; input = residual / sqrt(mean(residual^2) + epsilon) *
//   weight; logits = router_bias + input @ router_weight^T; then top-k, softmax and tables of these.
// Arguments: input[T: tokens, hidden], residual[T: tokens, hidden], weight[W: hidden],
//   router_weight[T: experts, hidden], router_bias[T: biased * experts], logits[T: tokens,
//   experts], gate_scales[T: tokens * top_k], gather_index[I: tokens * top_k], scatter_index[I:
//   tokens * top_k], histogram[I: experts], token_offsets[I: experts + 1], tile_offsets[I: 4,
//   experts + 1], tile_map[I: 4, min(tokens * top_k, experts - 1 + (tokens * top_k - experts + 16)
//   // 16)], epsilon; T: bfloat16 or float16 or float32; W: T or float32; I: int32
// Writes: input, residual, logits, gate_scales, gather_index, scatter_index, histogram,
//   token_offsets, tile_offsets, tile_map
// Needs: sm_90. One cluster for T = bfloat16, experts <= 32, pointers aligned to 16 bytes and
//   ceil(tokens / 16) * ceil(hidden / 1024) * 2 <= 24; all others get two plain kernels in float32.
// Idea: a cluster of 16 blocks splits hidden; tensor core fragments come straight from global memory
//   (columns permuted alike on both sides); the norm's factor is applied to the sums, so one exchange
//   by st.async and mbarriers carries squares and logits; one warp per token picks by redux; token
//   sets are bit masks, so tables are a bit transpose, popcounts and scans in each warp.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace {

constexpr int kMaxUnits = 24;     // warps with work in a block of the cluster
constexpr int kRow = 40;          // floats per row of partial logits in shared memory
constexpr int kMaxOwn = 8;        // tokens whose logits one block finishes
constexpr int kMaxRanks = 16;     // blocks in the cluster
constexpr int kMaxTokens = 64;
constexpr unsigned kFull = 0xFFFFFFFFu;

template <typename T, typename W>
struct Args {
  T* input;
  T* residual;
  const W* weight;
  const T* router_weight;
  const T* router_bias;
  T* logits;
  T* gate_scales;
  int* gather_index;
  int* scatter_index;
  int* histogram;
  int* token_offsets;
  int* tile_offsets;
  int* tile_map;
  int tokens, hidden, experts, top_k, tiles, biased;
  float epsilon;
};

// ---------------------------------------------------------------- conversions and vectors

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const uint32_t a = __bfloat16_as_ushort(__float2bfloat16_rn(low));
  const uint32_t b = __bfloat16_as_ushort(__float2bfloat16_rn(high));
  return a | (b << 16);
}
__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  const uint32_t a = __half_as_ushort(__float2half_rn(low));
  const uint32_t b = __half_as_ushort(__float2half_rn(high));
  return a | (b << 16);
}

__device__ __forceinline__ void unpack_bf16(uint4 v, float* x) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(w[i] << 16);
    x[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
  }
}

// eight values; p is aligned to 16 bytes
__device__ __forceinline__ void load8_vec(const __nv_bfloat16* p, float* x) {
  unpack_bf16(*reinterpret_cast<const uint4*>(p), x);
}
__device__ __forceinline__ void load8_vec(const __half* p, float* x) {
  const uint4 v = *reinterpret_cast<const uint4*>(p);
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(w[i] & 0xFFFFu)));
    x[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(w[i] >> 16)));
  }
}
__device__ __forceinline__ void load8_vec(const float* p, float* x) {
  const float4 a = reinterpret_cast<const float4*>(p)[0];
  const float4 b = reinterpret_cast<const float4*>(p)[1];
  x[0] = a.x; x[1] = a.y; x[2] = a.z; x[3] = a.w;
  x[4] = b.x; x[5] = b.y; x[6] = b.z; x[7] = b.w;
}
__device__ __forceinline__ void store8_vec(__nv_bfloat16* p, const float* x) {
  *reinterpret_cast<uint4*>(p) = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                                            pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}
__device__ __forceinline__ void store8_vec(__half* p, const float* x) {
  *reinterpret_cast<uint4*>(p) = make_uint4(pack_half(x[0], x[1]), pack_half(x[2], x[3]),
                                            pack_half(x[4], x[5]), pack_half(x[6], x[7]));
}
__device__ __forceinline__ void store8_vec(float* p, const float* x) {
  reinterpret_cast<float4*>(p)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

template <typename T>
__device__ __forceinline__ void load8(const T* p, float* x, bool vec) {
  if (vec) {
    load8_vec(p, x);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(p[i]);
  }
}
template <typename T>
__device__ __forceinline__ void store8(T* p, const float* x, bool vec) {
  if (vec) {
    store8_vec(p, x);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) p[i] = from_float<T>(x[i]);
  }
}

// ---------------------------------------------------------------- cluster and mbarrier

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ uint32_t map_rank(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
__device__ __forceinline__ void send(uint32_t address, uint32_t value, uint32_t bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               :
               : "r"(address), "r"(value), "r"(bar)
               : "memory");
}
__device__ __forceinline__ void send4(uint32_t address, float4 v, uint32_t bar) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];"
      :
      : "r"(address), "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)),
        "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w)), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void bar_init(uint32_t bar) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(1) : "memory");
}
__device__ __forceinline__ void bar_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(bar), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bar_wait(uint32_t bar) {
  uint32_t done;
  do {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.b32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(done)
        : "r"(bar), "r"(0)
        : "memory");
  } while (!done);
}

__device__ __forceinline__ void mma(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                    uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// bit j of lane i becomes bit i of lane j
__device__ __forceinline__ uint32_t transpose_bits(uint32_t x, int lane) {
  uint32_t keep = 0x0000FFFFu;
#pragma unroll
  for (int s = 16; s > 0; s >>= 1) {
    const uint32_t y = __shfl_xor_sync(kFull, x, s);
    x = (lane & s) ? ((x & ~keep) | ((y >> s) & keep)) : ((x & keep) | ((y & keep) << s));
    keep ^= keep << (s >> 1);
  }
  return x;
}

__device__ __forceinline__ int inclusive_scan(int x, int lane) {
#pragma unroll
  for (int s = 1; s < 32; s <<= 1) {
    const int y = __shfl_up_sync(kFull, x, s);
    if (lane >= s) x += y;
  }
  return x;
}

// ---------------------------------------------------------------- one cluster does it all

// Unit (= warp) u of a block: tokens of tile u % m_tiles, 32 columns of step u / m_tiles.
template <typename W>
__global__ void __launch_bounds__(kMaxUnits * 32, 1)
    cluster_kernel(const Args<__nv_bfloat16, W> a, const int slice, const int m_tiles,
                   const int k_steps) {
  extern __shared__ __align__(16) float part[];  // [units * 16][kRow]
  __shared__ __align__(16) float red[kMaxRanks * kMaxOwn * 32];
  __shared__ __align__(16) float squares[kMaxRanks * kMaxTokens];
  __shared__ float unit_squares[kMaxUnits * 16];
  __shared__ __align__(16) uint32_t masks[kMaxTokens];
  __shared__ __align__(8) uint64_t bars[2];

  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int g = lane >> 2, q = lane & 3;
  const int threads = blockDim.x, warps = threads >> 5;
  const int ranks = gridDim.x, rank = blockIdx.x;
  const int rank_shift = 31 - __clz(ranks);
  const int tokens = a.tokens, hidden = a.hidden, experts = a.experts, top_k = a.top_k;
  // few tokens: block 0 finishes all of them; else token t belongs to block t % ranks
  const bool single = tokens <= kMaxOwn;
  const int own =
      single ? (rank == 0 ? tokens : 0) : ((tokens - rank + ranks - 1) >> rank_shift);
  const uint32_t bar_sums = shared_address(&bars[0]);
  const uint32_t bar_masks = shared_address(&bars[1]);

  if (tid == 0) {
    bar_init(bar_sums);
    bar_init(bar_masks);
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
    bar_expect(bar_sums, uint32_t(ranks * tokens * 4 + ranks * own * 128));
    bar_expect(bar_masks, uint32_t(tokens * 4));
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");

  // all loads
  const int units = m_tiles * k_steps;
  const bool busy = warp < units;
  const int m_tile = warp % m_tiles;
  const int k = rank * slice + (warp / m_tiles) * 32 + q * 8;
  const bool inside = busy && k < hidden;
  const int t0 = m_tile * 16 + g, t1 = t0 + 8;
  const bool in0 = inside && t0 < tokens, in1 = inside && t1 < tokens;
  const int at0 = t0 * hidden + k, at1 = t1 * hidden + k;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  uint4 x0 = zero, x1 = zero, r0 = zero, r1 = zero, b[4];
  if (in0) {
    x0 = *reinterpret_cast<const uint4*>(a.input + at0);
    r0 = *reinterpret_cast<const uint4*>(a.residual + at0);
  }
  if (in1) {
    x1 = *reinterpret_cast<const uint4*>(a.input + at1);
    r1 = *reinterpret_cast<const uint4*>(a.residual + at1);
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int e = n * 8 + g;
    b[n] = zero;
    if (inside && e < experts) {
      b[n] = __ldg(reinterpret_cast<const uint4*>(a.router_weight + e * hidden + k));
    }
  }
  float gain[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) gain[i] = 0.0f;
  if (inside) load8_vec(a.weight + k, gain);
  float bias = 0.0f;
  if (warp < own && lane < experts && a.biased) bias = to_float(a.router_bias[lane]);

  float s0[8], s1[8];
  {
    float y[8];
    unpack_bf16(x0, s0);
    unpack_bf16(r0, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) s0[i] += y[i];
    unpack_bf16(x1, s1);
    unpack_bf16(r1, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) s1[i] += y[i];
  }

  if (busy) {
    uint32_t a0[4], a1[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a0[i] = pack_bf16(s0[2 * i] * gain[2 * i], s0[2 * i + 1] * gain[2 * i + 1]);
      a1[i] = pack_bf16(s1[2 * i] * gain[2 * i], s1[2 * i + 1] * gain[2 * i + 1]);
    }
    float acc[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
      mma(acc[n], a0[0], a1[0], a0[1], a1[1], b[n].x, b[n].y);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) mma(acc[n], a0[2], a1[2], a0[3], a1[3], b[n].z, b[n].w);

    float q0 = 0.0f, q1 = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      q0 = fmaf(s0[i], s0[i], q0);
      q1 = fmaf(s1[i], s1[i], q1);
    }
    q0 += __shfl_xor_sync(kFull, q0, 1);
    q1 += __shfl_xor_sync(kFull, q1, 1);
    q0 += __shfl_xor_sync(kFull, q0, 2);
    q1 += __shfl_xor_sync(kFull, q1, 2);
    if (q == 0) {
      unit_squares[warp * 16 + g] = q0;
      unit_squares[warp * 16 + g + 8] = q1;
    }
    float* p = part + (warp * 16 + g) * kRow + q * 2;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      *reinterpret_cast<float2*>(p + n * 8) = make_float2(acc[n][0], acc[n][1]);
      *reinterpret_cast<float2*>(p + 8 * kRow + n * 8) = make_float2(acc[n][2], acc[n][3]);
    }
  }
  __syncthreads();
  // every block of the cluster runs, and its barriers are ready
  asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");

  // sums over this block's columns, sent to whom they concern
  for (int i = tid; i < tokens * 8; i += threads) {
    const int t = i >> 3, c = (i & 7) * 4;
    const float* p = part + t * kRow + c;
    float4 sum = *reinterpret_cast<const float4*>(p);
#pragma unroll 4
    for (int step = 1; step < k_steps; ++step) {
      const float4 v = *reinterpret_cast<const float4*>(p + step * m_tiles * 16 * kRow);
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
    const int owner = single ? 0 : (t & (ranks - 1));
    const int j = single ? t : (t >> rank_shift);
    send4(map_rank(shared_address(&red[(rank * kMaxOwn + j) * 32 + c]), owner), sum,
          map_rank(bar_sums, owner));
  }
  for (int i = threads - 1 - tid; i < (tokens << rank_shift); i += threads) {
    const int to = i & (ranks - 1), t = i >> rank_shift;
    float sum = unit_squares[t];
#pragma unroll 4
    for (int step = 1; step < k_steps; ++step) sum += unit_squares[step * m_tiles * 16 + t];
    send(map_rank(shared_address(&squares[rank * kMaxTokens + t]), to), __float_as_uint(sum),
         map_rank(bar_sums, to));
  }

  // meanwhile
  if (in0) store8_vec(a.residual + at0, s0);
  if (in1) store8_vec(a.residual + at1, s1);

  bar_wait(bar_sums);
  __syncwarp();

  const float count = static_cast<float>(hidden);
  uint32_t chosen = 0;
  float scale = 0.0f;
  const int token = single ? warp : rank + (warp << rank_shift);  // where warp < own
  if (warp < own) {
    const int from = lane & 15;
    float total = from < ranks ? squares[from * kMaxTokens + token] : 0.0f;
#pragma unroll
    for (int s = 8; s > 0; s >>= 1) total += __shfl_xor_sync(kFull, total, s);
    const float factor = rsqrtf(total / count + a.epsilon);
    float dot = 0.0f;
#pragma unroll 8
    for (int r = 0; r < ranks; ++r) dot += red[(r * kMaxOwn + warp) * 32 + lane];
    const __nv_bfloat16 logit = __float2bfloat16_rn(fmaf(dot, factor, bias));
    if (lane < experts) a.logits[token * experts + lane] = logit;

    // unsigned whole numbers that ascend as the logits do, then the smaller expert first
    const uint32_t bits = __bfloat16_as_ushort(logit);
    const uint32_t order = (bits & 0x8000u) ? (~bits & 0xFFFFu) : (bits | 0x8000u);
    uint32_t key = lane < experts ? (order << 6) + (63u - lane) : 0u;
    float top = 0.0f, sum = 0.0f;
    for (int i = 0; i < top_k; ++i) {
      const uint32_t best = __reduce_max_sync(kFull, key);
      const int winner = (63 - int(best & 63u)) & 31;
      const uint32_t found = best >> 6;
      const uint32_t raw = (found & 0x8000u) ? (found & 0x7FFFu) : (~found & 0xFFFFu);
      const float value = __uint_as_float(raw << 16);
      if (i == 0) top = value;
      sum += expf(value - top);
      chosen |= 1u << winner;
      if (lane == winner) key = 0u;
    }
    scale = expf(__bfloat162float(logit) - top) / sum;
    if (single) {
      if (lane == 0) masks[token] = chosen;
    } else if (lane < ranks) {
      send(map_rank(shared_address(&masks[token]), lane), chosen, map_rank(bar_masks, lane));
    }
  }
  __syncwarp();

  // the normalised rows
  {
    float q0 = 0.0f, q1 = 0.0f;
    for (int r = q; r < ranks; r += 4) {
      q0 += squares[r * kMaxTokens + t0];
      q1 += squares[r * kMaxTokens + t1];
    }
    q0 += __shfl_xor_sync(kFull, q0, 1);
    q1 += __shfl_xor_sync(kFull, q1, 1);
    q0 += __shfl_xor_sync(kFull, q0, 2);
    q1 += __shfl_xor_sync(kFull, q1, 2);
    const float f0 = rsqrtf(q0 / count + a.epsilon), f1 = rsqrtf(q1 / count + a.epsilon);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      s0[i] = s0[i] * f0 * gain[i];
      s1[i] = s1[i] * f1 * gain[i];
    }
    if (in0) store8_vec(a.input + at0, s0);
    if (in1) store8_vec(a.input + at1, s1);
  }

  if (single) {
    if (rank != 0) return;
    __syncthreads();
  } else {
    bar_wait(bar_masks);
    __syncwarp();
  }

  // the tables; each warp derives what it needs from the masks
  const int table_rank = single ? 0 : ranks - 1;
  const int job = rank == table_rank ? warps - 1 - warp : 99;  // 0 to 3: tiles, 4: histogram
  const bool has_rows = warp < own;
  if (!has_rows && job > 4) return;
  const uint32_t low = transpose_bits(lane < tokens ? masks[lane] : 0u, lane);
  uint32_t high = 0u;
  if (tokens > 32) high = transpose_bits(lane + 32 < tokens ? masks[lane + 32] : 0u, lane);
  const int hist = __popc(low) + __popc(high);
  const int until = inclusive_scan(hist, lane);
  const int start = until - hist;

  if (has_rows && ((chosen >> lane) & 1u)) {
    const int before = token < 32
                           ? __popc(low & ((1u << token) - 1u))
                           : __popc(low) + __popc(high & ((1u << (token - 32)) - 1u));
    const int row = start + before;
    const int number = token * top_k + __popc(chosen & ((1u << lane) - 1u));
    a.gather_index[row] = number;
    a.scatter_index[number] = row;
    a.gate_scales[row] = __float2bfloat16_rn(scale);
  }
  __syncwarp();
  if (job < 4) {
    const int shift = 4 + job;
    const int blocks = (hist + (1 << shift) - 1) >> shift;
    const int last = inclusive_scan(blocks, lane);
    const int first = last - blocks;
    int* offsets = a.tile_offsets + job * (experts + 1);
    if (lane < experts) offsets[lane] = first;
    if (lane == 31) offsets[experts] = last;
    int* map = a.tile_map + job * a.tiles;
    for (int i = 0; i < blocks; ++i) {
      if (first + i < a.tiles) map[first + i] = (i << 16) | lane;
    }
    const int used = __shfl_sync(kFull, last, 31);
    for (int i = used + lane; i < a.tiles; i += 32) map[i] = -1;
  } else if (job == 4) {
    if (lane < experts) {
      a.histogram[lane] = hist;
      a.token_offsets[lane] = start;
    }
    if (lane == 31) a.token_offsets[experts] = until;
  }
}

// ---------------------------------------------------------------- the plain path

constexpr int kNormThreads = 512;

// One block per token: norm and logits.
template <typename T, typename W>
__global__ void __launch_bounds__(kNormThreads)
    norm_kernel(const Args<T, W> a, const bool vec) {
  extern __shared__ __align__(16) float normed[];  // [hidden]
  __shared__ float sums[kNormThreads / 32];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int hidden = a.hidden, experts = a.experts;
  T* input = a.input + int64_t(blockIdx.x) * hidden;
  T* residual = a.residual + int64_t(blockIdx.x) * hidden;

  float square = 0.0f;
  for (int k = tid * 8; k < hidden; k += kNormThreads * 8) {
    float x[8], r[8];
    load8(input + k, x, vec);
    load8(residual + k, r, vec);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      r[i] += x[i];
      square = fmaf(r[i], r[i], square);
    }
    store8_vec(normed + k, r);
    store8(residual + k, r, vec);
  }
#pragma unroll
  for (int s = 16; s > 0; s >>= 1) square += __shfl_xor_sync(kFull, square, s);
  if (lane == 0) sums[warp] = square;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kNormThreads / 32; ++i) total += sums[i];
  const float factor = 1.0f / sqrtf(total / static_cast<float>(hidden) + a.epsilon);

  for (int k = tid * 8; k < hidden; k += kNormThreads * 8) {
    float x[8], gain[8];
    load8_vec(normed + k, x);
    load8(a.weight + k, gain, vec);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = x[i] * factor * gain[i];
    store8_vec(normed + k, x);
    store8(input + k, x, vec);
  }
  __syncthreads();

  for (int e = warp; e < experts; e += kNormThreads / 32) {
    const T* row = a.router_weight + int64_t(e) * hidden;
    float dot = 0.0f;
#pragma unroll 2
    for (int k = lane * 8; k < hidden; k += 256) {
      float x[8], y[8];
      load8(row + k, y, vec);
      load8_vec(normed + k, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) dot = fmaf(x[i], y[i], dot);
    }
#pragma unroll
    for (int s = 16; s > 0; s >>= 1) dot += __shfl_xor_sync(kFull, dot, s);
    if (lane == 0) {
      if (a.biased) dot += to_float(a.router_bias[e]);
      a.logits[int64_t(blockIdx.x) * experts + e] = from_float<T>(dot);
    }
  }
}

// One block: routing of the written logits, up to 128 experts.
template <typename T, typename W>
__global__ void __launch_bounds__(1024) route_kernel(const Args<T, W> a) {
  __shared__ uint32_t keys[32][128];
  __shared__ uint32_t picked[kMaxTokens][4];
  __shared__ float scales[kMaxTokens * 8];
  __shared__ int expert_of[kMaxTokens * 8];
  __shared__ unsigned long long tokens_of[128];
  __shared__ int counts[128];
  __shared__ int starts[128];
  __shared__ int used[4];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int tokens = a.tokens, experts = a.experts, top_k = a.top_k;

  for (int t = warp; t < tokens; t += 32) {
    float value[4];
    uint32_t key[4];
    int before[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = lane + 32 * i;
      value[i] = 0.0f;
      key[i] = 0u;
      before[i] = 0;
      if (e < experts) {
        value[i] = to_float(a.logits[t * experts + e]);
        const uint32_t bits = __float_as_uint(value[i]);
        key[i] = (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
      }
      keys[warp][e] = key[i];
    }
    __syncwarp();
    for (int o = 0; o < experts; ++o) {
      const uint32_t other = keys[warp][o];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        before[i] += (other > key[i] || (other == key[i] && o < lane + 32 * i)) ? 1 : 0;
      }
    }
    uint32_t word[4];
    bool chosen[4];
    float top = __uint_as_float(0xFF800000u);  // -infinity
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      chosen[i] = lane + 32 * i < experts && before[i] < top_k;
      word[i] = __ballot_sync(kFull, chosen[i]);
      if (chosen[i]) top = fmaxf(top, value[i]);
    }
#pragma unroll
    for (int s = 16; s > 0; s >>= 1) top = fmaxf(top, __shfl_xor_sync(kFull, top, s));
    float weight[4], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weight[i] = chosen[i] ? expf(value[i] - top) : 0.0f;
      sum += weight[i];
    }
#pragma unroll
    for (int s = 16; s > 0; s >>= 1) sum += __shfl_xor_sync(kFull, sum, s);
    int number = t * top_k;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (chosen[i]) {
        const int mine = number + __popc(word[i] & ((1u << lane) - 1u));
        expert_of[mine] = lane + 32 * i;
        scales[mine] = weight[i] / sum;
      }
      number += __popc(word[i]);
      if (lane == 0) picked[t][i] = word[i];
    }
    __syncwarp();
  }
  __syncthreads();

  if (tid < experts) {
    unsigned long long set = 0;
    for (int t = 0; t < tokens; ++t) {
      const unsigned long long bit = (picked[t][tid >> 5] >> (tid & 31)) & 1u;
      set |= bit << t;
    }
    const int count = __popcll(set);
    tokens_of[tid] = set;
    counts[tid] = count;
    a.histogram[tid] = count;
  }
  __syncthreads();

  if (tid < 512) {
    const int i = tid >> 7, e = tid & 127, shift = 4 + i;
    if (e < experts) {
      int first = 0;
      for (int o = 0; o < e; ++o) first += (counts[o] + (1 << shift) - 1) >> shift;
      const int blocks = (counts[e] + (1 << shift) - 1) >> shift;
      a.tile_offsets[i * (experts + 1) + e] = first;
      for (int n = 0; n < blocks; ++n) {
        if (first + n < a.tiles) a.tile_map[i * a.tiles + first + n] = (n << 16) | e;
      }
      if (e == experts - 1) {
        a.tile_offsets[i * (experts + 1) + experts] = first + blocks;
        used[i] = first + blocks;
      }
    }
  } else if (tid - 512 < experts) {
    const int e = tid - 512;
    int first = 0;
    for (int o = 0; o < e; ++o) first += counts[o];
    starts[e] = first;
    a.token_offsets[e] = first;
    if (e == experts - 1) a.token_offsets[experts] = first + counts[e];
  }
  __syncthreads();

  for (int number = tid; number < tokens * top_k; number += 1024) {
    const int e = expert_of[number], t = number / top_k;
    const int row = starts[e] + __popcll(tokens_of[e] & ((1ull << t) - 1ull));
    a.gather_index[row] = number;
    a.scatter_index[number] = row;
    a.gate_scales[row] = from_float<T>(scales[number]);
  }
  for (int n = tid; n < 4 * a.tiles; n += 1024) {
    const int i = n / a.tiles;
    if (n - i * a.tiles >= used[i]) a.tile_map[n] = -1;
  }
}

// ---------------------------------------------------------------- host

void check(cudaError_t status) {
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}

constexpr int kMaxPart = kMaxUnits * 16 * kRow * int(sizeof(float));

template <typename W>
int find_cluster_size() {
  auto kernel = cluster_kernel<W>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxPart) !=
      cudaSuccess) {
    cudaGetLastError();
    return -1;
  }
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
      cudaSuccess) {
    cudaGetLastError();
  }
  for (int size = kMaxRanks; size >= 8; size /= 2) {
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = unsigned(size);
    attribute[0].val.clusterDim.y = 1;
    attribute[0].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(size));
    config.blockDim = dim3(kMaxUnits * 32);
    config.dynamicSmemBytes = kMaxPart;
    config.attrs = attribute;
    config.numAttrs = 1;
    int fitting = 0;
    if (cudaOccupancyMaxActiveClusters(&fitting, kernel, &config) == cudaSuccess && fitting > 0) {
      return size;
    }
    cudaGetLastError();
  }
  return -1;
}

// what the device can run, found once per device
template <typename W>
int cluster_size(int device) {
  static int sizes[64] = {};
  if (device < 0 || device >= 64) return -1;
  if (sizes[device] == 0) sizes[device] = find_cluster_size<W>();
  return sizes[device];
}

// whether the cluster took the call
template <typename W>
bool launch_cluster(const Args<__nv_bfloat16, W>& a, int device, cudaStream_t stream) {
  const int ranks = cluster_size<W>(device);
  if (ranks <= 0) return false;
  const int slice = ((a.hidden + 63) / 64 + ranks - 1) / ranks * 64;
  const int k_steps = slice / 32;
  const int m_tiles = (a.tokens + 15) / 16;
  const int units = k_steps * m_tiles;
  if (units < 1 || units > kMaxUnits) return false;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeClusterDimension;
  attribute[0].val.clusterDim.x = unsigned(ranks);
  attribute[0].val.clusterDim.y = 1;
  attribute[0].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(ranks));
  config.blockDim = dim3(unsigned(32 * (units < kMaxOwn ? kMaxOwn : units)));
  config.dynamicSmemBytes = size_t(units) * 16 * kRow * sizeof(float);
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, cluster_kernel<W>, a, slice, m_tiles, k_steps));
  return true;
}

struct Tensors {
  tvm::ffi::TensorView input, residual, weight, router_weight, router_bias, logits, gate_scales,
      gather_index, scatter_index, histogram, token_offsets, tile_offsets, tile_map;
};

template <typename T, typename W>
void launch(const Tensors& v, double epsilon) {
  Args<T, W> a;
  a.input = static_cast<T*>(v.input.data_ptr());
  a.residual = static_cast<T*>(v.residual.data_ptr());
  a.weight = static_cast<const W*>(v.weight.data_ptr());
  a.router_weight = static_cast<const T*>(v.router_weight.data_ptr());
  a.router_bias = static_cast<const T*>(v.router_bias.data_ptr());
  a.logits = static_cast<T*>(v.logits.data_ptr());
  a.gate_scales = static_cast<T*>(v.gate_scales.data_ptr());
  a.gather_index = static_cast<int*>(v.gather_index.data_ptr());
  a.scatter_index = static_cast<int*>(v.scatter_index.data_ptr());
  a.histogram = static_cast<int*>(v.histogram.data_ptr());
  a.token_offsets = static_cast<int*>(v.token_offsets.data_ptr());
  a.tile_offsets = static_cast<int*>(v.tile_offsets.data_ptr());
  a.tile_map = static_cast<int*>(v.tile_map.data_ptr());
  a.tokens = int(v.input.size(0));
  a.hidden = int(v.input.size(1));
  a.experts = int(v.logits.size(1));
  if (a.tokens == 0 || a.experts == 0) return;
  a.top_k = int(v.gather_index.size(0)) / a.tokens;
  a.tiles = int(v.tile_map.size(1));
  a.biased = v.router_bias.size(0) > 0 ? 1 : 0;
  a.epsilon = float(epsilon);
  if (a.tokens > kMaxTokens || a.experts > 128 || a.hidden > 16384 || a.hidden % 8 != 0 ||
      a.top_k < 1 || a.top_k > 8 || a.top_k > a.experts) {
    TVM_FFI_THROW(ValueError) << "add_rms_norm_route: unsupported shape";
  }
  const DLDevice device = v.input.device();
  auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  const uintptr_t together =
      reinterpret_cast<uintptr_t>(a.input) | reinterpret_cast<uintptr_t>(a.residual) |
      reinterpret_cast<uintptr_t>(a.weight) | reinterpret_cast<uintptr_t>(a.router_weight);
  const bool vec = (together & 15) == 0;

  if constexpr (std::is_same<T, __nv_bfloat16>::value) {
    if (vec && a.experts <= 32 && a.hidden > 0 &&
        launch_cluster<W>(a, int(device.device_id), stream)) {
      return;
    }
  }
  const size_t bytes = size_t(a.hidden) * sizeof(float);
  if (bytes > 40000) {
    auto kernel = norm_kernel<T, W>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               16384 * int(sizeof(float))));
  }
  norm_kernel<T, W><<<unsigned(a.tokens), kNormThreads, bytes, stream>>>(a, vec);
  check(cudaGetLastError());
  route_kernel<T, W><<<1, 1024, 0, stream>>>(a);
  check(cudaGetLastError());
}

}  // namespace

void add_rms_norm_route(tvm::ffi::TensorView input, tvm::ffi::TensorView residual,
                        tvm::ffi::TensorView weight, tvm::ffi::TensorView router_weight,
                        tvm::ffi::TensorView router_bias, tvm::ffi::TensorView logits,
                        tvm::ffi::TensorView gate_scales, tvm::ffi::TensorView gather_index,
                        tvm::ffi::TensorView scatter_index, tvm::ffi::TensorView histogram,
                        tvm::ffi::TensorView token_offsets, tvm::ffi::TensorView tile_offsets,
                        tvm::ffi::TensorView tile_map, double epsilon) {
  const Tensors v{input,         residual,      weight,    router_weight, router_bias,
                  logits,        gate_scales,   gather_index, scatter_index, histogram,
                  token_offsets, tile_offsets,  tile_map};
  const DLDataType t = input.dtype();
  const DLDataType w = weight.dtype();
  const bool wide = w.code == kDLFloat && w.bits == 32;
  const bool same = w.code == t.code && w.bits == t.bits;
  if (t.code == kDLBfloat && t.bits == 16) {
    if (same) return launch<__nv_bfloat16, __nv_bfloat16>(v, epsilon);
    if (wide) return launch<__nv_bfloat16, float>(v, epsilon);
  } else if (t.code == kDLFloat && t.bits == 16) {
    if (same) return launch<__half, __half>(v, epsilon);
    if (wide) return launch<__half, float>(v, epsilon);
  } else if (t.code == kDLFloat && t.bits == 32) {
    if (wide) return launch<float, float>(v, epsilon);
  }
  TVM_FFI_THROW(TypeError) << "add_rms_norm_route: unsupported dtype";
}
