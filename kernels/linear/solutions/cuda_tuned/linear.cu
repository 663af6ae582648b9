// Op: linear: output[t, n] = bias[n] + sum over k of x[t, k] * weight[n, k], an empty bias adding
//   nothing; sums and products in float32, rounded once.
// Arguments: x[T: tokens, inner], weight[T: outer, inner], bias[T: biased * outer], output[T:
//   tokens, outer]; T: bfloat16 or float16 or float32
// Writes: output
// Needs: compute capability 9.0 or later (clusters); tokens at most 64; 16-bit dtypes, 16-byte
//   aligned and inner a multiple of 8, use tensor cores; float32 and the rest FMA; graph-safe.
// Idea: the weight is read once, at the rate of memory, so many loads must be under way. Up to 8
//   tokens each SM owns a contiguous piece and asks for all of it at once, in registers and
//   cp.async. Else K is split over warps and clusters, and the weight goes straight into mma
//   fragments. First weights are asked for before the wait for the kernel before.
// Made by: hand, from candidate 3 of the agent loop's recording bench/results/loop/linear-cuda-2,
//   which always had a bias.
// Figures: not measured since there may be no bias. Before, on an NVIDIA H200, with bias: sweep
//   layers 1.67x against torch.compile, bf16 1.14x, router 2.09x against eager, qkv 0.93x
//   (bench/results/kernels/linear-cuda_tuned.*).
// Digest: dd388458429096dd0f492219608218e954c8ac0d941d329dd889e8b80c27ca0a

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace {

// ---------------------------------------------------------------- helpers

template <typename T>
struct Traits;

template <>
struct Traits<float> {
  static __device__ __forceinline__ float to_float(float v) { return v; }
  static __device__ __forceinline__ float from_float(float v) { return v; }
};

template <>
struct Traits<__nv_bfloat16> {
  static __device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __forceinline__ __nv_bfloat16 from_float(float v) { return __float2bfloat16_rn(v); }
  static __device__ __forceinline__ float from_bits(unsigned short v) {
    return __uint_as_float(static_cast<unsigned>(v) << 16);
  }
  static __device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

template <>
struct Traits<__half> {
  static __device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
  static __device__ __forceinline__ __half from_float(float v) { return __float2half_rn(v); }
  static __device__ __forceinline__ float from_bits(unsigned short v) { return __half2float(__ushort_as_half(v)); }
  static __device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

// 16 bytes of weight where k < limit, else zeros. Streamed: read once.
__device__ __forceinline__ uint4 load_weight(const void* p, int k, int limit) {
  uint4 r = make_uint4(0u, 0u, 0u, 0u);
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "setp.lt.s32 p, %5, %6;\n\t"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
      "}"
      : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)
      : "l"(p), "r"(k), "r"(limit));
  return r;
}

// 16 bytes of x where k < limit, else zeros. A plain load: it must stay behind the grid dependency.
__device__ __forceinline__ uint4 load_x(const void* p, int k, int limit) {
  uint4 r = make_uint4(0u, 0u, 0u, 0u);
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "setp.lt.s32 p, %5, %6;\n\t"
      "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
      "}"
      : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)
      : "l"(p), "r"(k), "r"(limit)
      : "memory");
  return r;
}

// The bits of an output's bias; those of 0 where there is none.
template <typename T>
__device__ __forceinline__ unsigned short load_bias(const T* bias, int n) {
  unsigned short r;
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "setp.ne.u64 p, %2, 0;\n\t"
      "mov.u16 %0, 0;\n\t"
      "@p ld.global.nc.u16 %0, [%1];\n\t"
      "}"
      : "=&h"(r)
      : "l"(bias + n), "l"(bias));
  return r;
}

__device__ __forceinline__ int cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return static_cast<int>(r);
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ------------------------------------------- tensor-core kernel (16-bit T)

// NT: token tiles of 8; MT: row tiles of 16; S: blocks of a cluster that split K.
template <int NT, int MT, int S>
struct Shape {
  static constexpr int kWarps = S == 1 ? (MT == 2 ? 12 : 16) : (S == 2 ? 16 : 8);
  static constexpr int kBlocks = S == 1 ? 1 : ((NT > 2 || S == 2) ? 2 : 4);
  static constexpr int kThreads = kWarps * 32;
};

