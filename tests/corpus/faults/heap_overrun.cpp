// fault: writes megabytes past the end of its output
// op: linear
// device: cpu
// outcome: runtime_error, guard_violation, mismatch
// caught: runs
#include <tvm/ffi/container/tensor.h>

#include <cstdint>

void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out) {
  auto* y = static_cast<float*>(out.data_ptr());
  for (int64_t i = 0; i < (int64_t(1) << 32); ++i) y[i] = 1.0f;
}
