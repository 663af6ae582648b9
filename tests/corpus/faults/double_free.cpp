// fault: frees a block twice
// op: linear
// device: cpu
// outcome: runtime_error
// caught: runs
#include <tvm/ffi/container/tensor.h>

#include <cstdlib>

void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out) {
  void* volatile block = std::malloc(4000);
  std::free(block);
  std::free(block);
  std::abort();  // where the allocator does not notice
}
