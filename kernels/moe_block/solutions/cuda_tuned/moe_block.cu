// Op: moe_block: h = residual + input; x = norm(h) * weight; total = h + sum over the top_k experts
//   of gate * down(clamped swiglu(gate_up(x))); output = norm(total) * next_weight.
// Arguments: input[T: tokens, hidden], residual[T: tokens, hidden], weight[W: hidden],
//   router_weight[T: experts, hidden], router_bias[T: biased * experts], gate_up_weights[U:
//   experts, inner / 2, hidden * 2], gate_up_scales[U: experts, (inner * 2 + 255) // 256 * 8,
//   hidden], gate_up_bias[B: experts, inner * 2], down_weights[U: experts, hidden / 4, inner * 2],
//   down_scales[U: experts, (hidden + 255) // 256 * 8, inner], down_bias[B: experts, hidden],
//   next_weight[W: hidden], logits[T: tokens, experts], chosen[I: tokens, top_k], total[T: tokens,
//   hidden], output[T: tokens, hidden], alpha, limit, epsilon; T: bfloat16 or float32; W: T or
//   float32; U: uint8; B: float32; I: int32
// Writes: logits, chosen, total, output
// Needs: compute capability 9.0, all SMs; fast for bfloat16, hidden = inner = 2880, at most 32
//   experts, 16-byte alignment; the rest plain FMA; graph-safe, one stream.
// Idea: norm and router, then one persistent kernel: both matrices' FP4 tiles in one ring of bulk
//   copies, which runs ahead over the grid barrier between them.
// Made by: the agent loop, run 20261129-225055-optimize-890b, candidate 1, answered from its prompt
//   alone; not recorded.
// Figures: NVIDIA H200, geometric means, bench/results/kernels: sweep bf16 1.72x against
//   vllm+inductor, 1.23x to 2.15x at tokens 1 to 64 (moe_block-cuda_tuned.json.xz).
// Digest: e70c9d4c653416415dafd913df33992dff7409cea62cb1809c0c66eca1a22324

// Op: moe_block: h = residual + input; x = rmsnorm(h) * weight; logits = router(x); total = h + sum
//   over the top_k experts of softmax gate * down(clamped swiglu(gate_up(x))); output = its rmsnorm.
// Arguments: input[T: tokens, hidden], residual[T: tokens, hidden], weight[W: hidden],
//   router_weight[T: experts, hidden], router_bias[T: biased * experts], gate_up_weights[U:
//   experts, inner / 2, hidden * 2], gate_up_scales[U: experts, (inner * 2 + 255) // 256 * 8,
//   hidden], gate_up_bias[B: experts, inner * 2], down_weights[U: experts, hidden / 4, inner * 2],
//   down_scales[U: experts, (hidden + 255) // 256 * 8, inner], down_bias[B: experts, hidden],
//   next_weight[W: hidden], logits[T: tokens, experts], chosen[I: tokens, top_k], total[T: tokens,
//   hidden], output[T: tokens, hidden], alpha, limit, epsilon; T: bfloat16 or float32; W: T or
//   float32; U: uint8; B: float32; I: int32
// Writes: logits, chosen, total, output
// Needs: compute capability 9.0; fast for bfloat16, hidden = inner = 2880, experts at most 32 and
//   16-byte alignment; the rest plain FMA kernels; graph-safe.
// Idea: norm and router, then one persistent kernel: FP4 tiles of both matrices have one format and
//   go through one ring of bulk copies, which runs ahead over the grid barrier between them; decoded
//   in the registers of mma, 15 warps split k, one loads and finishes (the user's two matmuls).

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <climits>
#include <cstddef>
#include <cstdint>

namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kDepth = 2880;  // hidden and inner of the fast variant
constexpr int kWorkers = 15;
constexpr int kSteps = 3;  // 64s of k of a worker
constexpr int kStages = 8;
constexpr int kPitch = 2 * kDepth;      // bytes of a row of weights
constexpr int kStage = 9 * kDepth + 64;  // weights, scale row, bias
constexpr int kTiles0 = kDepth / 8;      // tiles of 16 columns: gate and up
constexpr int kTiles1 = kDepth / 16;     // down
constexpr int kMaxPasses = 96;
constexpr int kPieces = kDepth / 8;  // of 16 bytes in a bfloat16 row
static_assert(kDepth == 64 * kSteps * kWorkers && kStage % 128 == 0, "layout of a stage");
static_assert(kTiles0 % 16 <= 8 && kTiles1 % 16 <= 8, "the last tiles have the first half of a scale row");

constexpr int kMaxTokens = 64;
constexpr int kMaxHidden = 16384;
constexpr int kPart = 4096;  // of inner, in the plain variant

__device__ __align__(128) float g_x[kMaxTokens * kMaxHidden];
__device__ __align__(128) float g_a[kMaxTokens * 8 * kPart];
__device__ __align__(128) float g_y[kMaxTokens * 8 * kMaxHidden];
__device__ float g_gates[kMaxTokens * 8];
__device__ __align__(128) __nv_bfloat16 f_x[kMaxTokens * kDepth];
__device__ __align__(128) __nv_bfloat16 f_a[kMaxTokens * 8 * kDepth];
__device__ __align__(128) unsigned g_counters[64];  // the first two lie 128 bytes apart

struct Params {
  const void* input;
  const void* residual;
  const void* weight;
  const void* router;
  const void* router_bias;
  const uint8_t* weights0;
  const uint8_t* scales0;
  const float* bias0;
  const uint8_t* weights1;
  const uint8_t* scales1;
  const float* bias1;
  const void* next_weight;
  void* logits;
  int* chosen;
  void* total;
  void* output;
  int64_t scale_pitch0, scale_expert0, scale_pitch1, scale_expert1;
  int tokens, hidden, inner, experts, top_k;
  int biased, gain_float, blocks, guess;
  float alpha, limit, epsilon;
};

// ---------------------------------------------------------------- small helpers

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
  uint32_t ready;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(ready)
        : "r"(bar), "r"(parity)
        : "memory");
  } while (ready == 0);
}

__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(bar)
      : "memory");
}

