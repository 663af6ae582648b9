// fault: writes to an address that nobody has
// op: linear
// device: cpu
// outcome: runtime_error
// caught: runs
#include <tvm/ffi/container/tensor.h>

void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out) {
  *reinterpret_cast<volatile float*>(8) = static_cast<const float*>(x.data_ptr())[0];
}
