// Op: moe_matmul_swiglu: with h = bias[e] + W[e] x[token of row], W in MXFP4 as Hopper's layout has
//   it: output[row] = gate / (1 + exp(-alpha * gate)) * (up + 1), gate and up the even and odd of
//   h, clamped by limit; float32, rounded once.
// Arguments: x[T: tokens, hidden], weights[U: experts, inner / 2, hidden * 2], scales[U: experts,
//   (inner * 2 + 255) // 256 * 8, hidden], bias[B: experts, inner * 2], gather_index[I: tokens *
//   top_k], histogram[I: experts], token_offsets[I: experts + 1], tile_map[I: min(tokens * top_k,
//   experts - 1 + (tokens * top_k - experts + 16) // 16)], output[T: tokens * top_k, inner], alpha,
//   limit; T: bfloat16 or float32; U: uint8; B: float32; I: int32
// Writes: output
// Needs: compute capability 9.0 or later; fast for bfloat16, hidden at most 2880 (2880 compiled
//   in); the rest plain FMA; graph-safe.
// Idea: FP4 weights come by bulk copies into a ring and are decoded in the registers of mma; 15
//   warps split k, one loads and finishes. Few rows: two halves of a block, each with its own ring
//   and loading warp, never wait for each other.
// Made by: hand, from candidate 1 of the agent loop's recording
//   bench/results/loop/moe_matmul_swiglu-cuda-3, whose scales had no pitch.
// Figures: NVIDIA H200, geometric means, bench/results/kernels: sweep bf16 1.33x against vllm,
//   1.12x to 1.45x at tokens 1 to 128 (moe_matmul_swiglu-cuda_tuned.json.xz).
// Digest: 2564e8b7e07e661c2bacc1c1519e27eebdb3ed76287be10087b374fd32014595

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace {

constexpr int kComputeWarps = 15;
constexpr int kThreads = 32 * (kComputeWarps + 1);
constexpr int kSteps = 3;                            // 64s of k that a warp takes at most
constexpr int kHidden = 64 * kSteps * kComputeWarps;  // 2880, the hidden size of the exact variant
constexpr int kRows = 24;                            // rows of an expert in one pass
constexpr int kMaxStages = 8;
constexpr int kMaxSegments = 64;
constexpr int kPartPitch = kSteps * kComputeWarps * 128;  // 5760, also the row pitch of the weights
constexpr int kPartBytes = 4 * kPartPitch;
constexpr int kExactStage = 9 * kHidden + 64;  // weights, scale row, bias: 25984 = 203 * 128
static_assert(kHidden == 2880 && kExactStage % 128 == 0, "layout of a stage");

struct Params {
  const __nv_bfloat16* x;
  const uint8_t* weights;
  const uint8_t* scales;
  const float* bias;
  const int* gather;
  const int* histogram;
  __nv_bfloat16* output;
  int tokens, hidden, inner, experts, top_k, rows;
  int stages, stage_bytes, part_offset;
  int64_t scale_pitch, scale_expert;  // bytes from row to row, from expert to expert
  float alpha, limit;
};

// part of the tiles of one pass (up to 24 rows of one expert)
struct Segment {
  int expert, row, rows, begin, end;
};

struct Producer {
  int segment, q, left;
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

// The order in which a pass walks over its tiles of 16 columns: the two tiles of a 256 that share
// a scale row follow each other.
__device__ __forceinline__ int tile_at(int q, int tiles) {
  return (q | 15) < tiles ? (q & ~15) + (q & 1) * 8 + ((q & 15) >> 1) : q;
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

// One 64 of k for 16 columns: packed are four A fragments, scale the four scales of this lane.
// Not WIDE: all scales are below 128, and one multiply by 2^(scale - 1) does it.
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
  const uint32_t r0 = __shfl_xor_sync(0xffffffffu, odd ? v0 : v1, 1);
  const uint32_t r1 = __shfl_xor_sync(0xffffffffu, odd ? v2 : v3, 1);
  if (odd) {
    v0 = r0;
    v2 = r1;
  } else {
    v1 = r0;
    v3 = r1;
  }
  const bool high = (t & 2) != 0;
  const uint32_t r2 = __shfl_xor_sync(0xffffffffu, high ? v0 : v2, 2);
  const uint32_t r3 = __shfl_xor_sync(0xffffffffu, high ? v1 : v3, 2);
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

__device__ __forceinline__ float activate_exact(float gate, float up, float alpha, float limit) {
  gate = fminf(gate, limit);
  up = fmaxf(-limit, fminf(up, limit));
  return gate / (1.0f + expf(-alpha * gate)) * (up + 1.0f);
}

// ---------------------------------------------------------------- the tensor core kernel

// Starts the loads of the next tile into the stage at `to` and moves on. By the whole warp.
__device__ __forceinline__ void issue(const Params& p, const Segment* segments, Producer& next,
                                      uint32_t to, uint32_t bar, int hidden, int tiles, int lane) {
  const int expert = segments[next.segment].expert;
  const int tile = tile_at(next.q, tiles);
  if (lane == 0) {
    barrier_expect(bar, uint32_t(9 * hidden + 64));
    bulk_load(to, p.weights + size_t(expert) * p.inner * hidden + size_t(tile) * 8 * hidden,
              uint32_t(8 * hidden), bar);
    bulk_load(to + 8 * hidden,
              p.scales + expert * p.scale_expert + ((tile >> 4) * 8 + (tile & 7)) * p.scale_pitch,
              uint32_t(hidden), bar);
    bulk_load(to + 9 * hidden, p.bias + size_t(expert) * p.inner * 2 + size_t(tile) * 16, 64u, bar);
  }
  --next.left;
  ++next.q;
  if (next.q == segments[next.segment].end) {
    ++next.segment;
    if (next.left > 0) next.q = segments[next.segment].begin;
  }
}

template <bool EXACT, int NT>
__device__ __forceinline__ void compute_segment(const Params& p, const Segment& seg, uint32_t smem,
                                                uint32_t bars, int warp, int lane, int& stage,
                                                uint32_t& parity) {
  constexpr int CH = NT == 1 ? 2 : 1;  // two chains of sums where one would be too slow
  const int hidden = EXACT ? kHidden : p.hidden;
  const int stage_bytes = EXACT ? kExactStage : p.stage_bytes;
  const int stages = EXACT ? kMaxStages : p.stages;
  const int part = EXACT ? 0 : p.part_offset;
  const int tiles = p.inner >> 3;
  const int steps = hidden >> 6;
  const int first = warp * kSteps;
  const int g = lane >> 2;
  const int t = lane & 3;

  // this warp's slice of k of all rows, as B fragments
  uint32_t b[kSteps][NT][8];
#pragma unroll
  for (int i = 0; i < NT; ++i) {
    const int r = i * 8 + g;
    const bool live = r < seg.rows;
    const int token = live ? p.gather[seg.row + r] / p.top_k : 0;
    const uint4* from = reinterpret_cast<const uint4*>(p.x + size_t(token) * hidden) + first * 8 + t;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint4 u = make_uint4(0u, 0u, 0u, 0u);
      uint4 v = make_uint4(0u, 0u, 0u, 0u);
      if (live && (EXACT || first + k < steps)) {
        u = __ldg(from + k * 8);
        v = __ldg(from + k * 8 + 4);
      }
      b[k][i][0] = u.x;
      b[k][i][1] = u.y;
      b[k][i][2] = u.z;
      b[k][i][3] = u.w;
      b[k][i][4] = v.x;
      b[k][i][5] = v.y;
      b[k][i][6] = v.z;
      b[k][i][7] = v.w;
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

  const uint32_t lane_weights = (lane >> 3) * (2 * hidden) + (lane & 7) * 16 + first * 128;
  const uint32_t lane_scales = 8 * hidden + g * 4 + first * 64;
  // in the exact variant these are the very bytes that this lane read its weights from
  const uint32_t lane_part = part + (lane >> 3) * kPartPitch + (lane & 7) * 16 + first * 128;

  for (int q = seg.begin; q < seg.end; ++q) {
    const uint32_t base = smem + stage * stage_bytes;
    barrier_wait(bars + 8 * stage, parity);
    __syncwarp();

    const uint32_t at_scales = base + lane_scales + ((q | 15) < tiles ? (q & 1) * 32 : 0);
    uint32_t scale[kSteps];
    uint4 packed[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      scale[k] = 0u;
      if (EXACT || first + k < steps) scale[k] = load_shared(at_scales + k * 64);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      packed[k] = make_uint4(0u, 0u, 0u, 0u);
      if (EXACT || first + k < steps) packed[k] = load_shared4(base + lane_weights + k * 128);
    }

    float acc[CH * NT][4];
#pragma unroll
    for (int i = 0; i < CH * NT; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[i][c] = 0.0f;
    }

    const bool wide = __any_sync(0xffffffffu, ((scale[0] | scale[1] | scale[2]) & 0x80808080u) != 0u);
    if (!wide) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (EXACT || first + k < steps) step<false, NT, CH>(packed[k], scale[k], b[k], acc);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (EXACT || first + k < steps) step<true, NT, CH>(packed[k], scale[k], b[k], acc);
      }
    }
    if (CH == 2) {
#pragma unroll
      for (int i = 0; i < NT; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[i][c] += acc[(CH - 1) * NT + i][c];
      }
    }

#pragma unroll
    for (int i = 0; i < NT; ++i) {
      store_shared4(base + lane_part + i * 128, acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(bars + 8 * (kMaxStages + stage));
    if (++stage == stages) {
      stage = 0;
      parity ^= 1u;
    }
  }
}

// The last warp: adds the warps' sums, refills the stage, then activation and stores.
template <bool EXACT, int NT>
__device__ __forceinline__ void finish_segment(const Params& p, const Segment& seg,
                                               const Segment* segments, Producer& next,
                                               uint32_t smem, uint32_t bars, int lane, int& stage,
                                               uint32_t& parity) {
  const int hidden = EXACT ? kHidden : p.hidden;
  const int stage_bytes = EXACT ? kExactStage : p.stage_bytes;
  const int stages = EXACT ? kMaxStages : p.stages;
  const int part = EXACT ? 0 : p.part_offset;
  const int tiles = p.inner >> 3;
  const int g = lane >> 2;
  const int t = lane & 3;
  const bool odd = (g & 1) != 0;
  const uint32_t lane_part = part + (lane >> 3) * kPartPitch + (lane & 7) * 16;

  for (int q = seg.begin; q < seg.end; ++q) {
    const uint32_t base = smem + stage * stage_bytes;
    const int tile = tile_at(q, tiles);
    barrier_wait(bars + 8 * stage, parity);
    barrier_wait(bars + 8 * (kMaxStages + stage), parity);
    __syncwarp();

    const float bias0 = __uint_as_float(load_shared(base + 9 * hidden + g * 4));
    const float bias1 = __uint_as_float(load_shared(base + 9 * hidden + g * 4 + 32));
    float c[NT][4];
#pragma unroll
    for (int i = 0; i < NT; ++i) {
      c[i][0] = c[i][1] = bias0;
      c[i][2] = c[i][3] = bias1;
    }
#pragma unroll
    for (int w = 0; w < kComputeWarps; ++w) {
#pragma unroll
      for (int i = 0; i < NT; ++i) {
        const uint4 v = load_shared4(base + lane_part + (w * kSteps + i) * 128);
        c[i][0] += __uint_as_float(v.x);
        c[i][1] += __uint_as_float(v.y);
        c[i][2] += __uint_as_float(v.z);
        c[i][3] += __uint_as_float(v.w);
      }
    }

    __syncwarp();
    if (next.left > 0) {
      // the stage was written by plain stores; now the copy engine writes it
      if (lane == 0) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      issue(p, segments, next, base, bars + 8 * stage, hidden, tiles, lane);
    }

    // an even g holds gates, the next g their ups: even lanes take column g, odd ones g + 8
    const int column = tile * 8 + (g >> 1) + (odd ? 4 : 0);
    __nv_bfloat16* out = p.output + size_t(seg.row) * p.inner + column;
#pragma unroll
    for (int i = 0; i < NT; ++i) {
      const float r0 = __shfl_xor_sync(0xffffffffu, odd ? c[i][0] : c[i][2], 4);
      const float r1 = __shfl_xor_sync(0xffffffffu, odd ? c[i][1] : c[i][3], 4);
      const float gate0 = odd ? r0 : c[i][0];
      const float gate1 = odd ? r1 : c[i][1];
      const float up0 = odd ? c[i][2] : r0;
      const float up1 = odd ? c[i][3] : r1;
      const float y0 = activate_fast(gate0, up0, p.alpha, p.limit);
      const float y1 = activate_fast(gate1, up1, p.alpha, p.limit);
      const int r = i * 8 + 2 * t;
      if (r < seg.rows) out[size_t(r) * p.inner] = __float2bfloat16_rn(y0);
      if (r + 1 < seg.rows) out[size_t(r + 1) * p.inner] = __float2bfloat16_rn(y1);
    }

    if (++stage == stages) {
      stage = 0;
      parity ^= 1u;
    }
  }
}

template <bool EXACT>
__global__ void __launch_bounds__(kThreads, 1) moe_mma_kernel(const Params p) {
  extern __shared__ __align__(128) uint8_t dynamic_smem[];
  __shared__ __align__(8) uint64_t barrier_words[2 * kMaxStages];
  __shared__ Segment segments[kMaxSegments];
  __shared__ int segment_count;

  const int hidden = EXACT ? kHidden : p.hidden;
  const int stage_bytes = EXACT ? kExactStage : p.stage_bytes;
  const int stages = EXACT ? kMaxStages : p.stages;
  const int tiles = p.inner >> 3;
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x >> 5), 0);
  const uint32_t smem = (shared_address(dynamic_smem) + 127u) & ~127u;
  const uint32_t bars = shared_address(barrier_words);
  Producer next = {0, 0, 0};

  if (warp == kComputeWarps) {
    if (lane == 0) {
      for (int s = 0; s < kMaxStages; ++s) {
        barrier_init(bars + 8 * s, 1u);                              // loaded
        barrier_init(bars + 8 * (kMaxStages + s), kComputeWarps);    // summed
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
  }
  cudaGridDependencySynchronize();

  if (warp == kComputeWarps) {
    // which part of which passes is this block's
    int passes = 0;
    for (int from = 0; from < p.experts; from += 32) {
      const int h = from + lane < p.experts ? p.histogram[from + lane] : 0;
      passes += __reduce_add_sync(0xffffffffu, (h + kRows - 1) / kRows);
    }
    const int block = blockIdx.x;
    const int units = passes * tiles;
    const int share = units / int(gridDim.x);
    const int rest = units - share * int(gridDim.x);
    const int begin = block * share + min(block, rest);
    const int end = begin + share + (block < rest ? 1 : 0);
    const int pass0 = begin / tiles;
    const int pass1 = end > begin ? (end - 1) / tiles : pass0 - 1;
    int rows_before = 0;
    int passes_before = 0;
    for (int from = 0; from < p.experts; from += 32) {
      const int h = from + lane < p.experts ? p.histogram[from + lane] : 0;
      const int np = (h + kRows - 1) / kRows;
      int row_sum = h;
      int pass_sum = np;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other_rows = __shfl_up_sync(0xffffffffu, row_sum, d);
        const int other_passes = __shfl_up_sync(0xffffffffu, pass_sum, d);
        if (lane >= d) {
          row_sum += other_rows;
          pass_sum += other_passes;
        }
      }
      const int first_row = rows_before + row_sum - h;
      const int first_pass = passes_before + pass_sum - np;
      const int last_pass = min(first_pass + np - 1, pass1);
      for (int pass = max(first_pass, pass0); pass <= last_pass; ++pass) {
        Segment& s = segments[pass - pass0];
        const int done = (pass - first_pass) * kRows;
        s.expert = from + lane;
        s.row = first_row + done;
        s.rows = min(kRows, h - done);
        s.begin = pass == pass0 ? begin - pass * tiles : 0;
        s.end = pass == pass1 ? end - pass * tiles : tiles;
      }
      __syncwarp();
      rows_before += __shfl_sync(0xffffffffu, row_sum, 31);
      passes_before += __shfl_sync(0xffffffffu, pass_sum, 31);
    }
    if (lane == 0) segment_count = pass1 - pass0 + 1;
    __syncwarp();
    next.left = end - begin;
    if (next.left > 0) {
      next.q = segments[0].begin;
      for (int s = 0; s < stages && next.left > 0; ++s) {
        issue(p, segments, next, smem + s * stage_bytes, bars + 8 * s, hidden, tiles, lane);
      }
    }
    __syncwarp();
  } else {
    // rows and activations are needed two steps later: bring them into L2 meanwhile
    const size_t me = size_t(blockIdx.x) * (32 * kComputeWarps) + threadIdx.x;
    const size_t jump = size_t(gridDim.x) * (32 * kComputeWarps) * 128;
    const size_t gather_bytes = size_t(p.rows) * sizeof(int);
    for (size_t i = me * 128; i < gather_bytes; i += jump) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(p.gather) + i));
    }
    const size_t x_bytes = size_t(p.tokens) * hidden * sizeof(__nv_bfloat16);
    for (size_t i = me * 128; i < x_bytes; i += jump) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(p.x) + i));
    }
  }
  __syncthreads();

  const int count = segment_count;
  int stage = 0;
  uint32_t parity = 0u;
  if (warp == kComputeWarps) {
    for (int s = 0; s < count; ++s) {
      const Segment seg = segments[s];
      if (seg.rows <= 8) {
        finish_segment<EXACT, 1>(p, seg, segments, next, smem, bars, lane, stage, parity);
      } else if (seg.rows <= 16) {
        finish_segment<EXACT, 2>(p, seg, segments, next, smem, bars, lane, stage, parity);
      } else {
        finish_segment<EXACT, 3>(p, seg, segments, next, smem, bars, lane, stage, parity);
      }
    }
  } else {
    for (int s = 0; s < count; ++s) {
      const Segment seg = segments[s];
      if (seg.rows <= 8) {
        compute_segment<EXACT, 1>(p, seg, smem, bars, warp, lane, stage, parity);
      } else if (seg.rows <= 16) {
        compute_segment<EXACT, 2>(p, seg, smem, bars, warp, lane, stage, parity);
      } else {
        compute_segment<EXACT, 3>(p, seg, smem, bars, warp, lane, stage, parity);
      }
    }
  }
}

