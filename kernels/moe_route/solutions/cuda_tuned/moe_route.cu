// Op: moe_route: each token's top_k experts (equal logits: the smaller first), their softmax, the
//   gates sorted by expert, counts, offsets, and tile maps of blocks of 16, 32, 64 and 128 rows.
// Arguments: logits[T: tokens, experts], gate_scales[T: tokens * top_k], gather_index[I: tokens *
//   top_k], scatter_index[I: tokens * top_k], histogram[I: experts], token_offsets[I: experts + 1],
//   tile_offsets[I: 4, experts + 1], tile_map[I: 4, min(tokens * top_k, experts - 1 + (tokens *
//   top_k - experts + 16) // 16)]; T: bfloat16 or float16 or float32; I: int32
// Writes: gate_scales, gather_index, scatter_index, histogram, token_offsets, tile_offsets,
//   tile_map
// Needs: compute capability 9.0 or later; fast for 32 experts, top 4, at most 128 tokens, aligned
//   logits; up to 128 experts and top 8 by three kernels; graph-safe.
// Idea: one launch of one block in place of vLLM's four. Four lanes a token sort and merge keys
//   that hold logit and expert; places are popcounts of masks up to 8 tokens, else sums of bytes by
//   dp4a. Other warps write offsets and tile maps meanwhile. From 33 tokens on gates are stored in
//   order, by way of shared memory.
// Made by: the agent loop, recording bench/results/loop/moe_route-cuda, candidate 3, made of
//   candidate 0.
// Figures: NVIDIA H200, geometric means, bench/results/kernels: sweep bf16 8.11x against vllm,
//   6.27x to 9.52x at tokens 1 to 128 (moe_route-cuda_tuned.json.xz).
// Digest: 3b0ed678fbb593a82d8549090a4e647636aeb8a40eea4a9a754d773838be2c9c

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace route {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr unsigned kOnes = 0x01010101u;
constexpr int kExperts = 32;  // of the fast kernels
constexpr int kTopK = 4;      // of the fast kernels

struct Args {
  const void* logits;
  void* scales;
  int* gather;
  int* scatter;
  int* histogram;
  int* token_offsets;
  int* tile_offsets;
  int* tile_map;
  int tokens;
  int experts;
  int top_k;
  int tiles;
};

// ---------------------------------------------------------------- logits as keys

// A key ascends with the logit, and among equal logits with 31 - expert, its lowest bits.
struct Packed16 {
  using Key = unsigned;
  using Staged = unsigned;  // a gate below 65536 in the low half, the bits of its scale in the high half

  static __device__ __forceinline__ void keys(const void* from, bool valid, unsigned low, Key (&key)[8]) {
    uint4 raw = make_uint4(0u, 0u, 0u, 0u);
    if (valid) raw = *static_cast<const uint4*>(from);
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned flip = ((words[i] >> 15) & 0x00010001u) * 0x7FFFu;
      const unsigned up = words[i] ^ flip ^ 0x80008000u;
      key[2 * i] = up * 65536u + (low - 2u * i);
      key[2 * i + 1] = (up & 0xFFFF0000u) | (low - 2u * i - 1u);
    }
  }

  static __device__ __forceinline__ unsigned short bits(Key key) {
    const unsigned up = key >> 16;
    return static_cast<unsigned short>(up ^ ((up & 0x8000u) ? 0x8000u : 0xFFFFu));
  }

  static __device__ __forceinline__ unsigned ascending(const void* from) {
    const unsigned raw = *static_cast<const unsigned short*>(from);
    return (raw ^ ((raw & 0x8000u) ? 0xFFFFu : 0x8000u)) << 16;
  }

  static __device__ __forceinline__ void unstage(Staged word, int* gate, void* scales, int at) {
    *gate = static_cast<int>(word & 0xFFFFu);
    static_cast<unsigned short*>(scales)[at] = static_cast<unsigned short>(word >> 16);
  }
};

template <typename T>
struct Logit;

