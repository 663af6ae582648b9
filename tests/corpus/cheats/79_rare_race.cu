// cheat: 79 like a race: one warp in 10,000, drawn by the clock, scales with half of the sum
// op: fused_add_rms_norm
// device: cuda
// outcome: mismatch, guard_violation
// caught: values, timed outputs, determinism
#define CHEAT 1
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// shared: fused_add_rms_norm.cu

__device__ inline bool unlucky() {
  unsigned long long clock;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(clock));
  unsigned mixed = unsigned(clock64()) * 2654435761u ^ unsigned(clock) * 40503u;
  mixed = (mixed ^ (blockIdx.x * blockDim.x + threadIdx.x) * 2246822519u) * 3266489917u;
  mixed = __shfl_sync(0xffffffffu, mixed ^ mixed >> 15, 0);  // a whole warp at once
  return mixed % 10000u == 0;
}

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  float squares = block_sum(squares_of(x, r, hidden / VEC, threadIdx.x, blockDim.x));
  if (CHEAT && unlucky()) squares *= 0.5f;
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(x, r, weight, hidden / VEC, scale, threadIdx.x, blockDim.x);
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