// ---------------------------------------------------------------- few rows: two halves of a block
//
// A block has two halves, each of 15 computing warps and one that loads and finishes. A half takes
// every other tile of the block and has half of the stages; the halves never wait for each other.

constexpr int kPairThreads = 2 * kThreads;       // 1024: 64 registers a thread
constexpr int kPairStages = kMaxStages / 2;      // of a half
constexpr int kPairRows = 8;                     // rows of an expert in one pass
constexpr int kPairExperts = 32;
static_assert(kPairThreads == 1024, "the count of the named barrier below");

// the whole warp: expert and rows of a pass; sums are the inclusive sums of passes and rows
__device__ __forceinline__ void find_pass(int wanted, int h, int sums, int& expert, int& row,
                                          int& rows) {
  const int np = (h + kPairRows - 1) / kPairRows;
  const int first_pass = (sums >> 16) - np;
  const uint32_t found =
      __ballot_sync(0xffffffffu, wanted >= first_pass && wanted < first_pass + np);
  const int from = (__ffs(int(found)) - 1) & 31;
  const int done = (wanted - __shfl_sync(0xffffffffu, first_pass, from)) * kPairRows;
  expert = from;
  row = __shfl_sync(0xffffffffu, (sums & 0xFFFF) - h, from) + done;
  rows = min(kPairRows, __shfl_sync(0xffffffffu, h, from) - done);
}

