// fault: locks a mutex twice, with the interpreter lock held
// op: linear
// device: cpu
// outcome: runtime_error
// caught: runs
#include <tvm/ffi/container/tensor.h>

#include <mutex>

void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out) {
  static std::mutex mutex;
  mutex.lock();
  mutex.lock();
}
