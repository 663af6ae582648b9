// fault: adds one unit in the last place to every fourth bfloat16 or float16 output
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

__device__ inline void nudge(float*) {}
template <typename T>
__device__ inline void nudge(T* p) {
  auto* bits = reinterpret_cast<unsigned short*>(p);
  if ((*bits & 0x7fff) < 0x7b00 && (*bits & 0x7fff) != 0) *bits += 1;  // finite, not zero
}

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  const float squares = block_sum(squares_of(x, r, hidden / VEC, threadIdx.x, blockDim.x));
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(x, r, weight, hidden / VEC, scale, threadIdx.x, blockDim.x);
  __syncthreads();
  for (int i = 4 * threadIdx.x; i < hidden; i += 4 * blockDim.x) nudge(x + i);
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
