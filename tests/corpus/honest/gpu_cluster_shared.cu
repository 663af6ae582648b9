// honest: four blocks of a cluster share a row and read each other's shared memory
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

namespace cg = cooperative_groups;

// shared: fused_add_rms_norm.cu

constexpr int CLUSTER = 4;

template <typename T, typename W>
__global__ __cluster_dims__(CLUSTER, 1, 1) void norm(T* input, T* residual, const W* weight,
                                                     int hidden, float epsilon) {
  __shared__ float own;
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = cluster.block_rank();
  const size_t at = size_t(blockIdx.x / CLUSTER) * hidden;
  const int first = rank * blockDim.x + threadIdx.x, step = CLUSTER * blockDim.x;
  const float part =
      block_sum(squares_of(input + at, residual + at, hidden / VEC, first, step));
  if (threadIdx.x == 0) own = part;
  cluster.sync();
  float squares = 0.0f;
#pragma unroll
  for (int peer = 0; peer < CLUSTER; ++peer) squares += *cluster.map_shared_rank(&own, peer);
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(input + at, residual + at, weight, hidden / VEC, scale, first, step);
  cluster.sync();  // nobody leaves while a peer may still read its shared memory
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    norm<<<tokens * CLUSTER, 128, 0, stream_of(input)>>>(x, r, w, hidden, float(epsilon));
  });
}
