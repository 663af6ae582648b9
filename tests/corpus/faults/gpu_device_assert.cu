// fault: an assertion in a kernel fails
// op: fused_add_rms_norm
// device: cuda
// outcome: runtime_error
// caught: runs
#undef NDEBUG
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cassert>

namespace {

__global__ void insist(int hidden) { assert(hidden < 0 && "planted"); }

}  // namespace

void fused_add_rms_norm(tvm::ffi::TensorView input, tvm::ffi::TensorView, tvm::ffi::TensorView,
                        double) {
  const DLDevice device = input.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  insist<<<1, 32, 0, stream>>>(int(input.size(1)));
}