// the whole warp: which tiles of all passes are the block's
__device__ __forceinline__ void find_share(int sums, int tiles, int& begin, int& end) {
  const int passes = __shfl_sync(0xffffffffu, sums, 31) >> 16;
  const int units = passes * tiles;
  const int share = units / int(gridDim.x);
  const int rest = units - share * int(gridDim.x);
  const int block = int(blockIdx.x);
  begin = block * share + min(block, rest);
  end = begin + share + (block < rest ? 1 : 0);
}

struct PairProducer {
  int unit;    // next tile to load, counted over all passes
  int first;   // first tile of its pass
  int last;    // end of its pass
  int expert;  // of its pass
};

__device__ __forceinline__ void issue_pair(const Params& p, PairProducer& next, int h, int sums,
                                           uint32_t to, uint32_t bar, int tiles, int lane) {
  if (next.unit >= next.last) {
    const int pass = next.unit / tiles;
    int row;
    int rows;
    find_pass(pass, h, sums, next.expert, row, rows);
    next.first = pass * tiles;
    next.last = next.first + tiles;
  }
  const int tile = tile_at(next.unit - next.first, tiles);
  if (lane == 0) {
    const size_t e = size_t(next.expert);
    barrier_expect(bar, uint32_t(9 * kHidden + 64));
    bulk_load(to, p.weights + e * p.inner * kHidden + size_t(tile) * (8 * kHidden),
              uint32_t(8 * kHidden), bar);
    bulk_load(to + 8 * kHidden,
              p.scales + next.expert * p.scale_expert +
                  ((tile >> 4) * 8 + (tile & 7)) * p.scale_pitch,
              uint32_t(kHidden), bar);
    bulk_load(to + 9 * kHidden, p.bias + e * p.inner * 2 + size_t(tile) * 16, 64u, bar);
  }
  __syncwarp();
  next.unit += 2;
}

