// Op: moe_matmul_down: output[row] = gate_scales[row] * (bias[e] + W[e] x[row]) for the expert e of
//   each row, W in MXFP4 as Hopper's layout has it; float32 sums, rounded once.
// Arguments: x[T: tokens * top_k, inner], weights[U: experts, hidden / 4, inner * 2], scales[U:
//   experts, (hidden + 255) // 256 * 8, inner], bias[B: experts, hidden], gate_scales[T: tokens *
//   top_k], row_map[I: tokens, top_k], histogram[I: experts], token_offsets[I: experts + 1],
//   tile_map[I: min(tokens * top_k, experts - 1 + (tokens * top_k - experts + 16) // 16)],
//   output[T: tokens * top_k, hidden]; T: bfloat16 or float32; U: uint8; B: float32; I: int32
// Writes: output
// Needs: compute capability 9.0 or later (mbarrier, bulk copies); fast for bfloat16 with inner at
//   most 2880 and aligned tensors; float32 and other sizes use plain FMA; graph-safe.
// Idea: weights of an expert are read once for up to 24 of its rows (8 where rows are few) and stay
//   FP4 until the registers of mma. 9 warps (two groups a block) or 15 split k; one more a group
//   fetches by bulk copies into a ring, and adds. First weights and bias go to L2 before the wait
//   for the kernel before.
// Made by: hand, from candidate 3 of the agent loop's recording
//   bench/results/loop/moe_matmul_down-cuda-2, whose scales had no pitch.
// Figures: NVIDIA H200, geometric means, bench/results/kernels: sweep bf16 1.67x against vllm,
//   1.32x to 1.98x at tokens 1 to 128 (moe_matmul_down-cuda_tuned.json.xz).
// Digest: 3e6ecfc42758cea62015414db35ed8836ae13da278c80d9103f0b8867c651093

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace moe_down {

constexpr int kList = 128;         // blocks of rows that one thread block may meet
constexpr int kMaxStages = 8;      // of a group's ring
constexpr int kMaxChunks = 45;     // of 64 along k that the workers of a group cover
constexpr int kScaleBytes = 2944;  // of a stage, for the scales: 64 for each chunk, rounded up
constexpr unsigned kAll = 0xffffffffu;

struct Params {
  const void* x;
  const uint8_t* weights;
  const uint8_t* scales;
  const float* bias;
  const void* gates;
  const int* offsets;
  void* output;
  int experts;
  int hidden;
  int inner;
  int chunks;       // of 64 along k
  int upe;          // units (of 16 columns) of an expert
  int stages;       // of a group's ring
  int stage_bytes;  // weights, scales, partial sums
  int64_t scale_pitch;  // bytes from row to row of the scales
  int64_t scale_expert;  // and from expert to expert
  float inverse_upe;
  float inverse_blocks;
  int guess_units;  // that a block asks for before it knows the rows; the next three tell which
  int guess_share;
  int guess_rest;
  int guess_total;
  int bias_lines;  // of 128 bytes to prefetch
  int x_lines;
  int gate_lines;
};

__device__ __forceinline__ int load_int(const int* p) {
  int v;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// 32 bits, or zero.
__device__ __forceinline__ uint32_t load_if(const uint8_t* p, bool wanted) {
  uint32_t v;
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "setp.ne.u32 p, %2, 0;\n\t"
      "mov.b32 %0, 0;\n\t"
      "@p ld.global.b32 %0, [%1];\n\t"
      "}"
      : "=r"(v)
      : "l"(p), "r"(uint32_t(wanted)));
  return v;
}

__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

__device__ __forceinline__ void prefetch_bulk(const uint8_t* p, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

// floor(n / d), for 0 <= n < 2^22 and inverse = 1 / d.
__device__ __forceinline__ int quotient(int n, int d, float inverse) {
  int q = int(float(n) * inverse);
  const int r = n - q * d;
  if (r < 0) {
    --q;
  } else if (r >= d) {
    ++q;
  }
  return q;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0u);
}

__device__ __forceinline__ void copy_bulk(uint32_t to, const uint8_t* from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_bulk_hint(uint32_t to, const uint8_t* from, uint32_t bytes,
                                               uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <int Threads>
__device__ __forceinline__ void group_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

template <int Threads>
__device__ __forceinline__ void group_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

// Sum over this lane and those before it.
__device__ __forceinline__ int scan(int v, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int more = __shfl_up_sync(kAll, v, d);
    if (lane >= d) v += more;
  }
  return v;
}

// The four pairs of numbers of a word, as bf16 of value (FP4 number) * 2^-126.
__device__ __forceinline__ void decode(uint32_t w, uint32_t (&a)[4]) {
  constexpr uint32_t kMask = 0x81C081C0u;
  a[0] = w & kMask;
  a[1] = (w << 3) & kMask;
  a[2] = (w << 6) & kMask;
  const uint32_t y = (w >> 7) & 0x00580058u;  // bits 13, 11, 10 at 6, 4, 3
  a[3] = ((y * 17u) & 0x01C001C0u) | ((w << 1) & 0x80008000u);
}

// A worker's chunks of 64 along k, for 16 columns and MT tiles of 8 rows. Two chains of sums if
// there is one tile.
template <int MT, int MTMAX, int kEach, bool High>
__device__ __forceinline__ void multiply(float (&acc)[MT == 1 ? 2 : 1][MT][4],
                                         const uint32_t (&x)[kEach][MTMAX][8],
                                         const uint32_t (&s)[kEach], const uint8_t* wp) {
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const uint4 w = *reinterpret_cast<const uint4*>(wp + e * 128);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // fast: bf16 2^(scale - 1), right for scales up to 128; High: 2^(scale - 127)
      constexpr uint32_t kAdd = High ? 0u : 0x3F003F00u;
      const uint32_t low = __byte_perm(s[e], 0u, h ? 0x4242u : 0x4040u) * 128u + kAdd;
      const uint32_t high = __byte_perm(s[e], 0u, h ? 0x4343u : 0x4141u) * 128u + kAdd;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t word = h ? (j ? w.w : w.z) : (j ? w.y : w.x);
        uint32_t a[4];
        decode(word, a);
        if (High) {
#pragma unroll
          for (int q = 0; q < 4; ++q) a[q] = mul2(a[q], 0x7E807E80u);  // 2^126
        }
        a[0] = mul2(a[0], low);
        a[1] = mul2(a[1], high);
        a[2] = mul2(a[2], low);
        a[3] = mul2(a[3], high);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          mma(acc[MT == 1 ? j : 0][m], a, x[e][m][(h * 2 + j) * 2], x[e][m][(h * 2 + j) * 2 + 1]);
        }
      }
    }
  }
}

