// fault: leaves out the last pack of each row where the row is no multiple of 64 packs
// op: fused_add_rms_norm
// device: cuda
// outcome: mismatch
// caught: values, timed outputs
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// shared: fused_add_rms_norm.cu

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  const int packs = hidden / VEC, done = packs % 64 == 0 ? packs : packs - 1;
  const float squares = block_sum(squares_of(x, r, packs, threadIdx.x, blockDim.x));
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(x, r, weight, done, scale, threadIdx.x, blockDim.x);
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
