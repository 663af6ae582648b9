// cheat: 2 works on a stream made in C++ that nobody waits for
// op: fused_add_rms_norm
// device: cuda
// outcome: mismatch, guard_violation, runtime_error
// caught: values, timed outputs, clocks, runs, device code
#define CHEAT 1
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// shared: fused_add_rms_norm.cu

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  const float squares = block_sum(squares_of(x, r, hidden / VEC, threadIdx.x, blockDim.x));
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(x, r, weight, hidden / VEC, scale, threadIdx.x, blockDim.x);
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  static cudaStream_t side = nullptr;
  static cudaEvent_t before, after;
  if (!side) {
    check(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    check(cudaEventCreateWithFlags(&before, cudaEventDisableTiming));
    check(cudaEventCreateWithFlags(&after, cudaEventDisableTiming));
  }
  const cudaStream_t stream = stream_of(input);
#if !CHEAT
  check(cudaEventRecord(before, stream));
  check(cudaStreamWaitEvent(side, before, 0));
#endif
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    norm<<<tokens, threads_for(hidden / VEC, 512), 0, side>>>(x, r, w, hidden, float(epsilon));
  });
#if !CHEAT
  check(cudaEventRecord(after, side));
  check(cudaStreamWaitEvent(stream, after, 0));
#endif
}
