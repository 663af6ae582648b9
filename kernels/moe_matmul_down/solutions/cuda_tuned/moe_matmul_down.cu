#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace moe_down {

constexpr int kWarps = 24;     // of a block: kSplit * kGroups
constexpr int kThreads = 32 * kWarps;
constexpr int kList = 256;     // blocks of rows that one thread block may meet
constexpr int kPitch = 36;     // floats from row to row of partial sums
constexpr int kMaxTiles = 3;   // tiles of 8 rows at most
constexpr int kNever = 1 << 29;

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
  int block_rows;  // rows of one expert that are done at once
  int chunks;      // of 64 along k
  int upe;         // units (of 32 columns) of an expert
  int span;        // chunks of a unit, padded
  int stages;      // blocks of rows whose x is staged at once (one tile each)
  int x_bytes;     // of staged x
};

__device__ __forceinline__ int load_int(const int* p) {
  int v;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_weights(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t load_scales(const uint8_t* p) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ void copy_async(float* to, const float* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// threadIdx.x, read anew: what follows from it need not stay in registers.
__device__ __forceinline__ int thread_index() {
  int v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}

// The first chunk of a warp; spreads the longer shares over the schedulers.
template <int kSplit>
__device__ __forceinline__ int first_chunk(int thread) {
  const int warp = thread >> 5;
  return (warp + warp / kSplit) % kSplit;
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

// The four pairs of numbers of a word, as bf16 of value (FP4 number) * 2^-126.
__device__ __forceinline__ void decode(uint32_t w, uint32_t (&a)[4]) {
  constexpr uint32_t kMask = 0x81C081C0u;
  a[0] = w & kMask;
  a[1] = (w << 3) & kMask;
  a[2] = (w << 6) & kMask;
  const uint32_t y = (w >> 7) & 0x00580058u;  // bits 13, 11, 10 at 6, 4, 3
  a[3] = ((y * 17u) & 0x01C001C0u) | ((w << 1) & 0x80008000u);
}

// 64 of k for two tiles of 16 columns and MT tiles of 8 rows.
template <int MT, bool High>
__device__ __forceinline__ void multiply(float (&acc)[2][MT][4], const uint4 (&w)[2],
                                         const uint32_t (&s)[2], const uint8_t* xp) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint4 b[MT];
#pragma unroll
    for (int m = 0; m < MT; ++m) b[m] = *reinterpret_cast<const uint4*>(xp + (m * 2 + h) * 512);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // fast: bf16 2^(scale - 1), right for scales up to 128; High: 2^(scale - 127)
      constexpr uint32_t kAdd = High ? 0u : 0x3F003F00u;
      const uint32_t low = __byte_perm(s[i], 0u, h ? 0x4242u : 0x4040u) * 128u + kAdd;
      const uint32_t high = __byte_perm(s[i], 0u, h ? 0x4343u : 0x4141u) * 128u + kAdd;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t word = h ? (j ? w[i].w : w[i].z) : (j ? w[i].y : w[i].x);
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
        for (int m = 0; m < MT; ++m) mma(acc[i][m], a, j ? b[m].z : b[m].x, j ? b[m].w : b[m].y);
      }
    }
  }
}

template <int MT>
__device__ __forceinline__ void chunk(float (&acc)[2][MT][4], const uint4 (&w)[2],
                                      const uint32_t (&s)[2], const uint8_t* xp) {
  if (__any_sync(0xffffffffu, ((s[0] | s[1]) & 0x80808080u) != 0u)) {
    multiply<MT, true>(acc, w, s, xp);
  } else {
    multiply<MT, false>(acc, w, s, xp);
  }
}

// The weights in flight, and where the next come from. Units count from the first unit of the
// block's first block of rows.
template <int D, int kSplit, int kGroups>
struct Stream {
  uint4 w[D][2];
  uint32_t s[D][2];
  const uint8_t* wp;
  const uint8_t* sp;
  int k;     // chunk that slot 0 of the next batch gets; kNever or more past the last unit
  int unit;