// One unit's share of a worker: partial sums to `red`, 512 bytes for each tile of 8 rows.
template <int MT, int MTMAX, int kEach>
__device__ __forceinline__ void consume(const uint32_t (&x)[kEach][MTMAX][8], const uint8_t* wp,
                                        const uint8_t* sp, uint8_t* red) {
  uint32_t s[kEach];
  uint32_t any = 0u;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    s[e] = *reinterpret_cast<const uint32_t*>(sp + e * 64);
    any |= s[e];
  }
  constexpr int kChains = MT == 1 ? 2 : 1;
  float acc[kChains][MT][4];
#pragma unroll
  for (int c = 0; c < kChains; ++c)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[c][m][i] = 0.0f;

  if (__any_sync(kAll, (any & 0x80808080u) != 0u)) {
    multiply<MT, MTMAX, kEach, true>(acc, x, s, wp);
  } else {
    multiply<MT, MTMAX, kEach, false>(acc, x, s, wp);
  }

#pragma unroll
  for (int m = 0; m < MT; ++m) {
    float4 v = make_float4(acc[0][m][0], acc[0][m][1], acc[0][m][2], acc[0][m][3]);
    if (kChains == 2) {
      v.x += acc[kChains - 1][m][0];
      v.y += acc[kChains - 1][m][1];
      v.z += acc[kChains - 1][m][2];
      v.w += acc[kChains - 1][m][3];
    }
    *reinterpret_cast<float4*>(red + m * 512) = v;
  }
}