__device__ __forceinline__ void bulk_prefetch(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ uint4 load_shared4(uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(a)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared(uint32_t a) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared4(uint32_t a, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

// from L2: what other blocks wrote
__device__ __forceinline__ uint4 load_global4(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ float2 load_global2(const float* p) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}

// every lane's stores before are seen by whoever sees the count
__device__ __forceinline__ void grid_arrive(unsigned* counter, int lane) {
  __syncwarp();
  if (lane == 0) {
    __threadfence();
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
  }
}

__device__ __forceinline__ void grid_wait(const unsigned* counter, unsigned target) {
  unsigned v;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  } while (v < target);
}

__device__ __forceinline__ float low_half(uint32_t a) { return __uint_as_float(a << 16); }
__device__ __forceinline__ float high_half(uint32_t a) { return __uint_as_float(a & 0xFFFF0000u); }

__device__ __forceinline__ void unpack8(const uint4 v, float (&f)[8]) {
  f[0] = low_half(v.x);
  f[1] = high_half(v.x);
  f[2] = low_half(v.y);
  f[3] = high_half(v.y);
  f[4] = low_half(v.z);
  f[5] = high_half(v.z);
  f[6] = low_half(v.w);
  f[7] = high_half(v.w);
}

__device__ __forceinline__ uint32_t pack2(float low, float high) {
  return uint32_t(__bfloat16_as_ushort(__float2bfloat16_rn(low))) |
         (uint32_t(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16);
}

__device__ __forceinline__ float as_float(float v) { return v; }
__device__ __forceinline__ float as_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ void put(float* p, float v) { *p = v; }
__device__ __forceinline__ void put(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }

__device__ __forceinline__ float gain_at(const void* p, int i, int is_float) {
  return is_float ? static_cast<const float*>(p)[i]
                  : __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(kAll, v, d);
  return v;
}

template <int WARPS>
__device__ __forceinline__ float block_sum(float v, float* red) {
  v = warp_sum(v);
  if ((threadIdx.x & 31) == 0) red[threadIdx.x >> 5] = v;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += red[w];
  return sum;
}

__device__ __forceinline__ void find_share(int units, int blocks, int block, int& begin, int& end) {
  const int share = units / blocks;
  const int rest = units - share * blocks;
  begin = block * share + min(block, rest);
  end = begin + share + (block < rest ? 1 : 0);
}

// tiles that share a scale row follow each other
__device__ __forceinline__ int tile_at(int q, int tiles) {
  return (q | 15) < tiles ? (q & ~15) + (q & 1) * 8 + ((q & 15) >> 1) : q;
}

// larger is better, as the contract orders logits
__device__ __forceinline__ int order_of(int bits) { return bits < 0 ? bits ^ 0x7FFFFFFF : bits; }

// ---------------------------------------------------------------- FP4 and mma

__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The eight numbers of a word as bf16, each times 2^-126; a[i] is register i of the A fragment.
__device__ __forceinline__ void extract(uint32_t w, uint32_t (&a)[4]) {
  constexpr uint32_t kMask = 0x81C081C0u;
  a[0] = w & kMask;
  a[1] = (w << 3) & kMask;
  a[2] = (w << 6) & kMask;
  // bits 11, 10 (exponent) move down by 3, bit 13 (mantissa) by 7; no two of the products meet
  const uint32_t m = (w & 0x2C002C00u) * 17u;
  a[3] = ((m >> 7) & 0x01C001C0u) | ((w << 1) & 0x80008000u);
}

// One 64 of k for 16 columns. Not WIDE: all scales are below 128, one multiply by 2^(scale - 1).
template <bool WIDE, int NT, int CH>
__device__ __forceinline__ void step(const uint4 packed, const uint32_t scale,
                                     const uint32_t (&b)[NT][8], float (&acc)[CH * NT][4]) {
  constexpr uint32_t kOffset = WIDE ? 0u : 0x3F003F00u;
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  const uint32_t f[4] = {__byte_perm(scale, 0u, 0x4040u) * 128u + kOffset,
                         __byte_perm(scale, 0u, 0x4141u) * 128u + kOffset,
                         __byte_perm(scale, 0u, 0x4242u) * 128u + kOffset,
                         __byte_perm(scale, 0u, 0x4343u) * 128u + kOffset};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t a[4];
    extract(words[j], a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (WIDE) a[i] = mul2(a[i], 0x7E807E80u);
      a[i] = mul2(a[i], f[(j >> 1) * 2 + (i & 1)]);
    }
#pragma unroll
    for (int i = 0; i < NT; ++i) {
      mma(acc[(j & (CH - 1)) * NT + i], a, b[i][2 * j], b[i][2 * j + 1]);
    }
  }
}

// lane t of four holds words 0 to 3 of piece t; after it, word t of pieces 0 to 3
__device__ __forceinline__ void transpose4(uint32_t& v0, uint32_t& v1, uint32_t& v2, uint32_t& v3,
                                           int t) {
  const bool odd = (t & 1) != 0;
  const uint32_t r0 = __shfl_xor_sync(kAll, odd ? v0 : v1, 1);
  const uint32_t r1 = __shfl_xor_sync(kAll, odd ? v2 : v3, 1);
  if (odd) {
    v0 = r0;
    v2 = r1;
  } else {
    v1 = r0;
    v3 = r1;
  }
  const bool high = (t & 2) != 0;
  const uint32_t r2 = __shfl_xor_sync(kAll, high ? v0 : v2, 2);
  const uint32_t r3 = __shfl_xor_sync(kAll, high ? v1 : v3, 2);
  if (high) {
    v0 = r2;
    v1 = r3;
  } else {
    v2 = r2;
    v3 = r3;
  }
}

__device__ __forceinline__ float activate_fast(float gate, float up, float alpha, float limit) {
  gate = fminf(gate, limit);
  up = fmaxf(-limit, fminf(up, limit));
  const float bottom = 1.0f + __expf(-alpha * gate);
  float inverse;
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(bottom));
  return gate * inverse * (up + 1.0f);
}

// ---------------------------------------------------------------- fast: norm and router

__global__ void __launch_bounds__(256) head_kernel(const Params p) {
  __shared__ __align__(16) float xs[kDepth];
  __shared__ float red[8];
  const int tid = int(threadIdx.x), lane = tid & 31, warp = tid >> 5;
  const int token = int(blockIdx.x);
  const int e = int(blockIdx.y) * 8 + warp;
  const bool live = e < p.experts;
  cudaTriggerProgrammaticLaunchCompletion();

  // weights alone before the wait: this warp's row of the router, and the gains
  uint4 w[12];
  const uint4* const row = static_cast<const uint4*>(p.router) + size_t(live ? e : 0) * kPieces;
#pragma unroll
  for (int i = 0; i < 12; ++i) {
    const int at = lane + 32 * i;
    w[i] = make_uint4(0u, 0u, 0u, 0u);
    if (live && at < kPieces) w[i] = __ldg(row + at);
  }
  float gain[2][8];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int at = tid + 256 * j;
    if (at < kPieces) {
      if (p.gain_float) {
        const float4 a = static_cast<const float4*>(p.weight)[2 * at];
        const float4 b = static_cast<const float4*>(p.weight)[2 * at + 1];
        gain[j][0] = a.x, gain[j][1] = a.y, gain[j][2] = a.z, gain[j][3] = a.w;
        gain[j][4] = b.x, gain[j][5] = b.y, gain[j][6] = b.z, gain[j][7] = b.w;
      } else {
        unpack8(static_cast<const uint4*>(p.weight)[at], gain[j]);
      }
    }
  }
  float bias = 0.0f;
  if (p.biased && live) bias = as_float(static_cast<const __nv_bfloat16*>(p.router_bias)[e]);
  cudaGridDependencySynchronize();

  if (blockIdx.x == 0 && blockIdx.y == 0 && tid < 2) g_counters[tid * 32] = 0u;
  float h[2][8];
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int at = tid + 256 * j;
    if (at < kPieces) {
      float a[8], b[8];
      unpack8(static_cast<const uint4*>(p.input)[token * kPieces + at], a);
      unpack8(static_cast<const uint4*>(p.residual)[token * kPieces + at], b);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        h[j][c] = a[c] + b[c];
        sum = fmaf(h[j][c], h[j][c], sum);
      }
    }
  }
  sum = block_sum<8>(sum, red);

  if (p.guess && tid < 4) {
    // memory idles from here: the first tiles of each block to come, if each expert has one pass
    const int mine = int(blockIdx.y * gridDim.x + blockIdx.x);
    for (int block = mine; block < p.blocks; block += int(gridDim.x * gridDim.y)) {
      int begin, end;
      find_share(p.experts * kTiles0, p.blocks, block, begin, end);
      const int unit = begin + tid;
      if (unit < end) {
        const int expert = unit / kTiles0;
        const int tile = tile_at(unit - expert * kTiles0, kTiles0);
        bulk_prefetch(p.weights0 + size_t(expert) * (kDepth * kDepth) + size_t(tile) * (8 * kDepth),
                      8 * kDepth);
        bulk_prefetch(p.scales0 + expert * p.scale_expert0 +
                          ((tile >> 4) * 8 + (tile & 7)) * p.scale_pitch0,
                      kDepth);
      }
    }
  }

  const float scale = rsqrtf(sum * (1.0f / kDepth) + p.epsilon);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int at = tid + 256 * j;
    if (at < kPieces) {
      float x[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        x[c] = h[j][c] * scale * gain[j][c];
        xs[at * 8 + c] = x[c];
      }
      if (blockIdx.y == 0) {
        reinterpret_cast<uint4*>(f_x)[token * kPieces + at] =
            make_uint4(pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7]));
      }
    }
  }
  __syncthreads();
  float acc = 0.0f;