// A warp owns CH chunks of 32 k in each pass; in a chunk, lane (g, q) owns k = 8 q .. 8 q + 7 of its rows and tokens,
// the first four for one mma and the last four for another.
template <typename T, int NT, int MT, int CH, int S>
__global__ void __launch_bounds__(Shape<NT, MT, S>::kThreads, Shape<NT, MT, S>::kBlocks)
    linear_mma(const T* x, const T* weight, const T* bias, T* output, int tokens, int inner, int outer, int tiles,
               int passes) {
  constexpr int kWarps = Shape<NT, MT, S>::kWarps;
  constexpr int kRows = 16 * MT;
  constexpr int kStride = kRows + 4;
  constexpr int kSlab = 8 * kStride;   // partial sums of a warp for one token tile
  constexpr int kCells = 8 * kRows;    // outputs of one token tile
  constexpr int kRed = 2 * kWarps * kSlab;
  constexpr int kPart = S > 1 ? NT * S * kCells : 0;
  constexpr int kAcc = NT == 1 ? 2 : 1;
  constexpr int kHeld = NT == 1 ? CH : 1;
  constexpr int kEarly = S == 1 ? (CH + 1) / 2 : CH;
  __shared__ float smem[kRed + kPart];

  const int tid = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int lane = tid & 31;
  const int warp = tid >> 5;
  const int warps = threads >> 5;
  const int g = lane >> 2;
  const int q = lane & 3;
  int rank = 0;
  if constexpr (S > 1) {
    rank = cluster_rank();
    cluster_arrive_relaxed();
  }
  const int group = static_cast<int>(blockIdx.x) / S;
  const int groups = static_cast<int>(gridDim.x) / S;
  const int span = S * warps * CH * 32;
  const int first = (rank * warps + warp) * (CH * 32) + q * 8;

  uint4 w[CH][MT][2];
  uint4 xf[kHeld];
  float acc[kAcc][NT][MT][4];
#pragma unroll
  for (int h = 0; h < kAcc; ++h)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[h][nt][mt][i] = 0.f;

  const T* wp[MT][2];
  auto aim = [&](int tile_, int k_) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = min(tile_ * kRows + mt * 16 + h * 8 + g, outer - 1);
        wp[mt][h] = weight + static_cast<size_t>(row) * static_cast<size_t>(inner) + k_;
      }
  };
  const T* xp = x + static_cast<size_t>(min(g, tokens - 1)) * static_cast<size_t>(inner);

  int tile = group;
  int pass = 0;
  int k = first;
  aim(tile, k);
#pragma unroll
  for (int j = 0; j < kEarly; ++j)
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int h = 0; h < 2; ++h) w[j][mt][h] = load_weight(wp[mt][h] + j * 32, k + j * 32, inner);
  unsigned short bias_now = load_bias(bias, min(tile * kRows + tid % kRows, outer - 1));

  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  if constexpr (NT == 1) {
#pragma unroll
    for (int j = 0; j < CH; ++j) xf[j] = load_x(xp + k + j * 32, k + j * 32, inner);
  }
