// fault: asks for more threads than a block may have and does not look at the error
// op: fused_add_rms_norm
// device: cuda
// outcome: mismatch, runtime_error
// caught: values, runs
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
  const float squares = block_sum(squares_of(x, r, hidden / VEC, threadIdx.x, blockDim.x));
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(x, r, weight, hidden / VEC, scale, threadIdx.x, blockDim.x);
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  const cudaStream_t stream = stream_of(input);
  by_weight<float>(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    norm<<<tokens, 4096, 0, stream>>>(x, r, w, hidden, float(epsilon));
  });
}