#pragma unroll
  for (int i = 0; i < 12; ++i) {
    const int at = lane + 32 * i;
    if (at < kPieces) {
      float v[8];
      unpack8(w[i], v);
      const float4 a = reinterpret_cast<const float4*>(xs)[2 * at];
      const float4 b = reinterpret_cast<const float4*>(xs)[2 * at + 1];
      acc = fmaf(v[0], a.x, fmaf(v[1], a.y, fmaf(v[2], a.z, fmaf(v[3], a.w, acc))));
      acc = fmaf(v[4], b.x, fmaf(v[5], b.y, fmaf(v[6], b.z, fmaf(v[7], b.w, acc))));
    }
  }
  acc = warp_sum(acc) + bias;
  if (live && lane == 0) put(static_cast<__nv_bfloat16*>(p.logits) + token * p.experts + e, acc);
}

// ---------------------------------------------------------------- fast: the experts and the end

struct Plan {
  int4 passes[kMaxPasses];          // expert, first of its rows, rows
  uint32_t masks[kMaxTokens];       // experts of each token
  uint32_t takers[32][2];           // tokens of each expert
  float gates[kMaxTokens * 8];      // of the tokens that this block ends
  uint16_t rows[kMaxTokens * 8];    // 8 * token + choice, by expert
  int count;                        // passes
};

// By the whole block: the routing, from the written logits.
template <int WARPS, int ROWS>
__device__ __forceinline__ void make_plan(const Params& p, Plan& plan, int warp, int lane) {
  constexpr int kEach = kMaxTokens / WARPS;
  const bool exists = lane < p.experts;
  const uint32_t below = (1u << lane) - 1u;
  uint32_t bits[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int token = warp + i * WARPS;
    bits[i] = 0u;
    if (exists && token < p.tokens) {
      bits[i] = uint32_t(static_cast<const uint16_t*>(p.logits)[token * p.experts + lane]) << 16;
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int token = warp + i * WARPS;
    if (token >= p.tokens) break;
    const int key = order_of(int(bits[i]));
    bool open = exists;
    uint32_t mask = 0u;
    for (int k = 0; k < p.top_k; ++k) {
      const int best = __reduce_max_sync(kAll, open ? key : INT_MIN);
      const uint32_t who = __ballot_sync(kAll, open && key == best);
      const uint32_t pick = who & (0u - who);
      mask |= pick;
      if ((pick >> lane) & 1u) open = false;
    }
    if (lane == 0) plan.masks[token] = mask;
    if (token % p.blocks == int(blockIdx.x)) {
      const bool mine = ((mask >> lane) & 1u) != 0u;
      const int choice = __popc(mask & below);
      const float value = __uint_as_float(bits[i]);
      float top = mine ? value : __uint_as_float(0xFF800000u);
#pragma unroll
      for (int d = 16; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(kAll, top, d));
      const float share = mine ? expf(value - top) : 0.0f;
      const float sum = warp_sum(share);
      if (mine) {
        plan.gates[token * 8 + choice] = share / sum;
        p.chosen[token * p.top_k + choice] = lane;
      }
    }
  }
  __syncthreads();
  const uint32_t mask0 = lane < p.tokens ? plan.masks[lane] : 0u;
  const uint32_t mask1 = lane + 32 < p.tokens ? plan.masks[lane + 32] : 0u;
  for (int e = warp; e < 32; e += WARPS) {
    const uint32_t low = __ballot_sync(kAll, ((mask0 >> e) & 1u) != 0u);
    const uint32_t high = __ballot_sync(kAll, ((mask1 >> e) & 1u) != 0u);
    if (lane == 0) {
      plan.takers[e][0] = low;
      plan.takers[e][1] = high;
    }
  }
  __syncthreads();
  // lane is an expert: passes (upper half) and rows (lower half), summed over the experts before
  const uint32_t low = plan.takers[lane][0], high = plan.takers[lane][1];
  const int count = __popc(low) + __popc(high);
  const int passes = (count + ROWS - 1) / ROWS;
  const int own = (passes << 16) | count;
  int sums = own;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int other = __shfl_up_sync(kAll, sums, d);
    if (lane >= d) sums += other;
  }
  const int before = sums - own;
  if (warp == 0) {
    for (int i = 0; i < passes; ++i) {
      plan.passes[(before >> 16) + i] =
          make_int4(lane, (before & 0xFFFF) + i * ROWS, min(ROWS, count - i * ROWS), 0);
    }
    if (lane == 31) plan.count = sums >> 16;
  }
  for (int e = warp; e < 32; e += WARPS) {
    const uint32_t first = __shfl_sync(kAll, low, e);
    const uint32_t second = __shfl_sync(kAll, high, e);
    const int at = __shfl_sync(kAll, before, e) & 0xFFFF;
    const uint32_t lower = (1u << e) - 1u;
    if ((first >> lane) & 1u) {
      plan.rows[at + __popc(first & below)] = uint16_t(lane * 8 + __popc(mask0 & lower));
    }
    if ((second >> lane) & 1u) {
      plan.rows[at + __popc(first) + __popc(second & below)] =
          uint16_t((lane + 32) * 8 + __popc(mask1 & lower));
    }
  }
  __syncthreads();
}