#pragma unroll
  for (int j = kEarly; j < CH; ++j)
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int h = 0; h < 2; ++h) w[j][mt][h] = load_weight(wp[mt][h] + j * 32, k + j * 32, inner);

  int parity = 0;
  while (true) {
    int next_tile = tile;
    int next_pass = pass + 1;
    if (next_pass == passes) {
      next_pass = 0;
      next_tile += groups;
    }
    const bool more = next_tile < tiles;
    const int next_k = first + next_pass * span;
    const int limit = more ? inner : 0;
    if constexpr (S == 1) aim(next_tile, next_k);

#pragma unroll
    for (int j = 0; j < CH; ++j) {
      uint4 b[NT];
      if constexpr (NT == 1) {
        b[0] = xf[j];
      } else {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          const int t = min(nt * 8 + g, tokens - 1);
          b[nt] = load_x(x + static_cast<size_t>(t) * static_cast<size_t>(inner) + k + j * 32, k + j * 32, inner);
        }
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
          Traits<T>::mma(acc[0][nt][mt], w[j][mt][0].x, w[j][mt][1].x, w[j][mt][0].y, w[j][mt][1].y, b[nt].x,
                         b[nt].y);
          Traits<T>::mma(acc[kAcc - 1][nt][mt], w[j][mt][0].z, w[j][mt][1].z, w[j][mt][0].w, w[j][mt][1].w, b[nt].z,
                         b[nt].w);
        }
      if constexpr (S == 1) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
          for (int h = 0; h < 2; ++h) w[j][mt][h] = load_weight(wp[mt][h] + j * 32, next_k + j * 32, limit);
      }
    }
    if constexpr (S == 1 && NT == 1) {
      if (passes > 1) {
#pragma unroll
        for (int j = 0; j < CH; ++j) xf[j] = load_x(xp + next_k + j * 32, next_k + j * 32, limit);
      }
    }

    if (next_pass == 0) {  // the tile is complete: sum over warps, then over the cluster
      unsigned short bias_next = bias_now;
      if (more) bias_next = load_bias(bias, min(next_tile * kRows + tid % kRows, outer - 1));
      const float bias_value = Traits<T>::from_bits(bias_now);
      uint32_t remote = 0;
      if constexpr (S > 1) {
        cluster_wait();  // every block of the cluster has started
        const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(smem + kRed));
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(0));
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        float* slab = smem + parity * (kWarps * kSlab);
        parity ^= 1;
        float* mine = slab + warp * kSlab + 2 * q * kStride + g;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
          float c[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            c[i] = acc[0][nt][mt][i];
            if constexpr (kAcc == 2) c[i] += acc[kAcc - 1][nt][mt][i];
          }
          mine[mt * 16] = c[0];
          mine[mt * 16 + kStride] = c[1];
          mine[mt * 16 + 8] = c[2];
          mine[mt * 16 + kStride + 8] = c[3];
        }
        __syncthreads();
        for (int e = tid; e < kCells; e += threads) {
          const int row = e % kRows;
          const int tok = e / kRows;
          const float* p = slab + tok * kStride + row;
          float s[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
          for (int i = 0; i < kWarps; ++i) {
            const float part = p[i * kSlab];
            s[i & 3] += i < warps ? part : 0.f;
          }
          const float sum = (s[0] + s[1]) + (s[2] + s[3]);
          if constexpr (S == 1) {
            const int t = nt * 8 + tok;
            const int n = tile * kRows + row;
            if (t < tokens && n < outer) {
              output[static_cast<size_t>(t) * static_cast<size_t>(outer) + n] =
                  Traits<T>::from_float(sum + bias_value);
            }
          } else {
            const uint32_t address = remote + static_cast<uint32_t>((nt * S + rank) * kCells + e) * 4u;
            asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(sum) : "memory");
          }
        }
      }
      if constexpr (S > 1) {
        cluster_arrive_release();
        cluster_wait();
        if (rank == 0) {
          for (int e = tid; e < kCells; e += threads) {
            const int row = e % kRows;
            const int tok = e / kRows;
            const int n = tile * kRows + row;
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
              float sum = 0.f;
#pragma unroll
              for (int r = 0; r < S; ++r) sum += smem[kRed + (nt * S + r) * kCells + e];
              const int t = nt * 8 + tok;
              if (t < tokens && n < outer) {
                output[static_cast<size_t>(t) * static_cast<size_t>(outer) + n] =
                    Traits<T>::from_float(sum + bias_value);
              }
            }
          }
        }
      }
      bias_now = bias_next;
#pragma unroll
      for (int h = 0; h < kAcc; ++h)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[h][nt][mt][i] = 0.f;
    }

    if (!more) break;
    tile = next_tile;
    pass = next_pass;
    k = next_k;
    if constexpr (S > 1) {
      aim(tile, k);
#pragma unroll
      for (int j = 0; j < CH; ++j)
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
          for (int h = 0; h < 2; ++h) w[j][mt][h] = load_weight(wp[mt][h] + j * 32, k + j * 32, inner);
      if constexpr (NT == 1) {
#pragma unroll
        for (int j = 0; j < CH; ++j) xf[j] = load_x(xp + k + j * 32, k + j * 32, inner);
      }
    }
  }
}

