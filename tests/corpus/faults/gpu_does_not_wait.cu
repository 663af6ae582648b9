// fault: begins before the kernel in front of it has ended, and does not wait for what that one writes
// op: fused_add_rms_norm
// device: cuda
// outcome: guard_violation
// caught: stream order
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
  if (tokens == 0) return;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(tokens);
  config.blockDim = dim3(threads_for(hidden / VEC, 512));
  config.stream = stream_of(input);
  config.attrs = &attribute;
  config.numAttrs = 1;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    using T = std::remove_pointer_t<decltype(x)>;
    using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
    check(cudaLaunchKernelEx(&config, norm<T, W>, x, r, w, hidden, float(epsilon)));
  });
}