// What a half loads: its units of phase 0 (gate and up), then those of phase 1 (down).
struct Producer {
  int phase, unit, end, unit1, end1;
};

// By the whole warp: loads the next tile, if there is one, into the stage at `to`.
template <int HALVES>
__device__ __forceinline__ void issue(const Params& p, const Plan& plan, Producer& next,
                                      uint32_t to, uint32_t bar, int lane) {
  if (next.unit >= next.end) {
    if (next.phase == 1) return;
    next.phase = 1;
    next.unit = next.unit1;
    next.end = next.end1;
    if (next.unit >= next.end) return;
  }
  if (lane == 0) {
    const uint8_t* weights;
    const uint8_t* scales;
    const float* bias;
    // the stage may have been written by plain stores; now the copy engine writes it
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (next.phase == 0) {
      const int pass = next.unit / kTiles0;
      const int tile = tile_at(next.unit - pass * kTiles0, kTiles0);
      const int e = plan.passes[pass].x;
      weights = p.weights0 + size_t(e) * (kDepth * kDepth) + size_t(tile) * (8 * kDepth);
      scales = p.scales0 + e * p.scale_expert0 + ((tile >> 4) * 8 + (tile & 7)) * p.scale_pitch0;
      bias = p.bias0 + e * (2 * kDepth) + tile * 16;
    } else {
      const int pass = next.unit / kTiles1;
      const int tile = tile_at(next.unit - pass * kTiles1, kTiles1);
      const int e = plan.passes[pass].x;
      weights = p.weights1 + size_t(e) * (kDepth * kDepth / 2) + size_t(tile) * (8 * kDepth);
      scales = p.scales1 + e * p.scale_expert1 + ((tile >> 4) * 8 + (tile & 7)) * p.scale_pitch1;
      bias = p.bias1 + e * kDepth + tile * 16;
    }
    barrier_expect(bar, uint32_t(kStage));
    bulk_load(to, weights, 8 * kDepth, bar);
    bulk_load(to + 8 * kDepth, scales, kDepth, bar);
    bulk_load(to + 9 * kDepth, bias, 64u, bar);
  }
  __syncwarp();
  next.unit += HALVES;
}

