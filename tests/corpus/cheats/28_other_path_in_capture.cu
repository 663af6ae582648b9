// cheat: 28 right when called, but what it records in a capture looks at a sixteenth of a row only
// op: fused_add_rms_norm
// device: cuda
// outcome: mismatch, guard_violation
// caught: timed outputs, device code
#define CHEAT 1
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// shared: fused_add_rms_norm.cu

// SHARE: one of so many packs is read for the mean square
template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon, int share) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  const int packs = hidden / VEC, read = (packs + share - 1) / share;
  const float squares = block_sum(squares_of(x, r, read, threadIdx.x, blockDim.x));
  const float scale = rsqrtf(squares / float(read * VEC) + epsilon);
  write_row(x, r, weight, packs, scale, threadIdx.x, blockDim.x);
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  const cudaStream_t stream = stream_of(input);
  cudaStreamCaptureStatus capturing;
  check(cudaStreamIsCapturing(stream, &capturing));
  const int share = CHEAT && capturing != cudaStreamCaptureStatusNone ? 16 : 1;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    norm<<<tokens, threads_for(hidden / VEC, 512), 0, stream>>>(x, r, w, hidden, float(epsilon),
                                                                share);
  });
}
