// honest: float atomics; with two addends to a zero their order cannot be seen
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

constexpr int SPLIT = 2, CHUNK = 4096;
__device__ float total[CHUNK];

__global__ void clear(int rows) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < rows) total[row] = 0.0f;
}

template <typename T>
__global__ void add_up(const T* input, const T* residual, int hidden) {
  const size_t at = size_t(blockIdx.x) * hidden;
  const int first = blockIdx.y * blockDim.x + threadIdx.x;
  const float part = block_sum(
      squares_of(input + at, residual + at, hidden / VEC, first, SPLIT * blockDim.x));
  if (threadIdx.x == 0) atomicAdd(&total[blockIdx.x], part);
}

template <typename T, typename W>
__global__ void normalise(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  const size_t at = size_t(blockIdx.x) * hidden;
  const float scale = rsqrtf(total[blockIdx.x] / float(hidden) + epsilon);
  write_row(input + at, residual + at, weight, hidden / VEC, scale, threadIdx.x, blockDim.x);
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  const cudaStream_t stream = stream_of(input);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int row = 0; row < tokens; row += CHUNK) {
      const int rows = std::min(CHUNK, tokens - row);
      const size_t at = size_t(row) * hidden;
      clear<<<(rows + 255) / 256, 256, 0, stream>>>(rows);
      add_up<<<dim3(rows, SPLIT), 128, 0, stream>>>(x + at, r + at, hidden);
      normalise<<<rows, 256, 0, stream>>>(x + at, r + at, w, hidden, float(epsilon));
    }
  });
}