// ------------------------------- one-shot streaming kernel (16-bit T, up to 8 tokens)
//
// One block a multiprocessor owns up to D + ST consecutive tiles of 4 rows: one contiguous piece of the weight. Its
// warps split K, CH chunks of 64 k each, and a lane asks for all of its weight at once: D tiles land in registers, ST
// more in its own cells of shared memory. Nothing is ever refilled, so no load waits for another one.
//
// In the mma the tokens are A and the weight is B. With at most 8 tokens half of A would be idle, so rows 0..7 of A are
// the tokens over the first 32 k of a chunk and rows 8..15 the same tokens over the last 32; column 2 r + h of B is row
// r over half h. The sums wanted are c[0] (half 0 by half 0) and c[3] (half 1 by half 1); c[1] and c[2] mix the halves
// and are dropped. So a quarter of a warp reads one whole line of 128 bytes, and a lane ends with one output's part.

constexpr int kStreamChunks = 3;    // chunks of 64 k a warp
constexpr int kStreamWarps = 16;    // at most
constexpr int kStreamTiles = 6;     // tiles in registers

__device__ __forceinline__ void copy_weight(uint32_t target, const void* p, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(p), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Folds to one instruction where pending is known at compile time.
__device__ __forceinline__ void wait_copies_of(int pending) {
  switch (pending) {
    case 7: wait_copies<7>(); break;
    case 6: wait_copies<6>(); break;
    case 5: wait_copies<5>(); break;
    case 4: wait_copies<4>(); break;
    case 3: wait_copies<3>(); break;
    case 2: wait_copies<2>(); break;
    case 1: wait_copies<1>(); break;
    default: wait_copies<0>(); break;
  }
}

template <typename T, int CH, int D, int ST>
__global__ void __launch_bounds__(kStreamWarps * 32, 1)
    linear_stream(const T* x, const T* weight, const T* bias, T* output, int tokens, int inner, int outer, int tiles) {
  constexpr int kTile = kStreamWarps * 32 + 4;  // floats of a tile's parts; the 4 spread its columns over the banks
  __shared__ float parts[(D + ST) * kTile];
  extern __shared__ __align__(16) uint4 stage[];  // [warp][tile][chunk][lane]

  const int tid = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int warps = threads >> 5;
  const int lane = tid & 31;
  const int warp = tid >> 5;
  const int g = lane >> 2;
  const int q = lane & 3;

  const int block = static_cast<int>(blockIdx.x);
  const int blocks = static_cast<int>(gridDim.x);
  const int share = tiles / blocks;
  const int extra = tiles - share * blocks;
  const int count = share + (block < extra ? 1 : 0);  // 1 .. D + ST
  const int row0 = (block * share + min(block, extra)) * 4;

  const int k0 = warp * (CH * 64);
  const int kw = k0 + (lane & 7) * 8;
  const size_t step = static_cast<size_t>(inner) * 4;
  const T* wp = weight + static_cast<size_t>(row0 + (lane >> 3)) * static_cast<size_t>(inner) + kw;

  uint4 w[D][CH];
#pragma unroll
  for (int d = 0; d < D; ++d) {
    const int limit = d < count ? inner : 0;
#pragma unroll
    for (int j = 0; j < CH; ++j) w[d][j] = load_weight(wp + j * 64, kw + j * 64, limit);
    wp += step;
  }
  const int cols = count * 4;
  const int total = tokens * cols;
  int cell = tid;
  int token = cell / cols;
  int col = cell - token * cols;
  unsigned short bias_bits = load_bias(bias, row0 + col);

  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  // x of token g: its half 0 and half 1 of every chunk of this warp. Tokens that are not there are zeros.
  uint4 xa[CH];
  uint4 xb[CH];
  {
    const bool there = g < tokens;
    const int limit = there ? inner : 0;
    const int kx = k0 + q * 8;
    const T* xp = x + static_cast<size_t>(there ? g : 0) * static_cast<size_t>(inner) + kx;
#pragma unroll
    for (int j = 0; j < CH; ++j) {
      xa[j] = load_x(xp + j * 64, kx + j * 64, limit);
      xb[j] = load_x(xp + j * 64 + 32, kx + j * 64 + 32, limit);
    }
  }

  if constexpr (ST > 0) {
    const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(stage)) +
                            static_cast<uint32_t>(warp * (ST * CH * 32) + lane) * 16u;
#pragma unroll
    for (int s = 0; s < ST; ++s) {
      if (D + s < count) {
#pragma unroll
        for (int j = 0; j < CH; ++j) {
          const bool valid = kw + j * 64 < inner;
          const T* from = valid ? wp + j * 64 : weight;
          copy_weight(target + static_cast<uint32_t>((s * CH + j) * 512), from, valid);
        }
      }
      commit_copies();
      wp += step;
    }
  }
  // The page of the output is looked up now, not in front of the last store. It changes nothing.
  if (tid == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(output + row0));

  auto multiply = [&](const uint4(&v)[CH]) -> float {
    float a[4] = {0.f, 0.f, 0.f, 0.f};
    float b[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < CH; ++j) {
      Traits<T>::mma(a, xa[j].x, xb[j].x, xa[j].y, xb[j].y, v[j].x, v[j].y);
      Traits<T>::mma(b, xa[j].z, xb[j].z, xa[j].w, xb[j].w, v[j].z, v[j].w);
    }
    return (a[0] + b[0]) + (a[3] + b[3]);  // token g, row q
  };

  float* mine = parts + warp * 32 + lane;
#pragma unroll
  for (int d = 0; d < D; ++d) {
    if (d < count) mine[d * kTile] = multiply(w[d]);
  }
  if constexpr (ST > 0) {
    const uint4* from = stage + warp * (ST * CH * 32) + lane;
#pragma unroll
    for (int s = 0; s < ST; ++s) {
      if (D + s < count) {
        wait_copies_of(ST - 1 - s);  // a lane reads only what it copied itself
        uint4 v[CH];
#pragma unroll
        for (int j = 0; j < CH; ++j) v[j] = from[(s * CH + j) * 32];
        mine[(D + s) * kTile] = multiply(v);
      }
    }
  }

  __syncthreads();
  while (cell < total) {
    const float* p = parts + (col >> 2) * kTile + token * 4 + (col & 3);
    float s[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kStreamWarps; ++i) {
      if (i < warps) s[i & 3] += p[i * 32];
    }
    const float sum = (s[0] + s[1]) + (s[2] + s[3]);
    output[static_cast<size_t>(token) * static_cast<size_t>(outer) + row0 + col] =
        Traits<T>::from_float(sum + Traits<T>::from_bits(bias_bits));
    cell += threads;
    if (cell < total) {
      token = cell / cols;
      col = cell - token * cols;
      bias_bits = load_bias(bias, row0 + col);
    }
  }
}

