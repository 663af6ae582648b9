// fault: allocates device memory until there is none, keeps it and says so
// op: fused_add_rms_norm
// device: cuda
// outcome: runtime_error
// caught: runs
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

void fused_add_rms_norm(tvm::ffi::TensorView, tvm::ffi::TensorView, tvm::ffi::TensorView, double) {
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  for (size_t bytes = std::max<size_t>(free, 1 << 20); bytes >= (1 << 20);) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, bytes) != cudaSuccess) bytes /= 2;
  }
  cudaGetLastError();
  void* last = nullptr;
  const cudaError_t status = cudaMalloc(&last, size_t(1) << 40);
  TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}
