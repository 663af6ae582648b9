// fault: divides an integer by zero: SIGFPE
// op: linear
// device: cpu
// outcome: runtime_error
// caught: runs
#include <tvm/ffi/container/tensor.h>

#include <cstdint>

void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out) {
  volatile int64_t none = 0;
  static_cast<float*>(out.data_ptr())[0] = float(x.size(0) / none);
}
