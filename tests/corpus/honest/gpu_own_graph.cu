// honest: launches through a graph of its own, except while somebody else is capturing
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

// One node whose arguments are set anew in every call: it holds no pointer from an earlier one.
struct OneKernel {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaGraphNode_t node = nullptr;
};

void launch(int device, cudaKernelNodeParams& params, cudaStream_t stream) {
  static thread_local std::map<std::pair<int, void*>, OneKernel> cache;
  OneKernel& held = cache[{device, params.func}];
  if (!held.exec) {
    check(cudaGraphCreate(&held.graph, 0));
    check(cudaGraphAddKernelNode(&held.node, held.graph, nullptr, 0, &params));
    check(cudaGraphInstantiate(&held.exec, held.graph, 0));
  } else {
    check(cudaGraphExecKernelNodeSetParams(held.exec, held.node, &params));
  }
  check(cudaGraphLaunch(held.exec, stream));
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0));
  int hidden = int(input.size(1));
  float eps = float(epsilon);
  if (tokens == 0) return;
  const cudaStream_t stream = stream_of(input);
  cudaStreamCaptureStatus capturing;
  check(cudaStreamIsCapturing(stream, &capturing));
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    using T = std::remove_pointer_t<decltype(x)>;
    using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
    const dim3 grid(tokens), block(threads_for(hidden / VEC, 512));
    if (capturing != cudaStreamCaptureStatusNone) {  // a graph cannot be launched into a capture
      norm<T, W><<<grid, block, 0, stream>>>(x, r, w, hidden, eps);
      return;
    }
    void* arguments[] = {&x, &r, &w, &hidden, &eps};
    cudaKernelNodeParams params = {};
    params.func = reinterpret_cast<void*>(&norm<T, W>);
    params.gridDim = grid;
    params.blockDim = block;
    params.kernelParams = arguments;
    launch(input.device().device_id, params, stream);
  });
}
