// fault: builds, and does not load: a symbol that nobody defines
// op: linear
// device: cpu
// outcome: runtime_error, compilation_failure
// caught: load, build, runs
#include <tvm/ffi/container/tensor.h>

extern "C" void defined_nowhere(float*);

void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out) {
  defined_nowhere(static_cast<float*>(out.data_ptr()));
}