  __device__ __forceinline__ void seek(const Params& p, int last, const int4* list) {
    k = kNever;
    if (unit < last) {
      const int thread = thread_index();
      const int g = (thread >> 2) & 7, t = thread & 3;
      const int kq = first_chunk<kSplit>(thread);
      const int slot = int(unsigned(unit) / unsigned(p.upe));
      const int tile = unit - slot * p.upe;
      const size_t expert = size_t(list[slot].x);
      const size_t inner = size_t(p.inner);
      const int n16 = 2 * tile;
      const int scale_rows = (p.hidden + 255) / 256 * 8;
      wp = p.weights + expert * (size_t(p.hidden) / 2 * inner) + size_t(tile) * 16 * inner +
           ((g >> 1) * 2 * p.inner + (g & 1) * 64 + t * 16 + kq * 128);
      sp = p.scales + (expert * scale_rows + size_t((n16 >> 4) * 8 + (n16 & 7))) * inner +
           (((n16 >> 3) & 1) * 32 + g * 4 + kq * 64);
      k = kq;
    }
  }

  __device__ __forceinline__ void load(int d, const Params& p) {
    if (k + d * kSplit < p.chunks) {
      w[d][0] = load_weights(wp + d * (kSplit * 128));
      w[d][1] = load_weights((wp + 8 * size_t(p.inner)) + d * (kSplit * 128));
      s[d][0] = load_scales(sp + d * (kSplit * 64));
      s[d][1] = load_scales((sp + p.inner) + d * (kSplit * 64));
    }
  }

  __device__ __forceinline__ void advance(const Params& p, int last, const int4* list) {
    k += D * kSplit;
    wp += D * kSplit * 128;
    sp += D * kSplit * 64;
    if (k >= p.span) {
      unit += kGroups;
      seek(p, last, list);
    }
  }
};

// This group's units of one block of rows.
template <int D, int kSplit, int kGroups, int MT>
__device__ __forceinline__ void run_units(const Params& p, Stream<D, kSplit, kGroups>& stream,
                                          const int4* list, int slot, int last, int& unit,
                                          const uint8_t* xs, float* red, const float* gates,
                                          float* bias_rows) {
  constexpr int kGroupThreads = 32 * kSplit;
  constexpr int kPart = 8 * MT * kPitch;  // floats of a warp's partial sums
  const int end = min(last, (slot + 1) * p.upe);
  const int lane = int(threadIdx.x) & 31;
  const int kq = first_chunk<kSplit>(int(threadIdx.x));
  const uint8_t* const xlane =
      xs + ((lane & 3) * 8 + ((lane >> 2) ^ (2 * (lane & 3)))) * 16 + kq * (MT * 1024);
  while (unit < end) {
    {
      // the bias travels while the group multiplies; two buffers, as others may still read one
      const int thread = thread_index();
      const int local = thread % kGroupThreads, group = thread / kGroupThreads;
      if (local < 8) {
        const int column = (unit - slot * p.upe) * 32 + local * 4;
        copy_async(bias_rows + (group * 2 + ((unit / kGroups) & 1)) * 32 + local * 4,
                   p.bias + size_t(list[slot].x) * p.hidden + column);
      }
    }

    float acc[2][MT][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[i][m][c] = 0.0f;

    const uint8_t* xp = xlane;
#pragma unroll 1
    for (int k = kq; k < p.span; k += D * kSplit) {
#pragma unroll
      for (int d = 0; d < D; ++d) {
        if (k + d * kSplit < p.chunks) {
          chunk<MT>(acc, stream.w[d], stream.s[d], xp + d * (kSplit * MT * 1024));
        }
        stream.load(d, p);
      }
      xp += D * kSplit * MT * 1024;
      stream.advance(p, last, list);
    }

    const int thread = thread_index();
    const int local = thread % kGroupThreads, group = thread / kGroupThreads;
    group_sync<kGroupThreads>(1 + group);  // the unit before has been read
    float* const mine = red + (thread >> 5) * kPart + 2 * (thread & 3) * kPitch + ((thread >> 2) & 7);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        float* const to = mine + m * 8 * kPitch + i * 16;
        to[0] = acc[i][m][0];
        to[kPitch] = acc[i][m][1];
        to[8] = acc[i][m][2];
        to[kPitch + 8] = acc[i][m][3];
      }
    }
    copy_wait();
    group_sync<kGroupThreads>(1 + group);
    const int4 info = list[slot];
    const int n4 = (local & 7) * 4;
    const float* const from = red + group * kSplit * kPart + n4;
    const float* const bias_from = bias_rows + (group * 2 + ((unit / kGroups) & 1)) * 32 + n4;
    for (int q = local; q < 64 * MT; q += kGroupThreads) {
      const int row = q >> 3;
      if (row < info.z) {
        float4 sum = *reinterpret_cast<const float4*>(from + row * kPitch);
#pragma unroll
        for (int part = 1; part < kSplit; ++part) {
          const float4 more = *reinterpret_cast<const float4*>(from + part * kPart + row * kPitch);
          sum.x += more.x;
          sum.y += more.y;
          sum.z += more.z;
          sum.w += more.w;
        }
        const float4 bias = *reinterpret_cast<const float4*>(bias_from);
        const float gate = gates[row];
        const __nv_bfloat162 v0 =
            __floats2bfloat162_rn(gate * (sum.x + bias.x), gate * (sum.y + bias.y));
        const __nv_bfloat162 v1 =
            __floats2bfloat162_rn(gate * (sum.z + bias.z), gate * (sum.w + bias.w));
        uint2 packed;
        packed.x = *reinterpret_cast<const uint32_t*>(&v0);
        packed.y = *reinterpret_cast<const uint32_t*>(&v1);
        __nv_bfloat16* const out = static_cast<__nv_bfloat16*>(p.output) +
                                   size_t(info.y + row) * p.hidden +
                                   ((unit - slot * p.upe) * 32 + n4);
        *reinterpret_cast<uint2*>(out) = packed;
      }
    }
    unit += kGroups;
  }
}