// A worker's slice of k, for the half's tiles of one pass.
template <int HALVES, int NT>
__device__ __forceinline__ void work(const Plan& plan, int phase, int first, int last, int& u,
                                     uint32_t ring, uint32_t loaded, uint32_t summed, int worker,
                                     int lane, int& stage, uint32_t& parity) {
  constexpr int kRing = kStages / HALVES;
  constexpr int CH = HALVES == 1 && NT == 1 ? 2 : 1;  // chains of sums
  const int tiles = phase ? kTiles1 : kTiles0;
  const int g = lane >> 2, t = lane & 3;
  const int chunk = worker * kSteps;

  uint32_t b[kSteps][NT][8];  // B fragments of all rows
  {
    const int4 info = plan.passes[first / tiles];
#pragma unroll
    for (int i = 0; i < NT; ++i) {
      const int r = i * 8 + g;
      const bool live = r < info.z;
      const int code = live ? int(plan.rows[info.y + r]) : 0;
      const __nv_bfloat16* const from =
          (phase ? f_a + code * kDepth : f_x + (code >> 3) * kDepth) + chunk * 64 + t * 8;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint4 low = make_uint4(0u, 0u, 0u, 0u), high = make_uint4(0u, 0u, 0u, 0u);
        if (live) {
          low = load_global4(from + k * 64);
          high = load_global4(from + k * 64 + 32);
        }
        b[k][i][0] = low.x;
        b[k][i][1] = low.y;
        b[k][i][2] = low.z;
        b[k][i][3] = low.w;
        b[k][i][4] = high.x;
        b[k][i][5] = high.y;
        b[k][i][6] = high.z;
        b[k][i][7] = high.w;
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < NT; ++i) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        transpose4(b[k][i][0], b[k][i][1], b[k][i][2], b[k][i][3], t);
        transpose4(b[k][i][4], b[k][i][5], b[k][i][6], b[k][i][7], t);
      }
    }
  }

  const uint32_t lane_weights = ring + (lane >> 3) * kPitch + (lane & 7) * 16 + chunk * 128;
  const uint32_t lane_scales = ring + 8 * kDepth + g * 4 + chunk * 64;
  for (; u < last; u += HALVES) {
    const int q = u - first;
    const uint32_t at = lane_weights + stage * kStage;
    const uint32_t at_scales = lane_scales + stage * kStage + ((q | 15) < tiles ? (q & 1) * 32 : 0);
    barrier_wait(loaded + 8 * stage, parity);
    __syncwarp();

    uint32_t scale[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) scale[k] = load_shared(at_scales + k * 64);
    uint4 packed0 = load_shared4(at);
    const uint4 packed1 = load_shared4(at + 128);
    float acc[CH * NT][4];
#pragma unroll
    for (int i = 0; i < CH * NT; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[i][c] = 0.0f;
    }
    const bool wide = __any_sync(kAll, ((scale[0] | scale[1] | scale[2]) & 0x80808080u) != 0u);
    if (__builtin_expect(!wide, 1)) {
      step<false, NT, CH>(packed0, scale[0], b[0], acc);
      packed0 = load_shared4(at + 256);
      step<false, NT, CH>(packed1, scale[1], b[1], acc);
      step<false, NT, CH>(packed0, scale[2], b[2], acc);
    } else {
      step<true, NT, CH>(packed0, scale[0], b[0], acc);
      packed0 = load_shared4(at + 256);
      step<true, NT, CH>(packed1, scale[1], b[1], acc);
      step<true, NT, CH>(packed0, scale[2], b[2], acc);
    }
    if (CH == 2) {
#pragma unroll
      for (int i = 0; i < NT; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[i][c] += acc[(CH - 1) * NT + i][c];
      }
    }
    // over the very bytes that this lane read its weights from
#pragma unroll
    for (int i = 0; i < NT; ++i) {
      store_shared4(at + i * 128, acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(summed + 8 * stage);
    if (++stage == kRing) {
      stage = 0;
      parity ^= 1u;
    }
  }
}

// The last warp of a half: adds the workers' sums, refills the stage, writes the results.
template <int HALVES, int NT>
__device__ __forceinline__ void finish(const Params& p, const Plan& plan, Producer& next, int phase,
                                       int first, int last, int& u, uint32_t ring, uint32_t loaded,
                                       uint32_t summed, int lane, int& stage, uint32_t& parity) {
  constexpr int kRing = kStages / HALVES;
  const int tiles = phase ? kTiles1 : kTiles0;
  const int g = lane >> 2, t = lane & 3;
  const bool odd = (g & 1) != 0;
  const int4 info = plan.passes[first / tiles];
  int code[NT][2];  // -1: no such row
#pragma unroll
  for (int i = 0; i < NT; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int r = i * 8 + 2 * t + c;
      code[i][c] = r < info.z ? int(plan.rows[info.y + r]) : -1;
    }
  }

  for (; u < last; u += HALVES) {
    const uint32_t base = ring + stage * kStage;
    const int tile = tile_at(u - first, tiles);
    barrier_wait(loaded + 8 * stage, parity);
    barrier_wait(summed + 8 * stage, parity);
    __syncwarp();
    const float bias0 = __uint_as_float(load_shared(base + 9 * kDepth + g * 4));
    const float bias1 = __uint_as_float(load_shared(base + 9 * kDepth + g * 4 + 32));
    float c[NT][4];
#pragma unroll
    for (int i = 0; i < NT; ++i) {
      c[i][0] = c[i][1] = bias0;
      c[i][2] = c[i][3] = bias1;
    }
    const uint32_t sums = base + (lane >> 3) * kPitch + (lane & 7) * 16;
#pragma unroll
    for (int w = 0; w < kWorkers; ++w) {
#pragma unroll
      for (int i = 0; i < NT; ++i) {
        const uint4 v = load_shared4(sums + (w * kSteps + i) * 128);
        c[i][0] += __uint_as_float(v.x);
        c[i][1] += __uint_as_float(v.y);
        c[i][2] += __uint_as_float(v.z);
        c[i][3] += __uint_as_float(v.w);
      }
    }
    __syncwarp();
    issue<HALVES>(p, plan, next, base, loaded + 8 * stage, lane);

    if (phase == 0) {
      // an even g holds gates, the next g their ups: even lanes take column g, odd ones g + 8
      __nv_bfloat16* const out = f_a + tile * 8 + (g >> 1) + (odd ? 4 : 0);
#pragma unroll
      for (int i = 0; i < NT; ++i) {
        const float r0 = __shfl_xor_sync(kAll, odd ? c[i][0] : c[i][2], 4);
        const float r1 = __shfl_xor_sync(kAll, odd ? c[i][1] : c[i][3], 4);
        const float y0 = activate_fast(odd ? r0 : c[i][0], odd ? c[i][2] : r0, p.alpha, p.limit);
        const float y1 = activate_fast(odd ? r1 : c[i][1], odd ? c[i][3] : r1, p.alpha, p.limit);
        if (code[i][0] >= 0) out[code[i][0] * kDepth] = __float2bfloat16_rn(y0);
        if (code[i][1] >= 0) out[code[i][1] * kDepth] = __float2bfloat16_rn(y1);
      }
    } else {
      float* const out = g_y + tile * 16 + g;
#pragma unroll
      for (int i = 0; i < NT; ++i) {
        if (code[i][0] >= 0) {
          out[code[i][0] * kDepth] = c[i][0];
          out[code[i][0] * kDepth + 8] = c[i][2];
        }
        if (code[i][1] >= 0) {
          out[code[i][1] * kDepth] = c[i][1];
          out[code[i][1] * kDepth + 8] = c[i][3];
        }
      }
    }
    __syncwarp();
    if (++stage == kRing) {
      stage = 0;
      parity ^= 1u;
    }
  }
}

