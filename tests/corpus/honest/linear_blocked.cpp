// honest: sums in sixteen lanes; a flag of its own is called benchmark
// op: linear
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cstdint>

namespace {

constexpr int64_t LANES = 16;

float dot(const float* a, const float* b, int64_t count) {
  float lanes[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int64_t lane = 0; lane < LANES; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  float tail = 0.0f;
  for (; i < count; ++i) tail += a[i] * b[i];
  for (int64_t half = LANES / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0] + tail;
}

}  // namespace

void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out) {
  const int64_t tokens = x.size(0), k = x.size(1), n = weight.size(0);
  const auto* a = static_cast<const float*>(x.data_ptr());
  const auto* b = static_cast<const float*>(weight.data_ptr());
  auto* c = static_cast<float*>(out.data_ptr());
  const bool benchmark = tokens * n * k > 65536;  // worth a thread
#pragma omp parallel for collapse(2) if (benchmark)
  for (int64_t i = 0; i < tokens; ++i)
    for (int64_t j = 0; j < n; ++j) c[i * n + j] = dot(a + i * k, b + j * k, k);
}
