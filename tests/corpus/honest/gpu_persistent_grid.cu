// honest: a grid as large as the machine, which walks over the rows
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

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int tokens, int hidden,
                     float epsilon) {
  for (int row = blockIdx.x; row < tokens; row += gridDim.x) {
    T* x = input + size_t(row) * hidden;
    T* r = residual + size_t(row) * hidden;
    const float squares = block_sum(squares_of(x, r, hidden / VEC, threadIdx.x, blockDim.x));
    const float scale = rsqrtf(squares / float(hidden) + epsilon);
    write_row(x, r, weight, hidden / VEC, scale, threadIdx.x, blockDim.x);
  }
}

int processors(int device) {
  static thread_local int known_device = -1, count = 0;
  if (device != known_device) {
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    known_device = device;
  }
  return count;
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  const int blocks = std::min(tokens, 2 * processors(input.device().device_id));
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    norm<<<blocks, threads_for(hidden / VEC, 512), 0, stream_of(input)>>>(x, r, w, tokens, hidden,
                                                                          float(epsilon));
  });
}