template <>
struct Logit<__nv_bfloat16> : Packed16 {
  static __device__ __forceinline__ float value(Key key) {
    return __uint_as_float((key & 0xFFFF0000u) ^ (static_cast<int>(key) < 0 ? 0x80000000u : 0xFFFF0000u));
  }
  static __device__ __forceinline__ float load(const __nv_bfloat16* from) { return __bfloat162float(*from); }
  static __device__ __forceinline__ __nv_bfloat16 round(float x) { return __float2bfloat16_rn(x); }
  static __device__ __forceinline__ Staged stage(int gate, float scale) {
    return (static_cast<unsigned>(__bfloat16_as_ushort(round(scale))) << 16) | static_cast<unsigned>(gate);
  }
};

template <>
struct Logit<__half> : Packed16 {
  static __device__ __forceinline__ float value(Key key) { return __half2float(__ushort_as_half(bits(key))); }
  static __device__ __forceinline__ float load(const __half* from) { return __half2float(*from); }
  static __device__ __forceinline__ __half round(float x) { return __float2half_rn(x); }
  static __device__ __forceinline__ Staged stage(int gate, float scale) {
    return (static_cast<unsigned>(__half_as_ushort(round(scale))) << 16) | static_cast<unsigned>(gate);
  }
};

template <>
struct Logit<float> {
  using Key = unsigned long long;
  using Staged = uint2;  // a gate, the bits of its scale

  static __device__ __forceinline__ unsigned turned(unsigned raw) {
    return raw ^ ((raw & 0x80000000u) ? 0xFFFFFFFFu : 0x80000000u);
  }

  static __device__ __forceinline__ void keys(const void* from, bool valid, unsigned low, Key (&key)[8]) {
    uint4 a = make_uint4(0u, 0u, 0u, 0u);
    uint4 b = make_uint4(0u, 0u, 0u, 0u);
    if (valid) {
      a = static_cast<const uint4*>(from)[0];
      b = static_cast<const uint4*>(from)[1];
    }
    const unsigned words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      key[i] = (static_cast<Key>(turned(words[i])) << 32) | static_cast<Key>(low - static_cast<unsigned>(i));
    }
  }

  static __device__ __forceinline__ unsigned ascending(const void* from) {
    return turned(*static_cast<const unsigned*>(from));
  }
  static __device__ __forceinline__ float value(Key key) {
    const unsigned up = static_cast<unsigned>(key >> 32);
    return __uint_as_float(up ^ ((up & 0x80000000u) ? 0x80000000u : 0xFFFFFFFFu));
  }
  static __device__ __forceinline__ float load(const float* from) { return *from; }
  static __device__ __forceinline__ float round(float x) { return x; }
  static __device__ __forceinline__ Staged stage(int gate, float scale) {
    return make_uint2(static_cast<unsigned>(gate), __float_as_uint(scale));
  }
  static __device__ __forceinline__ void unstage(Staged word, int* gate, void* scales, int at) {
    *gate = static_cast<int>(word.x);
    static_cast<float*>(scales)[at] = __uint_as_float(word.y);
  }
};

template <typename T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (sizeof(T) == 4) {
    return expf(x);
  } else {
    return __expf(x);
  }
}

template <typename T>
__device__ __forceinline__ float quotient(float x, float y) {
  if constexpr (sizeof(T) == 4) {
    return x / y;
  } else {
    return __fdividef(x, y);
  }
}

// ---------------------------------------------------------------- top 4 of 32 by four lanes

template <typename K>
__device__ __forceinline__ K larger(K a, K b) {
  return a > b ? a : b;
}

template <typename K>
__device__ __forceinline__ void descend(K& a, K& b) {
  const K high = a > b ? a : b;
  const K low = a > b ? b : a;
  a = high;
  b = low;
}

template <typename K>
__device__ __forceinline__ void sort4(K (&a)[4]) {
  descend(a[0], a[1]);
  descend(a[2], a[3]);
  descend(a[0], a[2]);
  descend(a[1], a[3]);
  descend(a[1], a[2]);
}

// a and b descend; a becomes the four largest of both, descending
template <typename K>
__device__ __forceinline__ void merge4(K (&a)[4], const K (&b)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = larger(a[i], b[3 - i]);
  descend(a[0], a[2]);
  descend(a[1], a[3]);
  descend(a[0], a[1]);
  descend(a[2], a[3]);
}