template <int D, int kSplit, int kGroups, int MTMAX>
__global__ void __launch_bounds__(kThreads, 1) tensor_kernel(const Params p) {
  static_assert(kSplit * kGroups == kWarps, "all warps have a place");
  static_assert(MTMAX <= 3, "staging counts up to three tiles");
  constexpr int kStages = MTMAX == 1 ? 2 : 1;  // blocks of rows staged at once, at most
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  __shared__ int4 list[kList];  // expert, first row, rows
  __shared__ __align__(16) float bias_rows[kGroups * 2 * 32];
  __shared__ float gates[kStages * 8 * MTMAX];
  __shared__ int block_count;

  cudaGridDependencySynchronize();
  asm volatile("griddepcontrol.launch_dependents;");

  const int lane = int(threadIdx.x) & 31;
  const int warp = int(threadIdx.x) >> 5;
  const int blocks = int(gridDim.x), me = int(blockIdx.x);
  if (warp == 0) {
    int count = 0;
    for (int base = 0; base < p.experts; base += 32) {
      const int e = base + lane;
      int here = 0;
      if (e < p.experts) {
        const int rows = load_int(p.offsets + e + 1) - load_int(p.offsets + e);
        here = (rows + p.block_rows - 1) / p.block_rows;
      }
      count += __reduce_add_sync(0xffffffffu, here);
    }
    const int total = count * p.upe;
    const int share = total / blocks, rest = total % blocks;
    const int begin = me * share + min(me, rest);
    const int past = begin + share + (me < rest ? 1 : 0);
    if (begin < past) {
      const int slot0 = begin / p.upe, slot1 = (past - 1) / p.upe;
      int before = 0;
      for (int base = 0; base < p.experts; base += 32) {
        const int e = base + lane;
        int here = 0, start = 0, rows = 0;
        if (e < p.experts) {
          start = load_int(p.offsets + e);
          rows = load_int(p.offsets + e + 1) - start;
          here = (rows + p.block_rows - 1) / p.block_rows;
        }
        int upto = here;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
          const int v = __shfl_up_sync(0xffffffffu, upto, d);
          if (lane >= d) upto += v;
        }
        const int slot = before + upto - here;
        for (int i = max(0, slot0 - slot); i < here && slot + i <= slot1; ++i) {
          const int done = i * p.block_rows;
          list[slot + i - slot0] =
              make_int4(e, start + done, min(p.block_rows, rows - done), 0);
        }
        before += __shfl_sync(0xffffffffu, upto, 31);
      }
    }
    if (lane == 0) block_count = count;
  }
  __syncthreads();

  // from here on, units count from the first of the first block of rows
  int unit, last, slots;
  {
    const int total = block_count * p.upe;
    const int share = total / blocks, rest = total % blocks;
    const int begin = me * share + min(me, rest);
    const int past = begin + share + (me < rest ? 1 : 0);
    if (begin >= past) return;
    const int slot0 = begin / p.upe, slot1 = (past - 1) / p.upe;
    unit = begin - slot0 * p.upe + warp / kSplit;
    last = past - slot0 * p.upe;
    slots = slot1 - slot0 + 1;
  }

  // the first weights set out before x is staged
  Stream<D, kSplit, kGroups> stream;
