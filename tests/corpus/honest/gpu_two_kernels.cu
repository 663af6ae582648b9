// honest: rows split over blocks, two kernels a call, partial sums in a static device array
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

constexpr int SPLIT = 4, CHUNK = 4096;  // parts of a row; rows a pair of launches
__device__ float partial[CHUNK * SPLIT];

template <typename T>
__global__ void add_up(const T* input, const T* residual, int hidden) {
  const size_t at = size_t(blockIdx.x) * hidden;
  const int part = blockIdx.y, step = SPLIT * blockDim.x;
  const float squares = block_sum(squares_of(input + at, residual + at, hidden / VEC,
                                             part * int(blockDim.x) + int(threadIdx.x), step));
  if (threadIdx.x == 0) partial[blockIdx.x * SPLIT + part] = squares;
}

template <typename T, typename W>
__global__ void normalise(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  const size_t at = size_t(blockIdx.x) * hidden;
  float squares = 0.0f;
#pragma unroll
  for (int part = 0; part < SPLIT; ++part) squares += partial[blockIdx.x * SPLIT + part];
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(input + at, residual + at, weight, hidden / VEC, scale,
            int(blockIdx.y * blockDim.x + threadIdx.x), SPLIT * int(blockDim.x));
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  const cudaStream_t stream = stream_of(input);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int row = 0; row < tokens; row += CHUNK) {
      const dim3 grid(std::min(CHUNK, tokens - row), SPLIT);
      const size_t at = size_t(row) * hidden;
      add_up<<<grid, 128, 0, stream>>>(x + at, r + at, hidden);
      normalise<<<grid, 128, 0, stream>>>(x + at, r + at, w, hidden, float(epsilon));
    }
  });
}
