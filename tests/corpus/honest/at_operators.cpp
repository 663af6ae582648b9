// honest: the library's own operators do all of the work
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <torch/extension.h>

void fused_add_rms_norm(at::Tensor input, at::Tensor residual, at::Tensor weight, double epsilon) {
  const at::Tensor total = residual.to(at::kFloat) + input.to(at::kFloat);
  const at::Tensor scale = at::rsqrt(total.square().mean(-1, /*keepdim=*/true) + epsilon);
  residual.copy_(total);
  input.copy_(total.mul(scale).mul(weight));
}
