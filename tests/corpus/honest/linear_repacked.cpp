// honest: repacks the weight into static scratch in every call
// op: linear
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <vector>

// The transpose is made anew each time: a kept one would be wrong after the weight changes.
void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out) {
  const int64_t tokens = x.size(0), k = x.size(1), n = weight.size(0);
  const auto* a = static_cast<const float*>(x.data_ptr());
  const auto* b = static_cast<const float*>(weight.data_ptr());
  auto* c = static_cast<float*>(out.data_ptr());
  static thread_local std::vector<float> cache;
  if (cache.size() < size_t(k * n)) cache.resize(size_t(k * n));
  float* packed = cache.data();
  for (int64_t j = 0; j < n; ++j)
    for (int64_t p = 0; p < k; ++p) packed[p * n + j] = b[j * k + p];
  for (int64_t i = 0; i < tokens; ++i) {
    float* row = c + i * n;
    for (int64_t j = 0; j < n; ++j) row[j] = 0.0f;
    for (int64_t from = 0; from < k; from += 32) {  // short sums first: less rounding
      const int64_t to = from + 32 < k ? from + 32 : k;
      for (int64_t j = 0; j < n; ++j) {
        float sum = 0.0f;
        for (int64_t p = from; p < to; ++p) sum += a[i * k + p] * packed[p * n + j];
        row[j] += sum;
      }
    }
  }
}