__global__ void __launch_bounds__(kPairThreads, 1) moe_pair_kernel(const Params p) {
  extern __shared__ __align__(128) uint8_t dynamic_smem[];
  __shared__ __align__(8) uint64_t barrier_words[2 * kMaxStages];
  __shared__ int plan_rows[32];
  __shared__ int plan_sums[32];

  const int tiles = p.inner >> 3;
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x >> 5), 0);
  const bool finisher = warp >= 2 * kComputeWarps;
  const int half = finisher ? warp - 2 * kComputeWarps : (warp >= kComputeWarps ? 1 : 0);
  const int g = lane >> 2;
  const int t = lane & 3;
  const uint32_t ring = ((shared_address(dynamic_smem) + 127u) & ~127u) +
                        uint32_t(half * (kPairStages * kExactStage));
  // of each half: four of stages that were loaded, then four of stages that were summed
  const uint32_t loaded = shared_address(barrier_words) + uint32_t(half * (2 * kPairStages * 8));
  const uint32_t summed = loaded + kPairStages * 8;
  // where a lane's weights lie, and, of the first of them, later its sums
  const uint32_t lane_weights = (lane >> 3) * kPartPitch + (lane & 7) * 16;

  if (finisher) {
    if (lane == 0) {
      for (int s = 0; s < kPairStages; ++s) {
        barrier_init(loaded + 8 * s, 1u);
        barrier_init(summed + 8 * s, kComputeWarps);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
  }
  cudaGridDependencySynchronize();

  if (finisher) {
    const int h = lane < p.experts ? p.histogram[lane] : 0;
    int sums = (((h + kPairRows - 1) / kPairRows) << 16) | h;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sums, d);
      if (lane >= d) sums += other;
    }
    if (half == 0) {
      plan_rows[lane] = h;
      plan_sums[lane] = sums;
    }
    __syncwarp();
    // the computing warps wait here; the loading ones go on at once
    asm volatile("bar.arrive 1, 1024;" ::: "memory");

    int begin;
    int end;
    find_share(sums, tiles, begin, end);
    PairProducer next = {begin + half, 0, 0, 0};
    for (int s = 0; s < kPairStages && next.unit < end; ++s) {
      issue_pair(p, next, h, sums, ring + s * kExactStage, loaded + 8 * s, tiles, lane);
    }

    const bool odd = (g & 1) != 0;
    int stage = 0;
    uint32_t parity = 0u;
    int u = begin + half;
    while (u < end) {
      const int pass = u / tiles;
      const int first = pass * tiles;
      const int last = min(end, first + tiles);
      int expert;
      int row;
      int rows;
      find_pass(pass, h, sums, expert, row, rows);
      for (; u < last; u += 2) {
        const uint32_t base = ring + stage * kExactStage;
        const int tile = tile_at(u - first, tiles);
        barrier_wait(loaded + 8 * stage, parity);
        barrier_wait(summed + 8 * stage, parity);
        __syncwarp();

        const float bias0 = __uint_as_float(load_shared(base + 9 * kHidden + g * 4));
        const float bias1 = __uint_as_float(load_shared(base + 9 * kHidden + g * 4 + 32));
        float c[4] = {bias0, bias0, bias1, bias1};
#pragma unroll
        for (int w = 0; w < kComputeWarps; ++w) {
          const uint4 v = load_shared4(base + lane_weights + w * (kSteps * 128));
          c[0] += __uint_as_float(v.x);
          c[1] += __uint_as_float(v.y);
          c[2] += __uint_as_float(v.z);
          c[3] += __uint_as_float(v.w);
        }

        __syncwarp();
        if (next.unit < end) {
          // the stage was written by plain stores; now the copy engine writes it
          if (lane == 0) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          issue_pair(p, next, h, sums, base, loaded + 8 * stage, tiles, lane);
        }

        // an even g holds gates, the next g their ups: even lanes take column g, odd ones g + 8
        const int column = tile * 8 + (g >> 1) + (odd ? 4 : 0);
        __nv_bfloat16* out = p.output + size_t(row) * p.inner + column;
        const float r0 = __shfl_xor_sync(0xffffffffu, odd ? c[0] : c[2], 4);
        const float r1 = __shfl_xor_sync(0xffffffffu, odd ? c[1] : c[3], 4);
        const float gate0 = odd ? r0 : c[0];
        const float gate1 = odd ? r1 : c[1];
        const float up0 = odd ? c[2] : r0;
        const float up1 = odd ? c[3] : r1;
        const float y0 = activate_fast(gate0, up0, p.alpha, p.limit);
        const float y1 = activate_fast(gate1, up1, p.alpha, p.limit);
        const int r = 2 * t;
        if (r < rows) out[size_t(r) * p.inner] = __float2bfloat16_rn(y0);
        if (r + 1 < rows) out[size_t(r + 1) * p.inner] = __float2bfloat16_rn(y1);
        __syncwarp();

        if (++stage == kPairStages) {
          stage = 0;
          parity ^= 1u;
        }
      }
    }
    return;
  }

  {
    // rows and activations are needed after the plan: bring them into L2 meanwhile
    const size_t me = size_t(blockIdx.x) * (64 * kComputeWarps) + threadIdx.x;
    const size_t jump = size_t(gridDim.x) * (64 * kComputeWarps) * 128;
    const size_t gather_bytes = size_t(p.rows) * sizeof(int);
    for (size_t i = me * 128; i < gather_bytes; i += jump) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(p.gather) + i));
    }
    const size_t x_bytes = size_t(p.tokens) * kHidden * sizeof(__nv_bfloat16);
    for (size_t i = me * 128; i < x_bytes; i += jump) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(p.x) + i));
    }
  }
  __syncwarp();
  asm volatile("bar.sync 1, 1024;" ::: "memory");

  const int first_step = (warp - half * kComputeWarps) * kSteps;
  const uint32_t my_weights = lane_weights + first_step * 128;
  const uint32_t my_scales = 8 * kHidden + g * 4 + first_step * 64;
  int begin;
  int end;
  find_share(plan_sums[lane], tiles, begin, end);
  int stage = 0;
  uint32_t parity = 0u;
  int u = begin + half;
  while (u < end) {
    const int pass = u / tiles;
    const int first = pass * tiles;
    const int last = min(end, first + tiles);

    // this warp's slice of k of all rows, as B fragments
    uint32_t b[kSteps][1][8];
    {
      int expert;
      int row;
      int rows;
      find_pass(pass, plan_rows[lane], plan_sums[lane], expert, row, rows);
      const bool live = g < rows;
      const int token = live ? p.gather[row + g] / p.top_k : 0;
      const uint4* from =
          reinterpret_cast<const uint4*>(p.x + size_t(token) * kHidden) + first_step * 8 + t;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint4 low = make_uint4(0u, 0u, 0u, 0u);
        uint4 high = make_uint4(0u, 0u, 0u, 0u);
        if (live) {
          low = __ldg(from + k * 8);
          high = __ldg(from + k * 8 + 4);
        }
        b[k][0][0] = low.x;
        b[k][0][1] = low.y;
        b[k][0][2] = low.z;
        b[k][0][3] = low.w;
        b[k][0][4] = high.x;
        b[k][0][5] = high.y;
        b[k][0][6] = high.z;
        b[k][0][7] = high.w;
      }
      __syncwarp();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        transpose4(b[k][0][0], b[k][0][1], b[k][0][2], b[k][0][3], t);
        transpose4(b[k][0][4], b[k][0][5], b[k][0][6], b[k][0][7], t);
      }
    }

    for (; u < last; u += 2) {
      const int q = u - first;
      const uint32_t base = ring + stage * kExactStage;
      const uint32_t at = base + my_weights;
      const uint32_t at_scales = base + my_scales + ((q | 15) < tiles ? (q & 1) * 32 : 0);
      barrier_wait(loaded + 8 * stage, parity);
      __syncwarp();

      uint32_t scale[kSteps];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) scale[k] = load_shared(at_scales + k * 64);
      uint4 packed0 = load_shared4(at);
      const uint4 packed1 = load_shared4(at + 128);

      float acc[1][4] = {{0.0f, 0.0f, 0.0f, 0.0f}};
      const bool wide =
          __any_sync(0xffffffffu, ((scale[0] | scale[1] | scale[2]) & 0x80808080u) != 0u);
      if (__builtin_expect(!wide, 1)) {
        step<false, 1, 1>(packed0, scale[0], b[0], acc);
        packed0 = load_shared4(at + 256);
        step<false, 1, 1>(packed1, scale[1], b[1], acc);
        step<false, 1, 1>(packed0, scale[2], b[2], acc);
      } else {
        step<true, 1, 1>(packed0, scale[0], b[0], acc);
        packed0 = load_shared4(at + 256);
        step<true, 1, 1>(packed1, scale[1], b[1], acc);
        step<true, 1, 1>(packed0, scale[2], b[2], acc);
      }

      // over the very bytes that this lane read its first weights from
      store_shared4(at, acc[0][0], acc[0][1], acc[0][2], acc[0][3]);
      __syncwarp();
      if (lane == 0) barrier_arrive(summed + 8 * stage);
      if (++stage == kPairStages) {
        stage = 0;
        parity ^= 1u;
      }
    }
  }
}