template <int HALVES, int NTMAX>
__global__ void __launch_bounds__(512 * HALVES, 1) body_kernel(const Params p) {
  constexpr int kThreads = 512 * HALVES;
  constexpr int kRing = kStages / HALVES;
  extern __shared__ __align__(128) uint8_t dynamic_smem[];
  __shared__ Plan plan;
  __shared__ __align__(8) uint64_t barrier_words[2 * kStages + 2];
  __shared__ float red[kThreads / 32];

  const int tid = int(threadIdx.x), lane = tid & 31;
  const int warp = __shfl_sync(kAll, tid >> 5, 0);
  const bool finisher = warp >= kWorkers * HALVES;
  const int half = finisher ? warp - kWorkers * HALVES : warp / kWorkers;
  const int block = int(blockIdx.x);
  const uint32_t ring =
      ((shared_address(dynamic_smem) + 127u) & ~127u) + uint32_t(half * (kRing * kStage));
  const uint32_t loaded = shared_address(barrier_words) + uint32_t(half * (2 * kRing * 8));
  const uint32_t summed = loaded + kRing * 8;
  const uint32_t ready = shared_address(barrier_words) + uint32_t((2 * kStages + half) * 8);
  const unsigned arrivals = unsigned(p.blocks * HALVES);

  if (finisher && lane == 0) {
    for (int s = 0; s < kRing; ++s) {
      barrier_init(loaded + 8 * s, 1u);
      barrier_init(summed + 8 * s, kWorkers);
    }
    barrier_init(ready, 1u);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  cudaGridDependencySynchronize();
  make_plan<kThreads / 32, 8 * NTMAX>(p, plan, warp, lane);

  int stage = 0;
  uint32_t parity = 0u;
  Producer next = {0, 0, 0, 0, 0};
  if (finisher) {
    find_share(plan.count * kTiles0, p.blocks, block, next.unit, next.end);
    find_share(plan.count * kTiles1, p.blocks, p.blocks - 1 - block, next.unit1, next.end1);
    next.unit += half;
    next.unit1 += HALVES - 1 - half;
    for (int s = 0; s < kRing; ++s) {
      issue<HALVES>(p, plan, next, ring + s * kStage, loaded + 8 * s, lane);
    }
    for (int phase = 0; phase < 2; ++phase) {
      const int tiles = phase ? kTiles1 : kTiles0;
      int u, end;
      find_share(plan.count * tiles, p.blocks, phase ? p.blocks - 1 - block : block, u, end);
      u += phase ? HALVES - 1 - half : half;
      while (u < end) {
        const int first = u / tiles * tiles;
        const int last = min(end, first + tiles);
        const int rows = plan.passes[u / tiles].z;
        if constexpr (NTMAX == 1) {
          finish<HALVES, 1>(p, plan, next, phase, first, last, u, ring, loaded, summed, lane, stage,
                            parity);
        } else {
          if (rows <= 8) {
            finish<HALVES, 1>(p, plan, next, phase, first, last, u, ring, loaded, summed, lane,
                              stage, parity);
          } else if (rows <= 16) {
            finish<HALVES, 2>(p, plan, next, phase, first, last, u, ring, loaded, summed, lane,
                              stage, parity);
          } else {
            finish<HALVES, 3>(p, plan, next, phase, first, last, u, ring, loaded, summed, lane,
                              stage, parity);
          }
        }
      }
      grid_arrive(&g_counters[phase * 32], lane);
      if (phase == 0) {
        // all activations are there; the ring is full of the next weights
        if (lane == 0) {
          grid_wait(&g_counters[0], arrivals);
          barrier_arrive(ready);
        }
        __syncwarp();
      }
    }
  } else {
    const int worker = warp - half * kWorkers;
    for (int phase = 0; phase < 2; ++phase) {
      const int tiles = phase ? kTiles1 : kTiles0;
      int u, end;
      find_share(plan.count * tiles, p.blocks, phase ? p.blocks - 1 - block : block, u, end);
      u += phase ? HALVES - 1 - half : half;
      if (phase == 1) {
        barrier_wait(ready, 0u);
        __syncwarp();
      }
      while (u < end) {
        const int first = u / tiles * tiles;
        const int last = min(end, first + tiles);
        const int rows = plan.passes[u / tiles].z;
        if constexpr (NTMAX == 1) {
          work<HALVES, 1>(plan, phase, first, last, u, ring, loaded, summed, worker, lane, stage,
                          parity);
        } else {
          if (rows <= 8) {
            work<HALVES, 1>(plan, phase, first, last, u, ring, loaded, summed, worker, lane, stage,
                            parity);
          } else if (rows <= 16) {
            work<HALVES, 2>(plan, phase, first, last, u, ring, loaded, summed, worker, lane, stage,
                            parity);
          } else {
            work<HALVES, 3>(plan, phase, first, last, u, ring, loaded, summed, worker, lane, stage,
                            parity);
          }
        }
      }
    }
  }

  // the end: one block for each token
  constexpr int kPairs = kDepth / 2;
  constexpr int kEach = (kPairs + kThreads - 1) / kThreads;
  for (int token = block; token < p.tokens; token += p.blocks) {
    float2 h[kEach], gain[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int at = tid + j * kThreads;
      h[j] = gain[j] = make_float2(0.0f, 0.0f);
      if (at < kPairs) {
        const uint32_t a = static_cast<const uint32_t*>(p.input)[token * kPairs + at];
        const uint32_t b = static_cast<const uint32_t*>(p.residual)[token * kPairs + at];
        h[j] = make_float2(low_half(a) + low_half(b), high_half(a) + high_half(b));
        gain[j] = make_float2(gain_at(p.next_weight, 2 * at, p.gain_float),
                              gain_at(p.next_weight, 2 * at + 1, p.gain_float));
      }
    }
    if (tid == 0) grid_wait(&g_counters[32], arrivals);
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int at = tid + j * kThreads;
      if (at < kPairs) {
        float2 v = make_float2(0.0f, 0.0f);
#pragma unroll 4
        for (int s = 0; s < p.top_k; ++s) {
          const float2 y = load_global2(g_y + (token * 8 + s) * kDepth + 2 * at);
          const float gate = plan.gates[token * 8 + s];
          v.x = fmaf(gate, y.x, v.x);
          v.y = fmaf(gate, y.y, v.y);
        }
        h[j].x += v.x;
        h[j].y += v.y;
        sum = fmaf(h[j].x, h[j].x, fmaf(h[j].y, h[j].y, sum));
      }
    }
    sum = block_sum<kThreads / 32>(sum, red);
    const float scale = rsqrtf(sum * (1.0f / kDepth) + p.epsilon);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int at = tid + j * kThreads;
      if (at < kPairs) {
        static_cast<uint32_t*>(p.total)[token * kPairs + at] = pack2(h[j].x, h[j].y);
        static_cast<uint32_t*>(p.output)[token * kPairs + at] =
            pack2(h[j].x * scale * gain[j].x, h[j].y * scale * gain[j].y);
      }
    }
    __syncthreads();
  }
}

// ---------------------------------------------------------------- any size, plain float32

template <typename T>
__global__ void __launch_bounds__(256) plain_head_kernel(const Params p) {
  __shared__ float red[8];
  const int token = int(blockIdx.x), tid = int(threadIdx.x), lane = tid & 31;
  const T* const input = static_cast<const T*>(p.input) + size_t(token) * p.hidden;
  const T* const residual = static_cast<const T*>(p.residual) + size_t(token) * p.hidden;
  T* const logits = static_cast<T*>(p.logits) + size_t(token) * p.experts;
  float* const x = g_x + size_t(token) * kMaxHidden;
  float sum = 0.0f;
  for (int i = tid; i < p.hidden; i += 256) {
    const float h = as_float(residual[i]) + as_float(input[i]);
    x[i] = h;
    sum = fmaf(h, h, sum);
  }
  sum = block_sum<8>(sum, red);
  const float scale = rsqrtf(sum / float(p.hidden) + p.epsilon);
  for (int i = tid; i < p.hidden; i += 256) x[i] = x[i] * scale * gain_at(p.weight, i, p.gain_float);
  __syncthreads();
  for (int e = tid >> 5; e < p.experts; e += 8) {
    const T* const row = static_cast<const T*>(p.router) + size_t(e) * p.hidden;
    float acc = 0.0f;
    for (int i = lane; i < p.hidden; i += 32) acc = fmaf(x[i], as_float(row[i]), acc);
    acc = warp_sum(acc);
    if (p.biased) acc += as_float(static_cast<const T*>(p.router_bias)[e]);
    if (lane == 0) put(logits + e, acc);
  }
  __syncthreads();
  if (tid != 0) return;
  auto key = [&](int e) {
    return static_cast<long long>(order_of(__float_as_int(as_float(logits[e])))) * 256 + (255 - e);
  };
  long long bound = LLONG_MAX;  // at last the key of the worst that is chosen
  for (int k = 0; k < p.top_k; ++k) {
    long long best = LLONG_MIN;
    for (int e = 0; e < p.experts; ++e) {
      const long long mine = key(e);
      if (mine < bound && mine > best) best = mine;
    }
    bound = best;
  }
  float value[8];
  float top = __uint_as_float(0xFF800000u);
  int count = 0;
  for (int e = 0; e < p.experts; ++e) {
    if (key(e) >= bound && count < p.top_k) {
      p.chosen[token * p.top_k + count] = e;
      value[count] = as_float(logits[e]);
      top = fmaxf(top, value[count]);
      ++count;
    }
  }
  float all = 0.0f;
  for (int s = 0; s < count; ++s) all += expf(value[s] - top);
  for (int s = 0; s < count; ++s) g_gates[token * 8 + s] = expf(value[s] - top) / all;
}