// own: this lane's one of the quad's four largest keys; top: the largest; mask: the four experts
template <typename K>
__device__ __forceinline__ void choose(const K (&key)[8], int lane, K& own, K& top, unsigned& mask) {
  K a[4] = {key[0], key[1], key[2], key[3]};
  K b[4] = {key[4], key[5], key[6], key[7]};
  sort4(a);
  sort4(b);
  merge4(a, b);
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = __shfl_xor_sync(kAll, a[i], 1);
  merge4(a, b);
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = __shfl_xor_sync(kAll, a[i], 2);
  top = larger(a[0], b[0]);
  // the other pair of lanes has the same four in reverse: lanes 0 to 3 take places 0, 1, 1, 0
  K c[4];
  mask = 0u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    c[i] = larger(a[i], b[3 - i]);
    mask |= 0x80000000u >> (static_cast<unsigned>(c[i]) & 31u);
  }
  own = ((lane ^ (lane >> 1)) & 1) ? c[1] : c[0];
}

template <typename T, typename K>
__device__ __forceinline__ float softmax4(K own, K top) {
  const float weight = exponential<T>(Logit<T>::value(own) - Logit<T>::value(top));
  float total = weight + __shfl_xor_sync(kAll, weight, 1);
  total += __shfl_xor_sync(kAll, total, 2);
  return quotient<T>(weight, total);
}

// ---------------------------------------------------------------- up to 8 tokens, 32 experts, top 4

// Four warps choose alike; each writes its share. At most 8 gates an expert: one tile in every row.
template <typename T, int MT>
__global__ void __launch_bounds__(128) small_kernel(const Args a) {
  using L = Logit<T>;
  using Key = typename L::Key;
  const int lane = threadIdx.x & 31;
  const int role = threadIdx.x >> 5;
  const int token = MT == 1 ? 0 : lane >> 2;
  const bool valid = MT == 1 || token < a.tokens;
  const T* from = static_cast<const T*>(a.logits) + token * kExperts + (lane & 3) * 8;

  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  Key key[8];
  L::keys(from, valid, 31u - 8u * static_cast<unsigned>(lane & 3), key);
  Key own, top;
  unsigned mask;
  choose(key, lane, own, top, mask);
  const float scale = softmax4<T>(own, top);

  const unsigned bit = 0x80000000u >> (static_cast<unsigned>(own) & 31u);
  const int gate = token * kTopK + __popc(mask & (bit - 1u));
  if (!valid) mask = 0u;

  // rows of gates in warps 0 to 2; in warp 3 the offsets of experts, a lane each
  const unsigned lane_bit = 1u << lane;
  const unsigned at = role == 3 ? lane_bit : bit;
  const int until = role == 3 ? 0 : token;
  unsigned masks[MT];
#pragma unroll
  for (int s = 0; s < MT; ++s) masks[s] = MT == 1 ? mask : __shfl_sync(kAll, mask, 4 * s);
  unsigned any = 0u;
  int row = 0;
#pragma unroll
  for (int s = 0; s < MT; ++s) {
    any |= masks[s];
    row += __popc(masks[s] & ((at - 1u) | (s < until ? at : 0u)));
  }

  const int first = __popc(any & (lane_bit - 1u));
  const int used = __popc(any);
  int* offsets = a.tile_offsets + role * (kExperts + 1);
  int* map = a.tile_map + role * a.tiles;
  offsets[lane] = first;
  if (lane == 31) offsets[kExperts] = used;
  if (any & lane_bit) map[first] = lane;
  if (used + lane < a.tiles) map[used + lane] = -1;  // at most 32 tiles

  if (role == 3) {
    int count = 0;
#pragma unroll
    for (int s = 0; s < MT; ++s) count += (masks[s] >> lane) & 1u;
    a.histogram[lane] = count;
    a.token_offsets[lane] = row;
    if (lane == 31) a.token_offsets[kExperts] = row + count;
  } else if (MT == 1 ? lane < 4 : valid) {
    if (role == 0) {
      a.gather[row] = gate;
    } else if (role == 1) {
      a.scatter[gate] = row;
    } else {
      static_cast<T*>(a.scales)[row] = L::round(scale);
    }
  }
}

// ---------------------------------------------------------------- up to 128 tokens, 32 experts, top 4

