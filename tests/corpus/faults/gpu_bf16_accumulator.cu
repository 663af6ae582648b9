// fault: keeps each thread's running sum of squares in bfloat16, where small addends vanish
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
  __nv_bfloat16 squares = __float2bfloat16_rn(0.0f);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const float sum = to_float(x[i]) + to_float(r[i]);
    squares = __float2bfloat16_rn(__bfloat162float(squares) + sum * sum);
  }
  const float total = block_sum(__bfloat162float(squares));
  const float scale = rsqrtf(total / float(hidden) + epsilon);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const float sum = to_float(x[i]) + to_float(r[i]);
    put(r + i, sum);
    put(x + i, sum * scale * to_float(weight[i]));
  }
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    norm<<<tokens, 32, 0, stream_of(input)>>>(x, r, w, hidden, float(epsilon));
  });
}
