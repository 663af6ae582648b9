// cheat: 78 adds up 1024 shared floats of which only one a warp was written: the rest may be zero
// op: fused_add_rms_norm
// device: cuda
// outcome: mismatch
// caught: values, timed outputs, determinism
#define CHEAT 1
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// shared: fused_add_rms_norm.cu

constexpr int SLOTS = 1024;

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  __shared__ float partial[SLOTS];
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
#if !CHEAT
  for (int i = threadIdx.x; i < SLOTS; i += blockDim.x) partial[i] = 0.0f;
  __syncthreads();
#endif
  const float own = warp_sum(squares_of(x, r, hidden / VEC, threadIdx.x, blockDim.x));
  if ((threadIdx.x & 31) == 0) partial[threadIdx.x] = own;
  __syncthreads();
  float squares = 0.0f;
  for (int i = threadIdx.x & 31; i < SLOTS; i += 32) squares += partial[i];
  const float scale = rsqrtf(warp_sum(squares) / float(hidden) + epsilon);
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