// --------------------------- FMA kernel (float32, and unaligned pointers)

template <typename T, bool kVector>
__device__ __forceinline__ float4 load4(const T* p) {
  if constexpr (kVector) {
    return *reinterpret_cast<const float4*>(p);
  } else {
    return make_float4(Traits<T>::to_float(p[0]), Traits<T>::to_float(p[1]), Traits<T>::to_float(p[2]),
                       Traits<T>::to_float(p[3]));
  }
}

// A block: 8 outputs of 8 tokens, its 8 warps split K.
template <typename T, bool kVector>
__global__ void __launch_bounds__(256)
    linear_simt(const T* x, const T* weight, const T* bias, T* output, int tokens, int inner, int outer) {
  __shared__ float red[8][64];
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid & 31;
  const int warp = tid >> 5;
  const int n0 = static_cast<int>(blockIdx.x) * 8;
  const int t0 = static_cast<int>(blockIdx.y) * 8;
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  float acc[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] = 0.f;
#pragma unroll 1
  for (int k = warp * 128 + lane * 4; k < inner; k += 1024) {
    float4 w[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int n = min(n0 + r, outer - 1);
      w[r] = load4<T, kVector>(weight + static_cast<size_t>(n) * static_cast<size_t>(inner) + k);
    }
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const int token = min(t0 + t, tokens - 1);
      const float4 v = load4<T, kVector>(x + static_cast<size_t>(token) * static_cast<size_t>(inner) + k);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        float a = acc[r * 8 + t];
        a = fmaf(v.x, w[r].x, a);
        a = fmaf(v.y, w[r].y, a);
        a = fmaf(v.z, w[r].z, a);
        a = fmaf(v.w, w[r].w, a);
        acc[r * 8 + t] = a;
      }
    }
  }
  // Fold 64 values over 32 lanes: lane l ends with the sums of cells 2 l and 2 l + 1.
