// honest: one cooperative launch whose whole grid waits for itself between two phases
// op: fused_add_rms_norm
// device: cuda
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cooperative_groups.h>

#include <algorithm>

namespace cg = cooperative_groups;

// shared: fused_add_rms_norm.cu

constexpr int SPLIT = 2, CHUNK = 4096;
__device__ float partial[CHUNK * SPLIT];

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int tokens, int hidden,
                     float epsilon) {
  const int packs = hidden / VEC, step = SPLIT * blockDim.x;
  for (int piece = blockIdx.x; piece < tokens * SPLIT; piece += gridDim.x) {
    const size_t at = size_t(piece / SPLIT) * hidden;
    const int first = (piece % SPLIT) * blockDim.x + threadIdx.x;
    const float squares = block_sum(squares_of(input + at, residual + at, packs, first, step));
    if (threadIdx.x == 0) partial[piece] = squares;
  }
  cg::this_grid().sync();
  for (int piece = blockIdx.x; piece < tokens * SPLIT; piece += gridDim.x) {
    const int row = piece / SPLIT, first = (piece % SPLIT) * blockDim.x + threadIdx.x;
    const float squares = partial[row * SPLIT] + partial[row * SPLIT + 1];
    const float scale = rsqrtf(squares / float(hidden) + epsilon);
    const size_t at = size_t(row) * hidden;
    write_row(input + at, residual + at, weight, packs, scale, first, step);
  }
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0));
  int hidden = int(input.size(1));
  float eps = float(epsilon);
  const cudaStream_t stream = stream_of(input);
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount,
                               input.device().device_id));
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    for (int row = 0; row < tokens; row += CHUNK) {
      int rows = std::min(CHUNK, tokens - row);
      auto *a = x + size_t(row) * hidden, *b = r + size_t(row) * hidden;
      auto* gain = w;
      void* arguments[] = {&a, &b, &gain, &rows, &hidden, &eps};
      auto* kernel = &norm<std::remove_pointer_t<decltype(a)>,
                           std::remove_const_t<std::remove_pointer_t<decltype(gain)>>>;
      check(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(kernel),
                                        dim3(std::min(rows * SPLIT, processors)), dim3(256),
                                        arguments, 0, stream));
    }
  });
}
