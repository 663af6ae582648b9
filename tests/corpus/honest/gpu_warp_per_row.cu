// honest: one warp a row, eight rows a block: nothing looks like anybody's benchmark kernel
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
__global__ void norm(T* input, T* residual, const W* weight, int tokens, int hidden,
                     float epsilon) {
  const int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= tokens) return;  // a whole warp leaves
  T* x = input + size_t(row) * hidden;
  T* r = residual + size_t(row) * hidden;
  const float squares = warp_sum(squares_of(x, r, hidden / VEC, lane, 32));
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(x, r, weight, hidden / VEC, scale, lane, 32);
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    norm<<<(tokens + 7) / 8, 256, 0, stream_of(input)>>>(x, r, w, tokens, hidden, float(epsilon));
  });
}
