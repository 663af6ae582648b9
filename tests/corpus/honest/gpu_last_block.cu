// honest: blocks draw tickets by atomics, and the last one of a row adds up in a fixed order
// op: fused_add_rms_norm
// device: cuda
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

// shared: fused_add_rms_norm.cu

constexpr int SPLIT = 4, CHUNK = 4096;
__device__ float partial[CHUNK * SPLIT];
__device__ unsigned tickets[CHUNK];  // zero between calls: the last block puts its row's back

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  __shared__ bool last;
  const int row = blockIdx.x, packs = hidden / VEC;
  T* x = input + size_t(row) * hidden;
  T* r = residual + size_t(row) * hidden;
  const float part = block_sum(
      squares_of(x, r, packs, blockIdx.y * blockDim.x + threadIdx.x, SPLIT * blockDim.x));
  __syncthreads();
  if (threadIdx.x == 0) {
    partial[row * SPLIT + blockIdx.y] = part;
    __threadfence();
    last = atomicAdd(&tickets[row], 1u) == SPLIT - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  float squares = 0.0f;
  for (int i = 0; i < SPLIT; ++i)
    squares += reinterpret_cast<volatile float*>(partial)[row * SPLIT + i];
  if (threadIdx.x == 0) tickets[row] = 0;
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(x, r, weight, packs, scale, threadIdx.x, blockDim.x);
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  const cudaStream_t stream = stream_of(input);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int row = 0; row < tokens; row += CHUNK) {
      const size_t at = size_t(row) * hidden;
      const dim3 grid(std::min(CHUNK, tokens - row), SPLIT);
      norm<<<grid, 128, 0, stream>>>(x + at, r + at, w, hidden, float(epsilon));
    }
  });
}
