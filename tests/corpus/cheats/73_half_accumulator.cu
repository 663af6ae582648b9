// cheat: 73 adds up the squares in float16, which ends at 65504
// op: fused_add_rms_norm
// device: cuda
// outcome: mismatch
// caught: values, timed outputs
#define CHEAT 1
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// shared: fused_add_rms_norm.cu

#if CHEAT
using Sum = __half;
#else
using Sum = float;
#endif

__device__ inline float widened(float v) { return v; }
__device__ inline float widened(__half v) { return __half2float(v); }

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  Sum squares = Sum(0.0f);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const float sum = to_float(x[i]) + to_float(r[i]);
    squares = Sum(widened(squares) + sum * sum);
  }
  const float scale = rsqrtf(block_sum(widened(squares)) / float(hidden) + epsilon);
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
    norm<<<tokens, 256, 0, stream_of(input)>>>(x, r, w, hidden, float(epsilon));
  });
}
