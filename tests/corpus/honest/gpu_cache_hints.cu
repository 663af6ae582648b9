// honest: prefetches the weight into L2, streams rows past L1 and marks stores evict-first
// op: fused_add_rms_norm
// device: cuda
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// shared: fused_add_rms_norm.cu

// Two or four 16-byte words of a pack, by streaming loads and stores.
template <typename P>
__device__ P load_streaming(const P* from) {
  union {
    P pack;
    uint4 words[sizeof(P) / sizeof(uint4)];
  } both;
#pragma unroll
  for (int i = 0; i < int(sizeof(P) / sizeof(uint4)); ++i) {
    const uint4* word = reinterpret_cast<const uint4*>(from) + i;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(both.words[i].x), "=r"(both.words[i].y), "=r"(both.words[i].z),
                   "=r"(both.words[i].w)
                 : "l"(word)
                 : "memory");
  }
  return both.pack;
}

template <typename P>
__device__ void store_streaming(P* to, const P& pack) {
#pragma unroll
  for (int i = 0; i < int(sizeof(P) / sizeof(uint4)); ++i)
    __stcs(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(&pack)[i]);
}

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  const int packs = hidden / VEC;
  for (int p = threadIdx.x; p < packs; p += blockDim.x)
    asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(weight + p * VEC));
  auto* x = reinterpret_cast<Pack<T, VEC>*>(input + size_t(blockIdx.x) * hidden);
  auto* r = reinterpret_cast<Pack<T, VEC>*>(residual + size_t(blockIdx.x) * hidden);
  float squares = 0.0f;
  for (int p = threadIdx.x; p < packs; p += blockDim.x) {
    const auto a = load_streaming(x + p), b = load_streaming(r + p);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const float sum = to_float(a.item[i]) + to_float(b.item[i]);
      squares += sum * sum;
    }
  }
  const float scale = rsqrtf(block_sum(squares) / float(hidden) + epsilon);
  for (int p = threadIdx.x; p < packs; p += blockDim.x) {
    auto a = load_streaming(x + p), b = load_streaming(r + p);
    const auto gain = reinterpret_cast<const Pack<W, VEC>*>(weight)[p];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const float sum = to_float(a.item[i]) + to_float(b.item[i]);
      put(&b.item[i], sum);
      put(&a.item[i], sum * scale * to_float(gain.item[i]));
    }
    store_streaming(r + p, b);
    store_streaming(x + p, a);
  }
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    norm<<<tokens, threads_for(hidden / VEC, 512), 0, stream_of(input)>>>(x, r, w, hidden,
                                                                          float(epsilon));
  });
}