// Each group: kWorkers warps that multiply, kEach chunks of k each, and one that plans, fetches
// and adds. Group q of a block has every kGroups-th of the block's units, from its q-th.
template <int MTMAX, int kWorkers, int kEach, int kGroups>
__global__ void __launch_bounds__(32 * (kWorkers + 1) * kGroups, 1) stream_kernel(const Params p) {
  static_assert(kWorkers * kEach == kMaxChunks, "workers cover all chunks");
  constexpr int kBlockRows = 8 * MTMAX;
  constexpr int kGroupThreads = 32 * (kWorkers + 1);
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  __shared__ int4 lists[kGroups][kList];  // expert, first row, rows
  __shared__ int4 plans[kGroups];         // first place in the list, first tile, units
  __shared__ __align__(8) unsigned long long full_barriers[kGroups][kMaxStages];
  __shared__ __align__(8) unsigned long long done_barriers[kGroups][kMaxStages];

  const int lane = int(threadIdx.x) & 31;
  const int warp = __shfl_sync(kAll, int(threadIdx.x) >> 5, 0);
  const int group = warp / (kWorkers + 1);
  const int worker = warp - group * (kWorkers + 1);
  const int g = lane >> 2, t = lane & 3;
  const int weight_bytes = p.inner * 8;
  const int blocks = int(gridDim.x), me = int(blockIdx.x);
  uint8_t* const ring = shared_bytes + group * (p.stages * p.stage_bytes);
  int4* const list = lists[group];
  const uint32_t full = shared_address(&full_barriers[group][0]);
  const uint32_t done = shared_address(&done_barriers[group][0]);

  if (worker == kWorkers) {
    // fetches, and adds the workers' sums
    if (lane < p.stages) {
      barrier_init(full + lane * 8, 1u);
      barrier_init(done + lane * 8, uint32_t(kWorkers));
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
    cudaGridDependencySynchronize();
    asm volatile("griddepcontrol.launch_dependents;");

    int slot = 0, tile = 0, units = 0;
    {
      int start = 0, rows = 0;
      if (lane < p.experts) {
        start = load_int(p.offsets + lane);
        rows = load_int(p.offsets + lane + 1) - start;
      }
      int here = int(unsigned(rows + kBlockRows - 1) / unsigned(kBlockRows));
      int upto = scan(here, lane);
      int count = __shfl_sync(kAll, upto, 31);
      for (int base = 32; base < p.experts; base += 32) {
        const int e = base + lane;
        int more = 0;
        if (e < p.experts) {
          const int from = load_int(p.offsets + e);
          more = load_int(p.offsets + e + 1) - from;
        }
        count += int(__reduce_add_sync(kAll, unsigned(more + kBlockRows - 1) / unsigned(kBlockRows)));
      }
      const int total = count * p.upe;
      const int share = quotient(total, blocks, p.inverse_blocks), rest = total - share * blocks;
      const int begin = me * share + min(me, rest);
      const int past = begin + share + (me < rest ? 1 : 0);
      if (begin < past) {
        const int slot0 = quotient(begin, p.upe, p.inverse_upe);
        const int slot1 = quotient(past - 1, p.upe, p.inverse_upe);
        int before = 0;
        for (int base = 0; base < p.experts && before <= slot1; base += 32) {
          const int e = base + lane;
          if (base != 0) {
            start = 0;
            rows = 0;
            if (e < p.experts) {
              start = load_int(p.offsets + e);
              rows = load_int(p.offsets + e + 1) - start;
            }
            here = int(unsigned(rows + kBlockRows - 1) / unsigned(kBlockRows));
            upto = scan(here, lane);
          }
          const int first = before + upto - here;
          for (int i = max(0, slot0 - first); i < here && first + i <= slot1; ++i) {
            const int passed = i * kBlockRows;
            list[first + i - slot0] = make_int4(e, start + passed, min(kBlockRows, rows - passed), 0);
          }
          __syncwarp();
          before += __shfl_sync(kAll, upto, 31);
        }
        units = (past - begin - group + kGroups - 1) / kGroups;
        tile = begin - slot0 * p.upe + group;
        if (tile >= p.upe) {
          tile -= p.upe;
          slot = 1;
        }
      }
    }
    if (lane == 0) plans[group] = make_int4(slot, tile, units, 0);
    __threadfence_block();
    __syncwarp();
    group_arrive<kGroupThreads>(1 + group);  // the workers may read the plan

    const uint64_t policy = evict_first();
    int issued = 0, next_slot = slot, next_tile = tile;
    auto issue = [&](int stage) {
      if (lane == 0) {
        const size_t expert = size_t(list[next_slot].x);
        const uint32_t barrier = full + stage * 8;
        const uint32_t to = shared_address(ring + stage * p.stage_bytes);
        const uint8_t* const from =
            p.weights + (expert * size_t(p.upe) + size_t(next_tile)) * size_t(weight_bytes);
        barrier_expect(barrier, uint32_t(weight_bytes + p.inner));
        if constexpr (MTMAX == 1) {
          copy_bulk_hint(to, from, uint32_t(weight_bytes), barrier, policy);
        } else {
          copy_bulk(to, from, uint32_t(weight_bytes), barrier);
        }
        copy_bulk(to + weight_bytes,
                  p.scales + int64_t(expert) * p.scale_expert +
                      ((next_tile >> 4) * 8 + (next_tile & 7)) * p.scale_pitch,
                  uint32_t(p.inner), barrier);
      }
      ++issued;
      next_tile += kGroups;
      if (next_tile >= p.upe) {
        next_tile -= p.upe;
        ++next_slot;
      }
    };
    const int ahead = min(units, p.stages);
    for (int s = 0; s < ahead; ++s) issue(s);
    __syncwarp();

    const __nv_bfloat16* const gates = static_cast<const __nv_bfloat16*>(p.gates);
    __nv_bfloat16* const output = static_cast<__nv_bfloat16*>(p.output);
    const bool odd = (g & 1) != 0;
    int stage = 0, loaded = -1, tiles = 0;
    uint32_t phase = 0u;
    int4 info = make_int4(0, 0, 0, 0);
    float gate[MTMAX][2];
#pragma unroll
    for (int m = 0; m < MTMAX; ++m) gate[m][0] = gate[m][1] = 0.0f;

    float bias0 = 0.0f, bias1 = 0.0f;
    if (units > 0) {
      const float* const bias = p.bias + size_t(list[slot].x) * p.hidden + tile * 16 + g;
      bias0 = __ldg(bias);
      bias1 = __ldg(bias + 8);
    }

    for (int i = 0; i < units; ++i) {
      if (slot != loaded) {
        loaded = slot;
        info = list[slot];
        tiles = (info.z + 7) >> 3;
#pragma unroll
        for (int m = 0; m < MTMAX; ++m) {
          const int row = m * 8 + 2 * t;
          gate[m][0] = row < info.z ? __bfloat162float(gates[info.y + row]) : 0.0f;
          gate[m][1] = row + 1 < info.z ? __bfloat162float(gates[info.y + row + 1]) : 0.0f;
        }
      }
      // the bias of the unit after this one
      int after_slot = slot, after_tile = tile + kGroups;
      if (after_tile >= p.upe) {
        after_tile -= p.upe;
        ++after_slot;
      }
      float after0 = 0.0f, after1 = 0.0f;
      if (i + 1 < units) {
        const float* const bias =
            p.bias + size_t(list[after_slot].x) * p.hidden + after_tile * 16 + g;
        after0 = __ldg(bias);
        after1 = __ldg(bias + 8);
      }

      barrier_wait(done + stage * 8, phase);
      __syncwarp();
      const float4* const red = reinterpret_cast<const float4*>(ring + stage * p.stage_bytes +
                                                                weight_bytes + kScaleBytes) +
                                lane;
      float4 sum[MTMAX];
#pragma unroll
      for (int m = 0; m < MTMAX; ++m) {
        sum[m] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (m < tiles) {
#pragma unroll
          for (int w = 0; w < kWorkers; ++w) {
            const float4 more = red[(w * MTMAX + m) * 32];
            sum[m].x += more.x;
            sum[m].y += more.y;
            sum[m].z += more.z;
            sum[m].w += more.w;
          }
        }
      }
      __syncwarp();  // the stage has been read, weights and sums
      if (issued < units) issue(stage);
      __syncwarp();

#pragma unroll
      for (int m = 0; m < MTMAX; ++m) {
        if (m < tiles) {
          const float v00 = gate[m][0] * (sum[m].x + bias0);
          const float v01 = gate[m][1] * (sum[m].y + bias0);
          const float v10 = gate[m][0] * (sum[m].z + bias1);
          const float v11 = gate[m][1] * (sum[m].w + bias1);
          // neighbours in g swap, so that each has two columns of one row
          const float other0 = __shfl_xor_sync(kAll, odd ? v00 : v01, 4);
          const float other1 = __shfl_xor_sync(kAll, odd ? v10 : v11, 4);
          const __nv_bfloat162 pair0 =
              odd ? __floats2bfloat162_rn(other0, v01) : __floats2bfloat162_rn(v00, other0);
          const __nv_bfloat162 pair1 =
              odd ? __floats2bfloat162_rn(other1, v11) : __floats2bfloat162_rn(v10, other1);
          const int row = m * 8 + 2 * t + (odd ? 1 : 0);
          if (row < info.z) {
            __nv_bfloat16* const out =
                output + size_t(info.y + row) * p.hidden + (tile * 16 + (g & 6));
            *reinterpret_cast<__nv_bfloat162*>(out) = pair0;
            *reinterpret_cast<__nv_bfloat162*>(out + 8) = pair1;
          }
        }
      }

      slot = after_slot;
      tile = after_tile;
      bias0 = after0;
      bias1 = after1;
      if (++stage == p.stages) {
        stage = 0;
        phase ^= 1u;
      }
    }
  } else {
    // multiplies
    const int first = worker * kEach;
    constexpr int kHelpers = 32 * kWorkers * kGroups;  // threads that prefetch
    const int id = (group * kWorkers + worker) * 32 + lane;

    // weights alone may be asked for before the wait
    if (id == 0) {
      // the block's first units, if each expert has one block of rows
      const int begin = me * p.guess_share + min(me, p.guess_rest);
      const int past = min(begin + p.guess_units, p.guess_total);
      for (int unit = begin; unit < past; ++unit) {
        const int expert = quotient(unit, p.upe, p.inverse_upe);
        const int tile = unit - expert * p.upe;
        prefetch_bulk(p.weights + size_t(unit) * size_t(weight_bytes), uint32_t(weight_bytes));
        prefetch_bulk(p.scales + expert * p.scale_expert +
                          ((tile >> 4) * 8 + (tile & 7)) * p.scale_pitch,
                      uint32_t(p.inner));
      }
    }
    __syncwarp();
    {
      const int line = me + blocks * id;
      if (line < p.bias_lines) prefetch_line(p.bias + size_t(line) * 32);
    }
    if (p.chunks < kMaxChunks) {
      // no scale where there is no chunk: whatever is read as weights there is finite, and x is 0
      for (int s = 0; s < p.stages; ++s) {
        uint8_t* const scales = ring + s * p.stage_bytes + weight_bytes;
        for (int i = p.inner + (worker * 32 + lane) * 4; i < kScaleBytes; i += kWorkers * 32 * 4) {
          *reinterpret_cast<uint32_t*>(scales + i) = 0u;
        }
      }
    }
    cudaGridDependencySynchronize();
    {
      // x and gates to L2 while the offsets come
      const int lines = p.x_lines + p.gate_lines;
      for (int i = me + blocks * id; i < lines; i += blocks * kHelpers) {
        const uint8_t* const line =
            i < p.x_lines ? static_cast<const uint8_t*>(p.x) + size_t(i) * 128
                          : static_cast<const uint8_t*>(p.gates) + size_t(i - p.x_lines) * 128;
        prefetch_line(line);
      }
    }
    __syncwarp();
    group_sync<kGroupThreads>(1 + group);

    const int4 plan = plans[group];
    int slot = plan.x, tile = plan.y;
    const int units = plan.z;
    const uint8_t* const weights_lane =
        ring + ((g >> 1) * 2 * p.inner + first * 128 + (g & 1) * 64 + t * 16);
    const uint8_t* const scales_lane = ring + (weight_bytes + first * 64 + g * 4);
    uint8_t* const red_lane =
        ring + (weight_bytes + kScaleBytes + worker * (MTMAX * 512) + lane * 16);

    uint32_t x[kEach][MTMAX][8];
#pragma unroll
    for (int e = 0; e < kEach; ++e)
#pragma unroll
      for (int m = 0; m < MTMAX; ++m)
#pragma unroll
        for (int q = 0; q < 8; ++q) x[e][m][q] = 0u;

    int stage = 0, offset = 0, loaded = -1, tiles = 1;
    uint32_t phase = 0u;
    for (int i = 0; i < units; ++i) {
      if (slot != loaded) {
        loaded = slot;
        const int4 info = list[slot];
        tiles = (info.z + 7) >> 3;
#pragma unroll
        for (int m = 0; m < MTMAX; ++m) {
          const int row = m * 8 + g;
          const bool present = row < info.z;
          const uint8_t* const from =
              static_cast<const uint8_t*>(p.x) +
              (size_t(info.y + (present ? row : 0)) * size_t(p.inner) + size_t(first * 64 + 2 * t)) *
                  2;
#pragma unroll
          for (int e = 0; e < kEach; ++e) {
            const bool wanted = present && first + e < p.chunks;
#pragma unroll
            for (int q = 0; q < 8; ++q) {
              x[e][m][q] = load_if(from + (e * 128 + (q >> 1) * 32 + (q & 1) * 16), wanted);
            }
          }
        }
      }

      barrier_wait(full + stage * 8, phase);
      __syncwarp();
      const uint8_t* const wp = weights_lane + offset;
      const uint8_t* const sp = scales_lane + offset + ((tile >> 3) & 1) * 32;
      uint8_t* const red = red_lane + offset;
      if constexpr (MTMAX == 1) {
        consume<1, MTMAX, kEach>(x, wp, sp, red);
      } else {
        if (tiles == 1) {
          consume<1, MTMAX, kEach>(x, wp, sp, red);
        } else if (tiles == 2) {
          consume<2, MTMAX, kEach>(x, wp, sp, red);
        } else {
          consume<3, MTMAX, kEach>(x, wp, sp, red);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(done + stage * 8);

      tile += kGroups;
      if (tile >= p.upe) {
        tile -= p.upe;
        ++slot;
      }
      offset += p.stage_bytes;
      if (++stage == p.stages) {
        stage = 0;
        offset = 0;
        phase ^= 1u;
      }
    }
  }
}

__device__ __forceinline__ float as_float(float v) { return v; }
__device__ __forceinline__ float as_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ void put(float* p, float v) { *p = v; }
__device__ __forceinline__ void put(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }

// Any size, any T: a warp has 16 columns of one expert, 8 rows at a time, in float32 FMA.
template <typename T>
__global__ void __launch_bounds__(128) plain_kernel(const Params p) {
  cudaGridDependencySynchronize();
  const int expert = int(blockIdx.x);
  const int tile = int(blockIdx.y) * 4 + int(threadIdx.x >> 5);
  if (tile * 16 >= p.hidden) return;
  const int begin = load_int(p.offsets + expert), end = load_int(p.offsets + expert + 1);
  if (begin >= end) return;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const size_t inner = size_t(p.inner);
  const int chunks = p.inner >> 6;
  const uint8_t* const wp = p.weights + size_t(expert) * (size_t(p.hidden) / 2 * inner) +
                            size_t(tile) * 8 * inner + size_t(g >> 1) * 2 * inner + (g & 1) * 64 +
                            t * 16;
  const uint8_t* const sp =
      p.scales + expert * p.scale_expert + ((tile >> 4) * 8 + (tile & 7)) * p.scale_pitch +
      ((tile >> 3) & 1) * 32 + g * 4;
  const T* const x = static_cast<const T*>(p.x);
  const T* const gates = static_cast<const T*>(p.gates);
  T* const output = static_cast<T*>(p.output);

  for (int row0 = begin; row0 < end; row0 += 8) {
    const int rows = min(8, end - row0);
    float acc[8][2];
#pragma unroll
    for (int r = 0; r < 8; ++r) acc[r][0] = acc[r][1] = 0.0f;
    for (int c = 0; c < chunks; ++c) {
      const uint32_t* const words = reinterpret_cast<const uint32_t*>(wp + size_t(c) * 128);
      const uint8_t* const scales = sp + size_t(c) * 64;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
        decode(words[j], a);
        const float low = __uint_as_float(uint32_t(scales[(j >> 1) * 2]) << 23);
        const float high = __uint_as_float(uint32_t(scales[(j >> 1) * 2 + 1]) << 23);
        float value[4][2];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float scale = (q & 1) ? high : low;
          value[q][0] = (__uint_as_float(a[q] << 16) * 0x1p126f) * scale;
          value[q][1] = (__uint_as_float(a[q] & 0xFFFF0000u) * 0x1p126f) * scale;
        }
        const T* const xk = x + size_t(row0) * inner + c * 64 + j * 16 + 2 * t;
#pragma unroll
        for (int r = 0; r < 8; ++r) {
          if (r < rows) {
            const T* const xr = xk + size_t(r) * inner;
            const float x0 = as_float(xr[0]), x1 = as_float(xr[1]);
            const float x2 = as_float(xr[8]), x3 = as_float(xr[9]);
            acc[r][0] = fmaf(value[0][0], x0, acc[r][0]);
            acc[r][0] = fmaf(value[0][1], x1, acc[r][0]);
            acc[r][0] = fmaf(value[2][0], x2, acc[r][0]);
            acc[r][0] = fmaf(value[2][1], x3, acc[r][0]);
            acc[r][1] = fmaf(value[1][0], x0, acc[r][1]);
            acc[r][1] = fmaf(value[1][1], x1, acc[r][1]);
            acc[r][1] = fmaf(value[3][0], x2, acc[r][1]);
            acc[r][1] = fmaf(value[3][1], x3, acc[r][1]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v = acc[r][half];
        v += __shfl_xor_sync(0xffffffffu, v, 1);
        v += __shfl_xor_sync(0xffffffffu, v, 2);
        if (r < rows && t == 0) {
          const int n = tile * 16 + half * 8 + g;
          const float gate = as_float(gates[row0 + r]);
          put(output + size_t(row0 + r) * p.hidden + n,
              gate * (v + p.bias[size_t(expert) * p.hidden + n]));
        }
      }
    }
  }
}

inline void check(cudaError_t status) {
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}

inline void launch(void (*kernel)(Params), dim3 grid, int threads, size_t bytes,
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
  check(cudaGetLastError());
}

inline bool aligned(const void* p, uintptr_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; }

}  // namespace moe_down

void moe_matmul_down(tvm::ffi::TensorView x, tvm::ffi::TensorView weights,
                     tvm::ffi::TensorView scales, tvm::ffi::TensorView bias,
                     tvm::ffi::TensorView gate_scales, tvm::ffi::TensorView row_map,
                     tvm::ffi::TensorView histogram, tvm::ffi::TensorView token_offsets,
                     tvm::ffi::TensorView tile_map, tvm::ffi::TensorView output) {
  using namespace moe_down;
  (void)histogram;
  (void)tile_map;
  const DLDataType type = output.dtype();
  const bool is_float = type.code == kDLFloat && type.bits == 32;
  const bool is_bfloat = type.code == kDLBfloat && type.bits == 16;
  if (!is_float && !is_bfloat) TVM_FFI_THROW(TypeError) << "moe_matmul_down: unsupported dtype";

  const int64_t rows = x.size(0), inner = x.size(1);
  const int64_t experts = bias.size(0), hidden = bias.size(1);
  const int64_t tokens = row_map.size(0);
  if (rows == 0 || experts == 0 || hidden == 0) return;

  Params p = {};
  p.x = x.data_ptr();
  p.weights = static_cast<const uint8_t*>(weights.data_ptr());
  p.scales = static_cast<const uint8_t*>(scales.data_ptr());
  p.bias = static_cast<const float*>(bias.data_ptr());
  p.gates = gate_scales.data_ptr();
  p.offsets = static_cast<const int*>(token_offsets.data_ptr());
  p.output = output.data_ptr();
  p.experts = int(experts);
  p.hidden = int(hidden);
  p.inner = int(inner);
  p.chunks = int(inner / 64);
  p.upe = int(hidden / 16);
  p.scale_pitch = scales.stride(1);
  p.scale_expert = scales.stride(0);

  const DLDevice device = output.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));

  if (is_bfloat && inner / 64 <= kMaxChunks && aligned(p.x, 16) && aligned(p.weights, 16) &&
      aligned(p.scales, 16) && p.scale_pitch % 16 == 0 && aligned(p.bias, 4) &&
      aligned(p.output, 4)) {
    int processors = 0, most = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device.device_id));
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.device_id));
    const int64_t room = int64_t(most) - 6144;  // less what is static
    // few rows for each expert: blocks of 8 suffice
    const bool few = tokens <= 8 || rows <= 4 * experts;
    const int64_t tiles = few ? 1 : 3;
    const int64_t workers = few ? 9 : 15;
    const int64_t groups = few ? 2 : 1;
    const int64_t stage_bytes = inner * 8 + kScaleBytes + workers * tiles * 512;
    int64_t stages = room / (groups * stage_bytes);
    if (stages > kMaxStages) stages = kMaxStages;
    const int64_t active = rows < experts ? rows : experts;
    const int64_t row_blocks = active + rows / (8 * tiles);
    const int64_t units = row_blocks * (hidden / 16);
    const int64_t blocks = units < processors ? units : processors;
    // below 2^22 units, quotients by way of float are right
    if (stages >= 2 && units < (int64_t(1) << 22) && row_blocks / blocks + 3 <= kList) {
      p.stages = int(stages);
      p.stage_bytes = int(stage_bytes);
      p.inverse_upe = 1.0f / float(p.upe);
      p.inverse_blocks = 1.0f / float(blocks);
      if (rows >= experts) {
        const int64_t total = experts * (hidden / 16);  // at most `units`
        const int64_t share = total / blocks;
        int64_t wanted = rows >= 2 * experts ? 3 : 2;
        if (wanted > share) wanted = share;
        p.guess_units = int(wanted);
        p.guess_share = int(share);
        p.guess_rest = int(total - share * blocks);
        p.guess_total = int(total);
      }
      const int64_t bias_lines = experts * (hidden / 32);
      p.bias_lines = bias_lines <= 8192 ? int(bias_lines) : 0;
      const int64_t x_lines = rows * (inner / 64);
      p.x_lines = x_lines <= 65536 ? int(x_lines) : 65536;
      const int64_t gate_lines = (rows * 2 + 127) / 128;
      p.gate_lines = gate_lines <= 1024 ? int(gate_lines) : 1024;
      void (*kernel)(Params) = nullptr;
      if (few) {
        kernel = stream_kernel<1, 9, 5, 2>;
      } else {
        kernel = stream_kernel<3, 15, 3, 1>;
      }
      launch(kernel, dim3(unsigned(blocks)), int(32 * (workers + 1) * groups),
             size_t(groups * stages * stage_bytes), stream, p);
      return;
    }
  }

  const dim3 grid(unsigned(experts), unsigned((hidden + 63) / 64));
  if (is_float) {
    launch(plain_kernel<float>, grid, 128, 0, stream, p);
  } else {
    launch(plain_kernel<__nv_bfloat16>, grid, 128, 0, stream, p);
  }
}
