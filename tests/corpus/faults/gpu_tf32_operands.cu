// fault: rounds both operands to tf32 before it adds, squares and scales
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

// Shows in float32 only: a tf32 has more bits than a bfloat16, and as many as a float16.
__device__ inline float to_tf32(float v) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
  return __uint_as_float(bits);
}

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const float sum = to_tf32(to_float(x[i])) + to_tf32(to_float(r[i]));
    squares += to_tf32(sum) * to_tf32(sum);
  }
  const float scale = rsqrtf(block_sum(squares) / float(hidden) + epsilon);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const float sum = to_tf32(to_float(x[i])) + to_tf32(to_float(r[i]));
    put(r + i, sum);
    put(x + i, to_tf32(sum) * to_tf32(scale) * to_tf32(to_float(weight[i])));
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
