// honest: the library's thread pool, its dtype macros and a binding of its own
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/extension.h>

#include <cmath>

namespace {

template <typename T, typename W>
void rows(T* x, T* r, const W* w, int64_t from, int64_t to, int64_t hidden, float epsilon) {
  for (int64_t row = from; row < to; ++row) {
    T *a = x + row * hidden, *b = r + row * hidden;
    float squares = 0.0f;
    for (int64_t i = 0; i < hidden; ++i) {
      const float value = float(a[i]) + float(b[i]);
      squares += value * value;
    }
    const float scale = 1.0f / std::sqrt(squares / float(hidden) + epsilon);
    for (int64_t i = 0; i < hidden; ++i) {
      const float value = float(a[i]) + float(b[i]);
      b[i] = T(value);
      a[i] = T(value * scale * float(w[i]));
    }
  }
}

void fused_add_rms_norm(at::Tensor input, at::Tensor residual, at::Tensor weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  TORCH_CHECK(input.is_contiguous() && residual.is_contiguous(), "tensors must be contiguous");
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, input.scalar_type(), "fused_add_rms_norm", [&] {
        auto *x = input.data_ptr<scalar_t>(), *r = residual.data_ptr<scalar_t>();
        at::parallel_for(0, tokens, 16, [&](int64_t from, int64_t to) {
          if (weight.scalar_type() == at::kFloat)
            rows(x, r, weight.data_ptr<float>(), from, to, hidden, float(epsilon));
          else
            rows(x, r, weight.data_ptr<scalar_t>(), from, to, hidden, float(epsilon));
        });
      });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("fused_add_rms_norm", &fused_add_rms_norm, "in place on input and residual");
}