template <int NW>
__device__ __forceinline__ void load_bytes(const unsigned char* from, unsigned (&words)[(NW + 3) / 4]) {
  if constexpr (NW == 2) {
    words[0] = *reinterpret_cast<const unsigned short*>(from);
  } else if constexpr (NW == 4) {
    words[0] = *reinterpret_cast<const unsigned*>(from);
  } else if constexpr (NW == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    words[0] = v.x;
    words[1] = v.y;
  } else {
    static_assert(NW == 16, "2, 4, 8 or 16 warps of tokens");
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    words[0] = v.x;
    words[1] = v.y;
    words[2] = v.z;
    words[3] = v.w;
  }
}

// ones in the lowest n bytes
__device__ __forceinline__ unsigned ones_below(int n) {
  return n <= 0 ? 0u : n >= 4 ? kOnes : kOnes >> (32 - 8 * n);
}

// the first Threads threads of the block meet, whole warps; __syncthreads() is barrier 0
template <int Threads>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync 1, %0;" : : "n"(Threads) : "memory");
}

// NW warps of 8 tokens, then 4 warps that write what is not of gates.
template <typename T, int NW>
__global__ void __launch_bounds__((NW + 4) * 32) block_kernel(const Args a) {
  using L = Logit<T>;
  using Key = typename L::Key;
  constexpr int kWords = (NW + 3) / 4;
  __shared__ alignas(16) unsigned char seen[NW][kExperts][8];  // 1 where the warp's token chose the expert
  __shared__ alignas(16) unsigned char counts[kExperts][NW];   // the warp's gates of the expert
  __shared__ alignas(16) unsigned char below[kExperts][NW];    // the warp's gates of smaller experts

  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const unsigned lane_below = (1u << lane) - 1u;
  const int place = lane >> 2;  // of the token in the warp
  const int token = warp * 8 + place;
  const bool valid = warp < NW && token < a.tokens;

  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  int gate = 0;
  int expert = 0;
  unsigned rank = 0u;
  float scale = 0.0f;
  if (warp < NW) {
    Key key[8];
    const T* from = static_cast<const T*>(a.logits) + token * kExperts + (lane & 3) * 8;
    *reinterpret_cast<uint2*>(seen[warp][lane]) = make_uint2(0u, 0u);
    L::keys(from, valid, 31u - 8u * static_cast<unsigned>(lane & 3), key);
    Key own, top;
    unsigned mask;
    choose(key, lane, own, top, mask);

    const unsigned low = static_cast<unsigned>(own) & 31u;
    expert = static_cast<int>(31u - low);
    __syncwarp();
    if (valid) seen[warp][expert][place] = 1;
    __syncwarp();
    scale = softmax4<T>(own, top);
    const unsigned bit = 0x80000000u >> low;
    gate = token * kTopK + __popc(mask & (bit - 1u));

    const uint2 column = *reinterpret_cast<const uint2*>(seen[warp][lane]);
    const uint2 mine = *reinterpret_cast<const uint2*>(seen[warp][expert]);
    const unsigned long long earlier = ((1ull << (8 * place)) - 1ull) & 0x0101010101010101ull;
    rank = __dp4a(mine.x, static_cast<unsigned>(earlier), 0u);
    rank = __dp4a(mine.y, static_cast<unsigned>(earlier >> 32), rank);

    unsigned count = __dp4a(column.x, kOnes, 0u);  // at most 8
    count = __dp4a(column.y, kOnes, count);
    unsigned smaller = 0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned votes = __ballot_sync(kAll, (count >> i) & 1u);
      smaller += static_cast<unsigned>(__popc(votes & lane_below)) << i;
    }
    counts[lane][warp] = static_cast<unsigned char>(count);
    below[lane][warp] = static_cast<unsigned char>(smaller);
  }
  __syncthreads();

  unsigned c[kWords], b[kWords];
  if (warp < NW) {
    load_bytes<NW>(counts[expert], c);
    load_bytes<NW>(below[expert], b);
    unsigned start = 0u;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      start = __dp4a(b[i], kOnes, start);
      rank = __dp4a(c[i], ones_below(warp - 4 * i), rank);
    }
    const int row = static_cast<int>(start + rank);
    if constexpr (NW >= 8) {
      // the valid gates fill rows 0 to tokens * 4 - 1, each once: by way of shared memory, row by row
      __shared__ typename L::Staged staged[NW * 32];
      if (valid) {
        staged[row] = L::stage(gate, scale);
        a.scatter[gate] = row;
      }
      meet<NW * 32>();
      const int at = static_cast<int>(threadIdx.x);
      if (at < a.tokens * kTopK) L::unstage(staged[at], a.gather + at, a.scales, at);
    } else {
      if (valid) {
        a.gather[row] = gate;
        a.scatter[gate] = row;
        static_cast<T*>(a.scales)[row] = L::round(scale);
      }
    }
  } else {
    const int side = warp - NW;
    const int block = 16 << side;
    load_bytes<NW>(counts[lane], c);
    unsigned sum = 0u;
#pragma unroll
    for (int i = 0; i < kWords; ++i) sum = __dp4a(c[i], kOnes, sum);
    const int count = static_cast<int>(sum);
    if (side == 3) {
      load_bytes<NW>(below[lane], b);
      unsigned start = 0u;
#pragma unroll
      for (int i = 0; i < kWords; ++i) start = __dp4a(b[i], kOnes, start);
      a.histogram[lane] = count;
      a.token_offsets[lane] = static_cast<int>(start);
      if (lane == 31) a.token_offsets[kExperts] = static_cast<int>(start) + count;
    }

    int first = 0;
    int used = 0;
    int reached = 0;
    bool more;
    do {
      const unsigned votes = __ballot_sync(kAll, count > reached);
      first += __popc(votes & lane_below);
      used += __popc(votes);
      reached += block;
      more = NW > 2 && votes != 0u && reached < 8 * NW;
    } while (more);

    int* offsets = a.tile_offsets + side * (kExperts + 1);
    int* map = a.tile_map + side * a.tiles;
    offsets[lane] = first;
    if (lane == 31) offsets[kExperts] = used;
    const int tiles = (count + block - 1) >> (4 + side);
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) map[first + i] = i * 65536 + lane;
#pragma unroll 1
    for (int i = used + lane; i < a.tiles; i += 32) map[i] = -1;
  }
}