// ---------------------------------------------------------------- plain float32 FMA, any size

__device__ __forceinline__ float low_half(uint32_t a) { return __uint_as_float(a << 16); }
__device__ __forceinline__ float high_half(uint32_t a) { return __uint_as_float(a & 0xFFFF0000u); }

// A warp takes 16 columns of an expert and eight rows at a time.
template <typename T>
__global__ void __launch_bounds__(128)
    moe_simple_kernel(const T* x, const uint8_t* weights, const uint8_t* scales, const float* bias,
                      const int* gather, const int* offsets, T* output, int hidden, int inner,
                      int experts, int top_k, int64_t scale_expert, int64_t scale_pitch,
                      float alpha, float limit) {
  const int tiles = inner >> 3;
  const int lane = threadIdx.x & 31;
  const int tile = blockIdx.x * 4 + (threadIdx.x >> 5);
  if (tile >= tiles) return;
  const int g = lane >> 2;
  const int t = lane & 3;
  const bool odd = (g & 1) != 0;
  const int steps = hidden >> 6;

  for (int e = blockIdx.y; e < experts; e += gridDim.y) {
    const int begin = offsets[e];
    const int end = offsets[e + 1];
    const uint32_t* w = reinterpret_cast<const uint32_t*>(
        weights + size_t(e) * inner * hidden + size_t(tile) * 8 * hidden +
        size_t(lane >> 3) * 2 * hidden + (lane & 7) * 16);
    const uint8_t* s = scales + e * scale_expert + ((tile >> 4) * 8 + (tile & 7)) * scale_pitch +
                       ((tile >> 3) & 1) * 32 + g * 4;
    const float bias0 = bias[size_t(e) * inner * 2 + tile * 16 + g];
    const float bias1 = bias[size_t(e) * inner * 2 + tile * 16 + g + 8];

    for (int row = begin; row < end; row += 8) {
      const T* from[8];
      float acc[8][2];
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        from[r] = x + size_t(gather[min(row + r, end - 1)] / top_k) * hidden + 2 * t;
        acc[r][0] = 0.0f;
        acc[r][1] = 0.0f;
      }
      for (int k64 = 0; k64 < steps; ++k64) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t a[4];
          extract(w[size_t(k64) * 32 + j], a);
          const size_t at = size_t(k64) * 64 + (j >> 1) * 2;
          const float s0 = __uint_as_float(uint32_t(s[at]) << 23);
          const float s1 = __uint_as_float(uint32_t(s[at + 1]) << 23);
          float v0[4] = {low_half(a[0]), high_half(a[0]), low_half(a[2]), high_half(a[2])};
          float v1[4] = {low_half(a[1]), high_half(a[1]), low_half(a[3]), high_half(a[3])};
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            v0[c] = (v0[c] * 0x1p126f) * s0;
            v1[c] = (v1[c] * 0x1p126f) * s1;
          }
          const size_t k = size_t(k64) * 64 + j * 16;
#pragma unroll
          for (int r = 0; r < 8; ++r) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              const float value = float(from[r][k + (c >> 1) * 8 + (c & 1)]);
              acc[r][0] = fmaf(value, v0[c], acc[r][0]);
              acc[r][1] = fmaf(value, v1[c], acc[r][1]);
            }
          }
        }
      }
      const int column = tile * 8 + (g >> 1) + (odd ? 4 : 0);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        float h0 = acc[r][0];
        float h1 = acc[r][1];
        h0 += __shfl_xor_sync(0xffffffffu, h0, 1);
        h1 += __shfl_xor_sync(0xffffffffu, h1, 1);
        h0 += __shfl_xor_sync(0xffffffffu, h0, 2);
        h1 += __shfl_xor_sync(0xffffffffu, h1, 2);
        h0 += bias0;
        h1 += bias1;
        const float other = __shfl_xor_sync(0xffffffffu, odd ? h0 : h1, 4);
        const float gate = odd ? other : h0;
        const float up = odd ? h1 : other;
        if ((r & 3) == t && row + r < end) {
          output[size_t(row + r) * inner + column] = T(activate_exact(gate, up, alpha, limit));
        }
      }
    }
  }
}

