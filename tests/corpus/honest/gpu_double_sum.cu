// honest: adds up in float64 and divides by the root
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

__device__ inline double block_sum_double(double v) {
  __shared__ double partial[32];
  for (int lane = 16; lane > 0; lane >>= 1) v += __shfl_xor_sync(0xffffffffu, v, lane);
  if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = v;
  __syncthreads();
  double sum = 0.0;
  for (int warp = 0; warp < int(blockDim.x >> 5); ++warp) sum += partial[warp];
  return sum;
}

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  double squares = 0.0;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const double sum = double(to_float(x[i]) + to_float(r[i]));
    squares += sum * sum;
  }
  const float root = float(sqrt(block_sum_double(squares) / hidden + double(epsilon)));
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const float sum = to_float(x[i]) + to_float(r[i]);
    put(r + i, sum);
    put(x + i, sum / root * to_float(weight[i]));
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