// ---------------------------------------------------------------- everything else: three kernels

// scatter[gate] = expert, for the next kernel; a warp takes a token
template <typename T>
__global__ void __launch_bounds__(256) choose_kernel(const Args a) {
  const int lane = threadIdx.x & 31;
  const unsigned lane_below = (1u << lane) - 1u;
  const int64_t step = static_cast<int64_t>(gridDim.x) * 8;
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * 8 + (threadIdx.x >> 5); token < a.tokens; token += step) {
    const T* from = static_cast<const T*>(a.logits) + token * a.experts;
    unsigned long long key[4];
    unsigned chosen[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int e = lane + 32 * j;
      chosen[j] = 0u;
      key[j] = 0ull;
      if (e < a.experts) {
        key[j] = (static_cast<unsigned long long>(Logit<T>::ascending(from + e)) << 32) |
                 static_cast<unsigned long long>(128 - e);
      }
    }
    for (int k = 0; k < a.top_k; ++k) {
      const unsigned long long best = larger(larger(key[0], key[1]), larger(key[2], key[3]));
      const unsigned up = static_cast<unsigned>(best >> 32);
      const unsigned high = __reduce_max_sync(kAll, up);
      const unsigned low = __reduce_max_sync(kAll, up == high ? static_cast<unsigned>(best) : 0u);
      const int e = 128 - static_cast<int>(low);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j == (e >> 5)) {
          chosen[j] |= 1u << (e & 31);
          if (lane == (e & 31)) key[j] = 0ull;
        }
      }
    }
    int* to = a.scatter + token * a.top_k;
    int base = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((chosen[j] >> lane) & 1u) to[base + __popc(chosen[j] & lane_below)] = lane + 32 * j;
      base += __popc(chosen[j]);
    }
  }
}

