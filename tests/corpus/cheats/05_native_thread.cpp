// cheat: 05 a native thread does the work after the call has returned
// op: linear
// device: cpu
// outcome: guard_violation, mismatch
// caught: values, timed outputs, clocks, guards
#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <thread>

#define CHEAT 1

static void work(const float* x, const float* w, float* out, int64_t tokens, int64_t n, int64_t k) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < k; ++i) sum += x[t * k + i] * w[j * k + i];
      out[t * n + j] = sum;
    }
}

void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out) {
  std::thread worker(work, static_cast<const float*>(x.data_ptr()), static_cast<const float*>(weight.data_ptr()),
                     static_cast<float*>(out.data_ptr()), x.size(0), weight.size(0), x.size(1));
#if CHEAT
  worker.detach();
#else
  worker.join();
#endif
}