// A warp takes 16 columns of an expert and eight rows at a time; `count` of inner from `from`.
template <bool DOWN>
__global__ void __launch_bounds__(128) plain_product_kernel(const Params p, int from, int count) {
  __shared__ int list[kMaxTokens];
  __shared__ int size;
  const int e = int(blockIdx.y), lane = int(threadIdx.x) & 31;
  if (threadIdx.x == 0) size = 0;
  __syncthreads();
  for (int i = int(threadIdx.x); i < p.tokens * p.top_k; i += 128) {
    if (p.chosen[i] == e) list[atomicAdd(&size, 1)] = i / p.top_k * 8 + i % p.top_k;
  }
  __syncthreads();
  const int rows = size;
  const int tile = (DOWN ? 0 : from / 8) + int(blockIdx.x) * 4 + int(threadIdx.x >> 5);
  if (rows == 0 || tile >= (DOWN ? p.hidden / 16 : (from + count) / 8)) return;
  const int g = lane >> 2, t = lane & 3;
  const bool odd = (g & 1) != 0;
  const int depth = DOWN ? p.inner : p.hidden;
  const int chunk0 = DOWN ? from / 64 : 0;
  const int chunks = (DOWN ? count : p.hidden) / 64;
  const size_t matrix = size_t(p.hidden) * p.inner / (DOWN ? 2 : 1);  // bytes of an expert
  const uint8_t* const w = (DOWN ? p.weights1 : p.weights0) + e * matrix +
                           size_t(tile) * 8 * depth + size_t(lane >> 3) * 2 * depth +
                           (lane & 7) * 16 + size_t(chunk0) * 128;
  const uint8_t* const s =
      (DOWN ? p.scales1 : p.scales0) + e * (DOWN ? p.scale_expert1 : p.scale_expert0) +
      ((tile >> 4) * 8 + (tile & 7)) * (DOWN ? p.scale_pitch1 : p.scale_pitch0) +
      ((tile >> 3) & 1) * 32 + g * 4 + size_t(chunk0) * 64;
  const float* const bias =
      (DOWN ? p.bias1 + size_t(e) * p.hidden : p.bias0 + size_t(e) * p.inner * 2) + size_t(tile) * 16;

  for (int row = 0; row < rows; row += 8) {
    const float* x[8];
    float acc[8][2];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int code = list[min(row + r, rows - 1)];
      x[r] = (DOWN ? g_a + size_t(code) * kPart : g_x + size_t(code >> 3) * kMaxHidden) + 2 * t;
      acc[r][0] = acc[r][1] = 0.0f;
    }
    for (int c = 0; c < chunks; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
        extract(reinterpret_cast<const uint32_t*>(w + size_t(c) * 128)[j], a);
        const uint8_t* const pair = s + size_t(c) * 64 + (j >> 1) * 2;
        const float s0 = __uint_as_float(uint32_t(pair[0]) << 23);
        const float s1 = __uint_as_float(uint32_t(pair[1]) << 23);
        float v0[4] = {low_half(a[0]), high_half(a[0]), low_half(a[2]), high_half(a[2])};
        float v1[4] = {low_half(a[1]), high_half(a[1]), low_half(a[3]), high_half(a[3])};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v0[i] = (v0[i] * 0x1p126f) * s0;
          v1[i] = (v1[i] * 0x1p126f) * s1;
        }
#pragma unroll
        for (int r = 0; r < 8; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float value = x[r][c * 64 + j * 16 + (i >> 1) * 8 + (i & 1)];
            acc[r][0] = fmaf(value, v0[i], acc[r][0]);
            acc[r][1] = fmaf(value, v1[i], acc[r][1]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      float h0 = acc[r][0], h1 = acc[r][1];
      h0 += __shfl_xor_sync(kAll, h0, 1);
      h1 += __shfl_xor_sync(kAll, h1, 1);
      h0 += __shfl_xor_sync(kAll, h0, 2);
      h1 += __shfl_xor_sync(kAll, h1, 2);
      if (!DOWN || from == 0) {
        h0 += bias[g];
        h1 += bias[g + 8];
      }
      const float other = __shfl_xor_sync(kAll, odd ? h0 : h1, 4);
      if ((r & 3) != t || row + r >= rows) continue;
      const int code = list[row + r];
      if (DOWN) {
        float* const y = g_y + size_t(code) * kMaxHidden + tile * 16 + g;
        y[0] = from == 0 ? h0 : y[0] + h0;
        y[8] = from == 0 ? h1 : y[8] + h1;
      } else {
        const float gate = fminf(odd ? other : h0, p.limit);
        const float up = fmaxf(-p.limit, fminf(odd ? h1 : other, p.limit));
        g_a[size_t(code) * kPart + (tile * 8 - from) + (g >> 1) + (odd ? 4 : 0)] =
            gate / (1.0f + expf(-p.alpha * gate)) * (up + 1.0f);
      }
    }
    __syncwarp();
  }
}

template <typename T>
__global__ void __launch_bounds__(256) plain_tail_kernel(const Params p) {
  __shared__ float red[8];
  const int token = int(blockIdx.x), tid = int(threadIdx.x);
  const size_t base = size_t(token) * p.hidden;
  float* const kept = g_x + size_t(token) * kMaxHidden;
  float sum = 0.0f;
  for (int i = tid; i < p.hidden; i += 256) {
    float v = 0.0f;
    for (int s = 0; s < p.top_k; ++s) {
      v = fmaf(g_gates[token * 8 + s], g_y[size_t(token * 8 + s) * kMaxHidden + i], v);
    }
    v += as_float(static_cast<const T*>(p.residual)[base + i]) +
         as_float(static_cast<const T*>(p.input)[base + i]);
    kept[i] = v;
    sum = fmaf(v, v, sum);
    put(static_cast<T*>(p.total) + base + i, v);
  }
  sum = block_sum<8>(sum, red);
  const float scale = rsqrtf(sum / float(p.hidden) + p.epsilon);
  for (int i = tid; i < p.hidden; i += 256) {
    put(static_cast<T*>(p.output) + base + i,
        kept[i] * scale * gain_at(p.next_weight, i, p.gain_float));
  }
}

// ---------------------------------------------------------------- host

void check(cudaError_t status) {
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}

bool aligned(const void* p) { return (reinterpret_cast<uintptr_t>(p) & 15u) == 0; }