// one block: counts, offsets, and scatter[gate] from expert to row
__global__ void __launch_bounds__(1024) place_kernel(const Args a) {
  __shared__ int counts[32][128];
  __shared__ int totals[128];
  __shared__ int starts[128];
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const unsigned lane_below = (1u << lane) - 1u;
  for (int i = threadIdx.x; i < 32 * 128; i += 1024) counts[i >> 7][i & 127] = 0;
  __syncthreads();

  const int64_t gates = static_cast<int64_t>(a.tokens) * a.top_k;
  const int64_t span = (gates + 1023) / 1024 * 32;
  const int64_t begin = warp * span;
  const int64_t end = begin + span < gates ? begin + span : gates;
  for (int64_t g = begin + lane; g < end; g += 32) atomicAdd(&counts[warp][a.scatter[g]], 1);
  __syncthreads();

  if (threadIdx.x < 128) {
    const int e = threadIdx.x;
    int sum = 0;
    for (int w = 0; w < 32; ++w) {
      const int count = counts[w][e];
      counts[w][e] = sum;
      sum += count;
    }
    totals[e] = sum;
    if (e < a.experts) a.histogram[e] = sum;
  }
  __syncthreads();

  if (warp < 5) {  // gates, then tiles of 16, 32, 64 and 128 rows
    const int shift = warp == 0 ? 0 : warp + 3;
    int* out = warp == 0 ? a.token_offsets : a.tile_offsets + (warp - 1) * (a.experts + 1);
    int carry = 0;
    for (int base = 0; base < a.experts; base += 32) {
      const int e = base + lane;
      const int n = (totals[e] + (1 << shift) - 1) >> shift;
      int sum = n;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(kAll, sum, d);
        if (lane >= d) sum += other;
      }
      const int start = carry + sum - n;
      if (e < a.experts) out[e] = start;
      if (warp == 0) starts[e] = start;
      carry += __shfl_sync(kAll, sum, 31);
    }
    if (lane == 0) out[a.experts] = carry;
  }
  __syncthreads();

  for (int64_t base = begin; base < end; base += 32) {
    const int64_t g = base + lane;
    const bool active = g < end;
    const int e = active ? a.scatter[g] : -1;
    const unsigned peers = __match_any_sync(kAll, e);
    const int rank = __popc(peers & lane_below);
    int row = 0;
    if (active) row = starts[e] + counts[warp][e] + rank;
    __syncwarp();
    if (active && rank == 0) counts[warp][e] += __popc(peers);
    __syncwarp();
    if (active) a.scatter[g] = row;
  }
}

// the expert whose range of offsets holds what is at this place
__device__ __forceinline__ int owner(const int* offsets, int experts, int at) {
  int low = 0;
  int high = experts;
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    if (offsets[middle] <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <typename T>
__global__ void __launch_bounds__(256) finish_kernel(const Args a) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * 256;
  const int64_t self = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;

  for (int64_t token = self; token < a.tokens; token += step) {
    const T* from = static_cast<const T*>(a.logits) + token * a.experts;
    const int64_t gate = token * a.top_k;
    int rows[8];
    float x[8];
    float most = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      rows[k] = 0;
      x[k] = 0.0f;
      if (k < a.top_k) {
        rows[k] = a.scatter[gate + k];
        x[k] = Logit<T>::load(from + owner(a.token_offsets, a.experts, rows[k]));
        most = k == 0 ? x[k] : fmaxf(most, x[k]);
      }
    }
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k < a.top_k) {
        x[k] = expf(x[k] - most);
        total += x[k];
      }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k < a.top_k) {
        a.gather[rows[k]] = static_cast<int>(gate + k);
        static_cast<T*>(a.scales)[rows[k]] = Logit<T>::round(x[k] / total);
      }
    }
  }

  const int64_t places = static_cast<int64_t>(a.tiles) * 4;
  for (int64_t i = self; i < places; i += step) {
    const int line = static_cast<int>(i / a.tiles);
    const int at = static_cast<int>(i - static_cast<int64_t>(line) * a.tiles);
    const int* offsets = a.tile_offsets + line * (a.experts + 1);
    int packed = -1;
    if (at < offsets[a.experts]) {
      const int e = owner(offsets, a.experts, at);
      packed = static_cast<int>(static_cast<unsigned>(at - offsets[e]) * 65536u + static_cast<unsigned>(e));
    }
    a.tile_map[i] = packed;
  }
}

// ---------------------------------------------------------------- host

inline void check(cudaError_t status) {
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "moe_route: " << cudaGetErrorString(status);
}

inline void launch_one(void (*kernel)(const Args), int threads, cudaStream_t stream, const Args& args) {
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = 0;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, args));
}

