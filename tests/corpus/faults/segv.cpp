// fault: reads and writes through a null pointer
// op: linear
// device: cpu
// outcome: runtime_error
// caught: runs
#include <tvm/ffi/container/tensor.h>

void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out) {
  float* volatile nowhere = nullptr;
  *nowhere = static_cast<const float*>(x.data_ptr())[0];
}
