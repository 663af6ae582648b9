// fault: a kernel that never ends
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

__device__ volatile int never = 0;

__global__ void wait_for_ever() {
  while (never == 0) __nanosleep(1000);
}

}  // namespace

void fused_add_rms_norm(tvm::ffi::TensorView input, tvm::ffi::TensorView, tvm::ffi::TensorView,
                        double) {
  const DLDevice device = input.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  wait_for_ever<<<1, 32, 0, stream>>>();
}
