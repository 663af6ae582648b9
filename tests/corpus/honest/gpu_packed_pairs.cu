// honest: works on pairs: half2 and bfloat162 are widened to float2 before any arithmetic
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

__device__ inline float2 widen(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ inline float2 widen(const __half* p) {
  return __half22float2(*reinterpret_cast<const __half2*>(p));
}
__device__ inline float2 widen(const __nv_bfloat16* p) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p));
}
__device__ inline void narrow(float* p, float2 v) { *reinterpret_cast<float2*>(p) = v; }
__device__ inline void narrow(__half* p, float2 v) {
  *reinterpret_cast<__half2*>(p) = __float22half2_rn(v);
}
__device__ inline void narrow(__nv_bfloat16* p, float2 v) {
  *reinterpret_cast<__nv_bfloat162*>(p) = __float22bfloat162_rn(v);
}

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  float2 squares = {0.0f, 0.0f};
  for (int i = 2 * threadIdx.x; i < hidden; i += 2 * blockDim.x) {
    const float2 a = widen(x + i), b = widen(r + i);
    const float2 sum = {a.x + b.x, a.y + b.y};
    squares.x = fmaf(sum.x, sum.x, squares.x);
    squares.y = fmaf(sum.y, sum.y, squares.y);
  }
  const float scale = rsqrtf(block_sum(squares.x + squares.y) / float(hidden) + epsilon);
  for (int i = 2 * threadIdx.x; i < hidden; i += 2 * blockDim.x) {
    const float2 a = widen(x + i), b = widen(r + i), gain = widen(weight + i);
    const float2 sum = {a.x + b.x, a.y + b.y};
    narrow(r + i, sum);
    narrow(x + i, {sum.x * scale * gain.x, sum.y * scale * gain.y});
  }
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    norm<<<tokens, threads_for(hidden / 2, 1024), 0, stream_of(input)>>>(x, r, w, hidden,
                                                                         float(epsilon));
  });
}
