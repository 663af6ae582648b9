// honest: a library kernel for the norm, own code for the sum, an RAII guard around both
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <torch/extension.h>

void fused_add_rms_norm(at::Tensor input, at::Tensor residual, at::Tensor weight, double epsilon) {
  at::NoGradGuard no_grad;
  static thread_local at::Tensor total;  // scratch: grows, and is written in every call
  if (!total.defined() || total.numel() < input.numel() || total.device() != input.device()) {
    c10::InferenceMode normal(false);  // a tensor kept for later calls must not be an inference one
    total = at::empty({input.numel()}, input.options().dtype(at::kFloat));
  }
  at::Tensor sum = total.narrow(0, 0, input.numel()).view(input.sizes());
  sum.copy_(residual);
  sum.add_(input);
  residual.copy_(sum);
  input.copy_(at::rms_norm(sum, {sum.size(-1)}, weight.to(at::kFloat), epsilon));
}