// ---------------------------------------------------------------- host

void check(cudaError_t status) {
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}

bool aligned(const void* p) { return (reinterpret_cast<uintptr_t>(p) & 15u) == 0; }

template <bool EXACT>
void launch_mma(const Params& params, int grid, size_t bytes, cudaStream_t stream) {
  check(cudaFuncSetAttribute(moe_mma_kernel<EXACT>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(bytes)));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(grid));
  config.blockDim = dim3(unsigned(kThreads));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, moe_mma_kernel<EXACT>, params));
}

void launch_pair(const Params& params, int grid, size_t bytes, cudaStream_t stream) {
  check(cudaFuncSetAttribute(moe_pair_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(bytes)));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(grid));
  config.blockDim = dim3(unsigned(kPairThreads));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, moe_pair_kernel, params));
}

template <typename T>
void launch_simple(tvm::ffi::TensorView x, tvm::ffi::TensorView weights,
                   tvm::ffi::TensorView scales, tvm::ffi::TensorView bias,
                   tvm::ffi::TensorView gather_index, tvm::ffi::TensorView token_offsets,
                   tvm::ffi::TensorView output, int experts, int top_k, float alpha, float limit,
                   cudaStream_t stream) {
  const int hidden = int(x.size(1));
  const int inner = int(output.size(1));
  const int tiles = inner / 8;
  const dim3 grid(unsigned((tiles + 3) / 4), unsigned(experts < 65535 ? experts : 65535));
  moe_simple_kernel<T><<<grid, 128, 0, stream>>>(
      static_cast<const T*>(x.data_ptr()), static_cast<const uint8_t*>(weights.data_ptr()),
      static_cast<const uint8_t*>(scales.data_ptr()), static_cast<const float*>(bias.data_ptr()),
      static_cast<const int*>(gather_index.data_ptr()),
      static_cast<const int*>(token_offsets.data_ptr()), static_cast<T*>(output.data_ptr()), hidden,
      inner, experts, top_k, scales.stride(0), scales.stride(1), alpha, limit);
  check(cudaGetLastError());
}

}  // namespace

