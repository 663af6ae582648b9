// honest: times two block sizes at the first call of a width, on copies; never in a capture
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

template <typename T, typename W>
int benchmark(const T* x, const T* r, const W* w, int hidden, float epsilon, cudaStream_t stream) {
  constexpr int ROWS = 1, REPEATS = 20;
  T* copies = nullptr;
  check(cudaMalloc(&copies, 2 * size_t(hidden) * sizeof(T)));
  check(cudaMemcpyAsync(copies, x, hidden * sizeof(T), cudaMemcpyDeviceToDevice, stream));
  check(cudaMemcpyAsync(copies + hidden, r, hidden * sizeof(T), cudaMemcpyDeviceToDevice, stream));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  int best = 128;
  float least = 1e30f;
  for (int threads : {128, 512}) {
    check(cudaEventRecord(begin, stream));
    for (int repeat = 0; repeat < REPEATS; ++repeat)
      norm<<<ROWS, threads, 0, stream>>>(copies, copies + hidden, w, hidden, epsilon);
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    float elapsed = 0.0f;
    check(cudaEventElapsedTime(&elapsed, begin, end));
    if (elapsed < least) least = elapsed, best = threads;
  }
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  check(cudaFree(copies));
  return best;
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  const cudaStream_t stream = stream_of(input);
  cudaStreamCaptureStatus capturing;
  check(cudaStreamIsCapturing(stream, &capturing));
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    static thread_local std::map<int, int> chosen;  // for these dtypes
    auto found = chosen.find(hidden);
    int threads = 256;
    if (found != chosen.end())
      threads = found->second;
    else if (capturing == cudaStreamCaptureStatusNone)
      threads = chosen[hidden] = benchmark(x, r, w, hidden, float(epsilon), stream);
    norm<<<tokens, threads, 0, stream>>>(x, r, w, hidden, float(epsilon));
  });
}
