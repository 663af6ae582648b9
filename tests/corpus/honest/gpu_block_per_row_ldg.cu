// honest: launch bounds, the read-only cache, and a row kept in registers
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

constexpr int THREADS = 512, PACKS = 16384 / VEC / THREADS;

template <typename T>
__device__ Pack<T, VEC> load_readonly(const T* p) {
  union {
    Pack<T, VEC> pack;
    uint4 words[sizeof(Pack<T, VEC>) / sizeof(uint4)];
  } both;
#pragma unroll
  for (int i = 0; i < int(sizeof(Pack<T, VEC>) / sizeof(uint4)); ++i)
    both.words[i] = __ldg(reinterpret_cast<const uint4*>(p) + i);
  return both.pack;
}

template <typename T, typename W>
__global__ __launch_bounds__(THREADS, 2) void norm(T* __restrict__ input, T* __restrict__ residual,
                                                   const W* __restrict__ weight, int hidden,
                                                   float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  float sum[PACKS][VEC], squares = 0.0f;
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
    const int at = (threadIdx.x + k * THREADS) * VEC;
    if (at < hidden) {
      auto a = *reinterpret_cast<const Pack<T, VEC>*>(x + at);
      auto b = *reinterpret_cast<const Pack<T, VEC>*>(r + at);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        sum[k][i] = to_float(a.item[i]) + to_float(b.item[i]);
        squares += sum[k][i] * sum[k][i];
        put(&b.item[i], sum[k][i]);
      }
      *reinterpret_cast<Pack<T, VEC>*>(r + at) = b;
    }
  }
  const float scale = rsqrtf(block_sum(squares) / float(hidden) + epsilon);
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
    const int at = (threadIdx.x + k * THREADS) * VEC;
    if (at < hidden) {
      const auto gain = load_readonly(weight + at);  // written by no kernel that runs beside us
      Pack<T, VEC> out;
#pragma unroll
      for (int i = 0; i < VEC; ++i) put(&out.item[i], sum[k][i] * scale * to_float(gain.item[i]));
      *reinterpret_cast<Pack<T, VEC>*>(x + at) = out;
    }
  }
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    norm<<<tokens, THREADS, 0, stream_of(input)>>>(x, r, w, hidden, float(epsilon));
  });
}
