// honest: half of the rows on a stream of its own, forked and joined by events, in a capture too
// op: fused_add_rms_norm
// device: cuda
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <map>

// shared: fused_add_rms_norm.cu

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  const float squares = block_sum(squares_of(x, r, hidden / VEC, threadIdx.x, blockDim.x));
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(x, r, weight, hidden / VEC, scale, threadIdx.x, blockDim.x);
}

struct Side {
  cudaStream_t stream;
  cudaEvent_t fork, join;
};

const Side& side_of(int device) {
  static thread_local std::map<int, Side> sides;
  auto found = sides.find(device);
  if (found != sides.end()) return found->second;
  Side made;
  check(cudaStreamCreateWithFlags(&made.stream, cudaStreamNonBlocking));
  check(cudaEventCreateWithFlags(&made.fork, cudaEventDisableTiming));
  check(cudaEventCreateWithFlags(&made.join, cudaEventDisableTiming));
  return sides.emplace(device, made).first->second;
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  const cudaStream_t stream = stream_of(input);
  const Side& side = side_of(input.device().device_id);
  const int half = tokens / 2, threads = threads_for(hidden / VEC, 512);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    if (half > 0) {
      check(cudaEventRecord(side.fork, stream));
      check(cudaStreamWaitEvent(side.stream, side.fork, 0));
      norm<<<half, threads, 0, side.stream>>>(x, r, w, hidden, float(epsilon));
      check(cudaEventRecord(side.join, side.stream));
    }
    const size_t at = size_t(half) * hidden;
    norm<<<tokens - half, threads, 0, stream>>>(x + at, r + at, w, hidden, float(epsilon));
    if (half > 0) check(cudaStreamWaitEvent(stream, side.join, 0));
  });
}
