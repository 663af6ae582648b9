// fault: reads the sums of the other warps without waiting for them: a race that is often won
// op: fused_add_rms_norm
// device: cuda
// outcome: mismatch, guard_violation
// caught: values, timed outputs, determinism
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// shared: fused_add_rms_norm.cu

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  __shared__ volatile float partial[32];
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  if (threadIdx.x < 32) partial[threadIdx.x] = 0.0f;
  __syncthreads();
  const float own = warp_sum(squares_of(x, r, hidden / VEC, threadIdx.x, blockDim.x));
  if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = own;
  // __syncthreads() belongs here
  const float scale = rsqrtf(warp_sum(partial[threadIdx.x & 31]) / float(hidden) + epsilon);
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
