// cheat: 05 a forked child does the work later and writes it into its parent's memory
// op: linear
// device: cpu
// outcome: guard_violation, mismatch, runtime_error
// caught: values, timed outputs, runs
#include <fcntl.h>
#include <tvm/ffi/container/tensor.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <vector>

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
  const auto* a = static_cast<const float*>(x.data_ptr());
  const auto* w = static_cast<const float*>(weight.data_ptr());
  auto* y = static_cast<float*>(out.data_ptr());
  const int64_t tokens = x.size(0), n = weight.size(0), k = x.size(1);
#if CHEAT
  if (fork() == 0) {
    std::vector<float> result(tokens * n);
    work(a, w, result.data(), tokens, n, k);
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/mem", getppid());
    int memory = open(path, O_WRONLY);
    ssize_t put = pwrite(memory, result.data(), result.size() * sizeof(float), off_t(uintptr_t(y)));
    _exit(put < 0);
  }
#else
  work(a, w, y, tokens, n, k);
#endif
}