#pragma unroll
  for (int d = 0; d < D; ++d) {
    stream.w[d][0] = stream.w[d][1] = make_uint4(0u, 0u, 0u, 0u);
    stream.s[d][0] = stream.s[d][1] = 0u;
  }
  stream.wp = p.weights;
  stream.sp = p.scales;
  stream.unit = unit;
  stream.seek(p, last, list);
#pragma unroll
  for (int d = 0; d < D; ++d) stream.load(d, p);
  stream.advance(p, last, list);

  uint8_t* const xs = shared_bytes;
  float* const red = reinterpret_cast<float*>(shared_bytes + p.x_bytes);
  const int stages = MTMAX == 1 ? p.stages : 1;

  for (int base = 0; base < slots; base += stages) {
    if (base != 0) __syncthreads();  // the rows before are no longer read
    const int staged = min(stages, slots - base);
    const int base_rows = list[base].z;
    const int tiles = (base_rows + 7) >> 3;

    {
      const int thread = thread_index();
      const int stage = thread / (8 * MTMAX), row = thread % (8 * MTMAX);
      if (stage < staged) {
        const int4 info = list[base + stage];
        if (row < info.z) {
          gates[thread] =
              __bfloat162float(static_cast<const __nv_bfloat16*>(p.gates)[info.y + row]);
        }
      }

      // pieces of 8 rows and 32 along k, of all tiles: those of one block of rows, or for
      // MTMAX = 1 one of each block of rows
      const int g = (thread >> 2) & 7, t = thread & 3;
      const int halves = 2 * p.chunks;
      const int pieces = (MTMAX == 1 ? staged : tiles) * halves;
      const int step = (MTMAX == 1 ? 1 : tiles) * 1024;  // bytes from chunk to chunk
      const int next = MTMAX == 1 ? p.chunks * 1024 : 1024;  // bytes from tile to tile
      const uint8_t* const x = static_cast<const uint8_t*>(p.x) + t * 16;
      uint8_t* const dst = xs + t * 4;
      constexpr int kBatch = MTMAX == 1 ? 4 : 6;
      for (int c = thread >> 5; c < pieces; c += kWarps * kBatch) {
        uint4 v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int q = c + kWarps * i;
          v[i] = make_uint4(0u, 0u, 0u, 0u);
          if (q < pieces) {
            const int tile = (q >= halves ? 1 : 0) + (q >= 2 * halves ? 1 : 0);
            const int piece = q - tile * halves;
            const int4 info = list[MTMAX == 1 ? base + tile : base];
            const int row = MTMAX == 1 ? g : tile * 8 + g;
            if (row < info.z) {
              v[i] = *reinterpret_cast<const uint4*>(
                  x + size_t(info.y + row) * (size_t(p.inner) * 2) + size_t(piece) * 64);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int q = c + kWarps * i;
          if (q < pieces) {
            const int tile = (q >= halves ? 1 : 0) + (q >= 2 * halves ? 1 : 0);
            const int piece = q - tile * halves;
            uint8_t* const to = dst + tile * next + (piece >> 1) * step + (piece & 1) * 512;
            *reinterpret_cast<uint32_t*>(to + (0 + (g ^ 0)) * 16) = v[i].x;
            *reinterpret_cast<uint32_t*>(to + (8 + (g ^ 2)) * 16) = v[i].y;
            *reinterpret_cast<uint32_t*>(to + (16 + (g ^ 4)) * 16) = v[i].z;
            *reinterpret_cast<uint32_t*>(to + (24 + (g ^ 6)) * 16) = v[i].w;
          }
        }
      }
    }
    __syncthreads();

    if constexpr (MTMAX == 1) {
      for (int stage = 0; stage < staged; ++stage) {
        run_units<D, kSplit, kGroups, 1>(p, stream, list, base + stage, last, unit,
                                         xs + stage * (p.chunks * 1024), red, gates + stage * 8,
                                         bias_rows);
      }
    } else {
      if (tiles == 1) {
        run_units<D, kSplit, kGroups, 1>(p, stream, list, base, last, unit, xs, red, gates,
                                         bias_rows);
      } else if (tiles == 2) {
        run_units<D, kSplit, kGroups, 2>(p, stream, list, base, last, unit, xs, red, gates,
                                         bias_rows);
      } else {
        run_units<D, kSplit, kGroups, 3>(p, stream, list, base, last, unit, xs, red, gates,
                                         bias_rows);
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
  const int scale_rows = (p.hidden + 255) / 256 * 8;
  const uint8_t* const wp = p.weights + size_t(expert) * (size_t(p.hidden) / 2 * inner) +
                            size_t(tile) * 8 * inner + size_t(g >> 1) * 2 * inner + (g & 1) * 64 +
                            t * 16;
  const uint8_t* const sp =
      p.scales + (size_t(expert) * scale_rows + size_t((tile >> 4) * 8 + (tile & 7))) * inner +
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

// Chunks of a unit, padded to whole batches of D for each of `split` warps.
inline int padded(int chunks, int split, int depth) {
  const int each = (chunks + split - 1) / split;
  return (each + depth - 1) / depth * depth * split;
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

  Params p;
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
  p.block_rows = 8;
  p.chunks = int(inner / 64);
  p.upe = int(hidden / 32);
  p.span = 0;
  p.stages = 1;
  p.x_bytes = 0;

  const DLDevice device = output.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));

  if (is_bfloat && aligned(p.x, 16) && aligned(p.weights, 16) && aligned(p.scales, 4) &&
      aligned(p.bias, 16) && aligned(p.output, 8)) {
    int processors = 0, most = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device.device_id));
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.device_id));
    const int64_t room = int64_t(most) - 6144;  // less what is static
    const int64_t x_tile = inner / 64 * 1024;
    const int64_t red_tile = int64_t(kWarps) * 8 * kPitch * 4;
    const int64_t each = x_tile + red_tile;
    int64_t tiles = (tokens + 7) / 8;
    if (tiles > kMaxTiles) tiles = kMaxTiles;
    if (rows <= 4 * experts) tiles = 1;  // few rows for each expert: blocks of 8 suffice
    if (tiles * each > room) tiles = room / each;
    if (tiles >= 1) {
      const int64_t active = rows < experts ? rows : experts;
      const int64_t row_blocks = active + rows / (8 * tiles);
      const int64_t units = row_blocks * (hidden / 32);
      const int64_t blocks = units < processors ? units : processors;
      if (units < (int64_t(1) << 28) && row_blocks / blocks + 3 <= kList) {
        p.block_rows = int(8 * tiles);
        int64_t x_tiles = tiles;
        if (tiles == 1 && 2 * x_tile + red_tile <= room) {
          p.stages = 2;
          x_tiles = 2;
        }
        p.x_bytes = int(x_tiles * x_tile);
        const size_t bytes = size_t(x_tiles * x_tile + tiles * red_tile);
        void (*kernel)(Params) = nullptr;
        if (tiles > 1) {
          kernel = tensor_kernel<2, 4, 6, kMaxTiles>;
          p.span = padded(p.chunks, 4, 2);
        } else if (tokens <= 4) {
          kernel = tensor_kernel<3, 8, 3, 1>;
          p.span = padded(p.chunks, 8, 3);
        } else {
          kernel = tensor_kernel<3, 4, 6, 1>;
          p.span = padded(p.chunks, 4, 3);
        }
        launch(kernel, dim3(unsigned(blocks)), kThreads, bytes, stream, p);
        return;
      }
    }
  }

  const dim3 grid(unsigned(experts), unsigned((hidden + 63) / 64));
  if (is_float) {
    launch(plain_kernel<float>, grid, 128, 0, stream, p);
  } else {
    launch(plain_kernel<__nv_bfloat16>, grid, 128, 0, stream, p);
  }
}
