// honest: inline PTX: an approximate reciprocal root with a Newton step, fused multiply-adds
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

__device__ inline float fma_rn(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

__device__ inline float reciprocal_root(float v) {
  float y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(v));
  // y (1.5 - 0.5 v y^2); zero, infinity and NaN are right as they are
  const float refined = y * fma_rn(-0.5f * v * y, y, 1.5f);
  return v > 0.0f && v < 3e38f ? refined : y;
}

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const float sum = to_float(x[i]) + to_float(r[i]);
    squares = fma_rn(sum, sum, squares);
  }
  const float scale = reciprocal_root(fma_rn(block_sum(squares), 1.0f / float(hidden), epsilon));
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
    norm<<<tokens, threads_for(hidden, 1024), 0, stream_of(input)>>>(x, r, w, hidden,
                                                                     float(epsilon));
  });
}