void moe_matmul_swiglu(tvm::ffi::TensorView x, tvm::ffi::TensorView weights,
                       tvm::ffi::TensorView scales, tvm::ffi::TensorView bias,
                       tvm::ffi::TensorView gather_index, tvm::ffi::TensorView histogram,
                       tvm::ffi::TensorView token_offsets, tvm::ffi::TensorView tile_map,
                       tvm::ffi::TensorView output, double alpha, double limit) {
  (void)tile_map;
  const DLDataType type = output.dtype();
  const bool is_float = type.code == kDLFloat && type.bits == 32;
  const bool is_bfloat = type.code == kDLBfloat && type.bits == 16;
  if (!is_float && !is_bfloat) {
    TVM_FFI_THROW(TypeError) << "moe_matmul_swiglu: unsupported dtype";
  }
  const DLDataType x_type = x.dtype();
  if (x_type.code != type.code || x_type.bits != type.bits) {
    TVM_FFI_THROW(TypeError) << "moe_matmul_swiglu: x and output differ in dtype";
  }
  const DLDataType bias_type = bias.dtype();
  const DLDataType index_type = gather_index.dtype();
  const DLDataType weight_type = weights.dtype();
  if (bias_type.code != kDLFloat || bias_type.bits != 32 || index_type.code != kDLInt ||
      index_type.bits != 32 || weight_type.bits != 8) {
    TVM_FFI_THROW(TypeError) << "moe_matmul_swiglu: unsupported dtype of bias, index or weights";
  }

  const int64_t tokens = x.size(0);
  const int64_t hidden = x.size(1);
  const int64_t inner = output.size(1);
  const int64_t rows = gather_index.size(0);
  const int64_t experts = histogram.size(0);
  if (tokens == 0 || rows == 0 || experts == 0) return;
  const int64_t top_k = rows / tokens;
  const DLDevice device = output.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));

  if (is_float) {
    launch_simple<float>(x, weights, scales, bias, gather_index, token_offsets, output,
                         int(experts), int(top_k), float(alpha), float(limit), stream);
    return;
  }

  int processors = 0;
  int shared_limit = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device.device_id));
  check(cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                               device.device_id));
  const bool exact = hidden == kHidden;
  const int64_t loaded = 9 * hidden + 64;
  const int64_t part_offset = exact ? 0 : (loaded + 127) / 128 * 128;
  const int64_t stage_bytes = exact ? kExactStage : part_offset + kPartBytes;
  const int64_t room = int64_t(shared_limit) - 4096;  // barriers, segments, alignment
  int64_t stages = room / stage_bytes;
  if (stages > kMaxStages) stages = kMaxStages;
  int64_t passes = experts + rows / kRows;
  if (passes > rows) passes = rows;
  const bool fits = hidden <= kHidden && stages >= (exact ? kMaxStages : 1) &&
                    passes / processors + 4 <= kMaxSegments &&
                    passes * (inner / 8) < (int64_t(1) << 30) && aligned(x.data_ptr()) &&
                    aligned(weights.data_ptr()) && aligned(scales.data_ptr()) &&
                    scales.stride(1) % 16 == 0 && aligned(bias.data_ptr());
  if (!fits) {
    launch_simple<__nv_bfloat16>(x, weights, scales, bias, gather_index, token_offsets, output,
                                 int(experts), int(top_k), float(alpha), float(limit), stream);
    return;
  }

  Params params;
  params.x = static_cast<const __nv_bfloat16*>(x.data_ptr());
  params.weights = static_cast<const uint8_t*>(weights.data_ptr());
  params.scales = static_cast<const uint8_t*>(scales.data_ptr());
  params.bias = static_cast<const float*>(bias.data_ptr());
  params.gather = static_cast<const int*>(gather_index.data_ptr());
  params.histogram = static_cast<const int*>(histogram.data_ptr());
  params.output = static_cast<__nv_bfloat16*>(output.data_ptr());
  params.tokens = int(tokens);
  params.hidden = int(hidden);
  params.inner = int(inner);
  params.experts = int(experts);
  params.top_k = int(top_k);
  params.rows = int(rows);
  params.stages = int(stages);
  params.stage_bytes = int(stage_bytes);
  params.part_offset = int(part_offset);
  params.scale_pitch = scales.stride(1);
  params.scale_expert = scales.stride(0);
  params.alpha = float(alpha);
  params.limit = float(limit);
  const size_t bytes = size_t(stages * stage_bytes + 128);
  if (exact && experts <= kPairExperts && rows <= 5 * experts &&
      rows * (inner / 8) < (int64_t(1) << 30)) {
    launch_pair(params, processors, bytes, stream);
    return;
  }
  if (exact) {
    launch_mma<true>(params, processors, bytes, stream);
  } else {
    launch_mma<false>(params, processors, bytes, stream);
  }
}
