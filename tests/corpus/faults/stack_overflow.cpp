// fault: recurses until the stack is used up
// op: linear
// device: cpu
// outcome: runtime_error
// caught: runs
#include <tvm/ffi/container/tensor.h>

static int deeper(volatile char* above) {
  volatile char frame[4096];
  frame[0] = above[0];
  return deeper(frame) + frame[0];
}

void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out) {
  volatile char first = 0;
  static_cast<float*>(out.data_ptr())[0] = float(deeper(&first));
}