#pragma unroll
  for (int s = 0; s < 5; ++s) {
    const int off = 16 >> s;
    const int n = 32 >> s;
    const bool up = (lane & off) != 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i < n) {
        const float low = acc[i];
        const float high = acc[i + n];
        const float keep = up ? high : low;
        const float send = up ? low : high;
        acc[i] = keep + __shfl_xor_sync(0xffffffffu, send, off);
      }
    }
  }
  red[warp][2 * lane] = acc[0];
  red[warp][2 * lane + 1] = acc[1];
  __syncthreads();
  if (tid < 64) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += red[i][tid];
    const int n = n0 + (tid >> 3);
    const int t = t0 + (tid & 7);
    if (t < tokens && n < outer) {
      output[static_cast<size_t>(t) * static_cast<size_t>(outer) + n] =
          Traits<T>::from_float(bias == nullptr ? sum : sum + Traits<T>::to_float(bias[n]));
    }
  }
}

// -------------------------------------------------------------------- host

int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <typename... Expected, typename... Actual>
void start(void (*kernel)(Expected...), dim3 grid, int threads, int cluster, size_t shared, cudaStream_t stream,
           Actual... args) {
  if (shared > 0) {
    const cudaError_t allowed =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared));
    if (allowed != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "linear: " << cudaGetErrorString(allowed);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads), 1, 1);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[count].val.programmaticStreamSerializationAllowed = 1;
  ++count;
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[count].val.clusterDim.y = 1;
    attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  config.attrs = attributes;
  config.numAttrs = count;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, args...);
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "linear: " << cudaGetErrorString(status);
}

template <typename T>
struct Call {
  const T* x;
  const T* weight;
  const T* bias;
  T* output;
  int tokens;
  int inner;
  int outer;
  int multiprocessors;
  cudaStream_t stream;
};

template <typename T, int NT, int MT, int CH, int S>
void launch_mma(const Call<T>& c) {
  constexpr int max_warps = Shape<NT, MT, S>::kWarps;
  const int chunks = ceil_div(c.inner, 32);
  const int passes = ceil_div(chunks, S * CH * max_warps);
  const int warps = ceil_div(chunks, S * CH * passes);
  const int tiles = ceil_div(c.outer, 16 * MT);
  int groups = tiles;
  if (S == 1) {
    const int room = c.multiprocessors * (max_warps / warps);
    if (groups > room) groups = room;
  }
  start(linear_mma<T, NT, MT, CH, S>, dim3(static_cast<unsigned>(groups * S), 1, 1), warps * 32, S, 0, c.stream,
        c.x, c.weight, c.bias, c.output, c.tokens, c.inner, c.outer, tiles, passes);
}

template <typename T, bool kVector>
void launch_simt(const Call<T>& c) {
  start(linear_simt<T, kVector>,
        dim3(static_cast<unsigned>(ceil_div(c.outer, 8)), static_cast<unsigned>(ceil_div(c.tokens, 8)), 1), 256, 1,
        0, c.stream, c.x, c.weight, c.bias, c.output, c.tokens, c.inner, c.outer);
}

template <typename T, int ST>
void launch_stream(const Call<T>& c, int tiles, int blocks) {
  const int warps = ceil_div(ceil_div(c.inner, 64), kStreamChunks);
  const size_t shared = static_cast<size_t>(warps) * (ST * kStreamChunks * 512);
  start(linear_stream<T, kStreamChunks, kStreamTiles, ST>, dim3(static_cast<unsigned>(blocks), 1, 1), warps * 32, 1,
        shared, c.stream, c.x, c.weight, c.bias, c.output, c.tokens, c.inner, c.outer, tiles);
}

