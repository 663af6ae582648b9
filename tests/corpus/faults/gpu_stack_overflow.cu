// fault: recursion in a kernel without an end
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

namespace {

__device__ __noinline__ int deeper(int depth, volatile int* top) {
  volatile int frame[64];
  for (int i = 0; i < 64; ++i) frame[i] = depth + i;
  const int below = depth < 0 ? 0 : deeper(depth + 1, &frame[depth & 63]);
  return below + frame[depth & 63] + *top;
}

__global__ void dive(int* out) {
  volatile int top = 0;
  *out = deeper(int(threadIdx.x), &top);
}

}  // namespace

void fused_add_rms_norm(tvm::ffi::TensorView input, tvm::ffi::TensorView, tvm::ffi::TensorView,
                        double) {
  const DLDevice device = input.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  dive<<<1, 32, 0, stream>>>(static_cast<int*>(input.data_ptr()));
}