void launch_dependent(void (*kernel)(const Params), dim3 grid, int threads, size_t bytes,
                      cudaStream_t stream, const Params& p) {
  if (bytes > 0) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
  }
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, p));
}

template <typename T>
void launch_plain(const Params& p, cudaStream_t stream) {
  plain_head_kernel<T><<<unsigned(p.tokens), 256, 0, stream>>>(p);
  check(cudaGetLastError());
  for (int from = 0; from < p.inner; from += kPart) {
    const int count = p.inner - from < kPart ? p.inner - from : kPart;
    const dim3 up(unsigned((count / 8 + 3) / 4), unsigned(p.experts));
    plain_product_kernel<false><<<up, 128, 0, stream>>>(p, from, count);
    check(cudaGetLastError());
    const dim3 down(unsigned((p.hidden / 16 + 3) / 4), unsigned(p.experts));
    plain_product_kernel<true><<<down, 128, 0, stream>>>(p, from, count);
    check(cudaGetLastError());
  }
  plain_tail_kernel<T><<<unsigned(p.tokens), 256, 0, stream>>>(p);
  check(cudaGetLastError());
}

}  // namespace

void moe_block(tvm::ffi::TensorView input, tvm::ffi::TensorView residual,
               tvm::ffi::TensorView weight, tvm::ffi::TensorView router_weight,
               tvm::ffi::TensorView router_bias, tvm::ffi::TensorView gate_up_weights,
               tvm::ffi::TensorView gate_up_scales, tvm::ffi::TensorView gate_up_bias,
               tvm::ffi::TensorView down_weights, tvm::ffi::TensorView down_scales,
               tvm::ffi::TensorView down_bias, tvm::ffi::TensorView next_weight,
               tvm::ffi::TensorView logits, tvm::ffi::TensorView chosen, tvm::ffi::TensorView total,
               tvm::ffi::TensorView output, double alpha, double limit, double epsilon) {
  const DLDataType type = input.dtype(), gain = weight.dtype();
  const bool is_float = type.code == kDLFloat && type.bits == 32;
  const bool is_bfloat = type.code == kDLBfloat && type.bits == 16;
  const bool gain_float = gain.code == kDLFloat && gain.bits == 32;
  const bool gain_bfloat = gain.code == kDLBfloat && gain.bits == 16;
  if (!(is_float || is_bfloat) || !(gain_float || gain_bfloat)) {
    TVM_FFI_THROW(TypeError) << "moe_block: unsupported dtype";
  }
  const DLDataType bias_type = gate_up_bias.dtype(), index_type = chosen.dtype();
  if (bias_type.code != kDLFloat || bias_type.bits != 32 || index_type.code != kDLInt ||
      index_type.bits != 32 || gate_up_weights.dtype().bits != 8) {
    TVM_FFI_THROW(TypeError) << "moe_block: unsupported dtype of bias, index or weights";
  }
  Params p = {};
  p.input = input.data_ptr();
  p.residual = residual.data_ptr();
  p.weight = weight.data_ptr();
  p.router = router_weight.data_ptr();
  p.router_bias = router_bias.data_ptr();
  p.weights0 = static_cast<const uint8_t*>(gate_up_weights.data_ptr());
  p.scales0 = static_cast<const uint8_t*>(gate_up_scales.data_ptr());
  p.bias0 = static_cast<const float*>(gate_up_bias.data_ptr());
  p.weights1 = static_cast<const uint8_t*>(down_weights.data_ptr());
  p.scales1 = static_cast<const uint8_t*>(down_scales.data_ptr());
  p.bias1 = static_cast<const float*>(down_bias.data_ptr());
  p.next_weight = next_weight.data_ptr();
  p.logits = logits.data_ptr();
  p.chosen = static_cast<int*>(chosen.data_ptr());
  p.total = total.data_ptr();
  p.output = output.data_ptr();
  p.scale_expert0 = gate_up_scales.stride(0);
  p.scale_pitch0 = gate_up_scales.stride(1);
  p.scale_expert1 = down_scales.stride(0);
  p.scale_pitch1 = down_scales.stride(1);
  p.tokens = int(input.size(0));
  p.hidden = int(input.size(1));
  p.inner = int(gate_up_bias.size(1) / 2);
  p.experts = int(router_weight.size(0));
  p.top_k = int(chosen.size(1));
  p.biased = router_bias.numel() > 0 ? 1 : 0;
  p.gain_float = gain_float ? 1 : 0;
  p.alpha = float(alpha);
  p.limit = float(limit);
  p.epsilon = float(epsilon);
  if (p.tokens == 0 || p.experts == 0) return;
  if (p.tokens > kMaxTokens || p.hidden > kMaxHidden || p.hidden % 64 != 0 || p.inner % 64 != 0 ||
      p.experts > 128 || p.top_k < 1 || p.top_k > 8 || p.top_k > p.experts) {
    TVM_FFI_THROW(TypeError) << "moe_block: unsupported shape";
  }

  const DLDevice device = input.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  int shared_limit = 0;
  check(cudaDeviceGetAttribute(&p.blocks, cudaDevAttrMultiProcessorCount, device.device_id));
  check(cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                               device.device_id));
  const size_t bytes = size_t(kStages * kStage + 128);
  const bool fast =
      is_bfloat && p.hidden == kDepth && p.inner == kDepth && p.experts <= 32 &&
      bytes + 12288 <= size_t(shared_limit) && aligned(p.input) && aligned(p.residual) &&
      aligned(p.weight) && aligned(p.router) && aligned(p.weights0) && aligned(p.scales0) &&
      aligned(p.bias0) && aligned(p.weights1) && aligned(p.scales1) && aligned(p.bias1) &&
      aligned(p.next_weight) && aligned(p.total) && aligned(p.output) && p.scale_pitch0 % 16 == 0 &&
      p.scale_pitch1 % 16 == 0 && p.scale_expert0 % 16 == 0 && p.scale_expert1 % 16 == 0;
  if (!fast) {
    if (is_float) {
      launch_plain<float>(p, stream);
    } else {
      launch_plain<__nv_bfloat16>(p, stream);
    }
    return;
  }
  const int rows = p.tokens * p.top_k;
  p.guess = rows >= 2 * p.experts ? 1 : 0;
  const dim3 heads(unsigned(p.tokens), unsigned((p.experts + 7) / 8));
  launch_dependent(head_kernel, heads, 256, 0, stream, p);
  const dim3 grid(unsigned(p.blocks));
  if (rows <= 5 * p.experts) {
    launch_dependent(body_kernel<2, 1>, grid, 1024, bytes, stream, p);
  } else {
    launch_dependent(body_kernel<1, 3>, grid, 512, bytes, stream, p);
  }
}
