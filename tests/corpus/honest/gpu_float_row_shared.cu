// honest: up to 64 KB of shared memory hold the float32 row of sums
// op: fused_add_rms_norm
// device: cuda
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// shared: fused_add_rms_norm.cu

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  extern __shared__ float sums[];
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const float sum = to_float(x[i]) + to_float(r[i]);
    sums[i] = sum;
    put(r + i, sum);
    squares += sum * sum;
  }
  const float root = sqrtf(block_sum(squares) / float(hidden) + epsilon);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x)
    put(x + i, sums[i] / root * to_float(weight[i]));
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    using T = std::remove_pointer_t<decltype(x)>;
    using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
    static int granted = 48 * 1024;  // raised once for the longest row seen
    const int shared = hidden * int(sizeof(float));
    if (shared > granted) {
      check(cudaFuncSetAttribute(norm<T, W>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
      granted = shared;
    }
    norm<T, W><<<tokens, 512, shared, stream_of(input)>>>(x, r, w, hidden, float(epsilon));
  });
}
