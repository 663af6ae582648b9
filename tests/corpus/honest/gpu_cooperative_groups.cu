// honest: tiles of cooperative groups do the reduction
// op: fused_add_rms_norm
// device: cuda
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

namespace cg = cooperative_groups;

// shared: fused_add_rms_norm.cu

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  __shared__ float partial[32];
  const cg::thread_block block = cg::this_thread_block();
  const auto tile = cg::tiled_partition<32>(block);
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  const int first = block.thread_rank(), step = block.num_threads();
  float squares = squares_of(x, r, hidden / VEC, first, step);
  squares = cg::reduce(tile, squares, cg::plus<float>());
  if (tile.thread_rank() == 0) partial[tile.meta_group_rank()] = squares;
  block.sync();
  squares = tile.thread_rank() < tile.meta_group_size() ? partial[tile.thread_rank()] : 0.0f;
  squares = cg::reduce(tile, squares, cg::plus<float>());
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(x, r, weight, hidden / VEC, scale, first, step);
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
