// fault: a 16-byte store to an address that is no multiple of 16
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

__global__ void write_askew(char* where) {
  *reinterpret_cast<volatile float*>(where + 16) = 0.0f;
  asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(where + 4), "r"(0) : "memory");
}

}  // namespace

void fused_add_rms_norm(tvm::ffi::TensorView input, tvm::ffi::TensorView, tvm::ffi::TensorView,
                        double) {
  const DLDevice device = input.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  write_askew<<<1, 1, 0, stream>>>(static_cast<char*>(input.data_ptr()));
}