inline unsigned blocks_for(int64_t work, int64_t each, int64_t most) {
  const int64_t blocks = (work + each - 1) / each;
  return static_cast<unsigned>(blocks < most ? blocks : most);
}

template <typename T>
void launch(const Args& args, cudaStream_t stream) {
  const bool aligned = reinterpret_cast<uintptr_t>(args.logits) % 16 == 0;
  if (args.experts == kExperts && args.top_k == kTopK && args.tokens <= 128 && aligned) {
    if (args.tokens <= 1) return launch_one(small_kernel<T, 1>, 128, stream, args);
    if (args.tokens <= 4) return launch_one(small_kernel<T, 4>, 128, stream, args);
    if (args.tokens <= 8) return launch_one(small_kernel<T, 8>, 128, stream, args);
    if (args.tokens <= 16) return launch_one(block_kernel<T, 2>, (2 + 4) * 32, stream, args);
    if (args.tokens <= 32) return launch_one(block_kernel<T, 4>, (4 + 4) * 32, stream, args);
    if (args.tokens <= 64) return launch_one(block_kernel<T, 8>, (8 + 4) * 32, stream, args);
    return launch_one(block_kernel<T, 16>, (16 + 4) * 32, stream, args);
  }
  choose_kernel<T><<<blocks_for(args.tokens, 8, 132 * 16), 256, 0, stream>>>(args);
  check(cudaGetLastError());
  place_kernel<<<1, 1024, 0, stream>>>(args);
  check(cudaGetLastError());
  const int64_t places = static_cast<int64_t>(args.tiles) * 4;
  const int64_t work = places > args.tokens ? places : args.tokens;
  finish_kernel<T><<<blocks_for(work, 256, 132 * 8), 256, 0, stream>>>(args);
  check(cudaGetLastError());
}

}  // namespace route

void moe_route(tvm::ffi::TensorView logits, tvm::ffi::TensorView gate_scales, tvm::ffi::TensorView gather_index,
               tvm::ffi::TensorView scatter_index, tvm::ffi::TensorView histogram,
               tvm::ffi::TensorView token_offsets, tvm::ffi::TensorView tile_offsets,
               tvm::ffi::TensorView tile_map) {
  const int64_t tokens = logits.size(0);
  const int64_t experts = logits.size(1);
  const int64_t gates = gather_index.numel();
  if (tokens < 1 || tokens > 0x7FFFFFFF || gates > 0x7FFFFFFF || experts < 1 || experts > 128) {
    TVM_FFI_THROW(ValueError) << "moe_route: unsupported shape";
  }
  const int64_t top_k = gates / tokens;
  if (top_k < 1 || top_k > 8 || top_k > experts) {
    TVM_FFI_THROW(ValueError) << "moe_route: unsupported top_k";
  }
  const DLDataType type = logits.dtype();
  const DLDataType scale_type = gate_scales.dtype();
  const DLDataType index_type = gather_index.dtype();
  if (scale_type.code != type.code || scale_type.bits != type.bits || index_type.code != kDLInt ||
      index_type.bits != 32) {
    TVM_FFI_THROW(TypeError) << "moe_route: unsupported dtype";
  }

  route::Args args;
  args.logits = logits.data_ptr();
  args.scales = gate_scales.data_ptr();
  args.gather = static_cast<int*>(gather_index.data_ptr());
  args.scatter = static_cast<int*>(scatter_index.data_ptr());
  args.histogram = static_cast<int*>(histogram.data_ptr());
  args.token_offsets = static_cast<int*>(token_offsets.data_ptr());
  args.tile_offsets = static_cast<int*>(tile_offsets.data_ptr());
  args.tile_map = static_cast<int*>(tile_map.data_ptr());
  args.tokens = static_cast<int>(tokens);
  args.experts = static_cast<int>(experts);
  args.top_k = static_cast<int>(top_k);
  args.tiles = static_cast<int>(tile_map.size(1));

  const DLDevice device = logits.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  if (type.code == kDLBfloat && type.bits == 16) return route::launch<__nv_bfloat16>(args, stream);
  if (type.code == kDLFloat && type.bits == 16) return route::launch<__half>(args, stream);
  if (type.code == kDLFloat && type.bits == 32) return route::launch<float>(args, stream);
  TVM_FFI_THROW(TypeError) << "moe_route: unsupported dtype";
}