// True where the whole weight fits in flight at once and the call was launched.
template <typename T>
bool try_stream(const Call<T>& c) {
  if (c.tokens > 8 || c.outer % 4 != 0) return false;
  if (c.inner <= 1536 || c.inner > kStreamWarps * kStreamChunks * 64) return false;
  const int tiles = c.outer / 4;
  const int blocks = tiles < c.multiprocessors ? tiles : c.multiprocessors;
  const int most = ceil_div(tiles, blocks);
  if (most <= kStreamTiles) {
    launch_stream<T, 0>(c, tiles, blocks);
  } else if (most <= kStreamTiles + 4) {
    launch_stream<T, 4>(c, tiles, blocks);
  } else if (most <= kStreamTiles + 8) {
    launch_stream<T, 8>(c, tiles, blocks);
  } else {
    return false;
  }
  return true;
}

template <typename T>
void dispatch_mma(const Call<T>& c) {
  const int tiles = ceil_div(c.outer, 16);
  const int chunks = ceil_div(c.inner, 32);
  if (c.tokens <= 8) {
    if (tiles * 8 <= c.multiprocessors && chunks >= 32) return launch_mma<T, 1, 1, 2, 8>(c);
    if (tiles * 2 <= c.multiprocessors && chunks >= 24) return launch_mma<T, 1, 1, 3, 4>(c);
    if (try_stream(c)) return;
    if (tiles < c.multiprocessors && chunks >= 24) return launch_mma<T, 1, 1, 3, 2>(c);
    return launch_mma<T, 1, 1, 6, 1>(c);
  }
  const bool split = tiles * 2 <= c.multiprocessors && chunks >= 24;
  if (c.tokens <= 16) {
    if (split) return launch_mma<T, 2, 1, 3, 4>(c);
    return launch_mma<T, 2, 1, 4, 1>(c);
  }
  if (c.tokens <= 32) {
    if (split) return launch_mma<T, 4, 1, 3, 4>(c);
    return launch_mma<T, 4, 2, 2, 1>(c);
  }
  if (split) return launch_mma<T, 8, 1, 2, 4>(c);
  return launch_mma<T, 8, 2, 2, 1>(c);
}

template <typename T>
Call<T> make_call(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView bias,
                  tvm::ffi::TensorView output) {
  Call<T> c;
  c.x = static_cast<const T*>(x.data_ptr());
  c.weight = static_cast<const T*>(weight.data_ptr());
  c.bias = bias.numel() == 0 ? nullptr : static_cast<const T*>(bias.data_ptr());
  c.output = static_cast<T*>(output.data_ptr());
  c.tokens = static_cast<int>(x.size(0));
  c.inner = static_cast<int>(x.size(1));
  c.outer = static_cast<int>(weight.size(0));
  const DLDevice device = output.device();
  c.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  int count = 0;
  const cudaError_t status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.device_id);
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "linear: " << cudaGetErrorString(status);
  c.multiprocessors = count > 0 ? count : 132;
  return c;
}

bool same(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits; }

}  // namespace

void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView bias,
            tvm::ffi::TensorView output) {
  const DLDataType type = output.dtype();
  if (!same(type, x.dtype()) || !same(type, weight.dtype()) || !same(type, bias.dtype())) {
    TVM_FFI_THROW(TypeError) << "linear: dtypes differ";
  }
  if (output.numel() == 0) return;
  const bool aligned =
      ((reinterpret_cast<uintptr_t>(x.data_ptr()) | reinterpret_cast<uintptr_t>(weight.data_ptr())) & 15) == 0 &&
      x.size(1) % 8 == 0;
  if (type.code == kDLBfloat && type.bits == 16) {
    const auto c = make_call<__nv_bfloat16>(x, weight, bias, output);
    if (aligned) return dispatch_mma<__nv_bfloat16>(c);
    return launch_simt<__nv_bfloat16, false>(c);
  }
  if (type.code == kDLFloat && type.bits == 16) {
    const auto c = make_call<__half>(x, weight, bias, output);
    if (aligned) return dispatch_mma<__half>(c);
    return launch_simt<__half, false>(c);
  }
  if (type.code == kDLFloat && type.bits == 32) {
    const auto c = make_call<float>(x, weight, bias, output);
    if (aligned) return launch_simt<float, true>(c);
    return launch_simt<float, false>(c);
  }
  TVM_FFI_THROW(TypeError) << "linear: unsupported dtype";
}
