# Op: rms_norm_quant_fp8: x = input / sqrt(mean(input^2) + epsilon) * weight; scales[t, g] = the
#   largest absolute x of the g-th group of row t over 448, of at least 1 / (448 * 512); output = x
#   over its group's scale, rounded to the nearest fp8; float32.
# Arguments: input[T: tokens, groups * group], weight[W: groups * group], output[Q: tokens, groups *
#   group], scales[F: tokens, groups], epsilon; T: bfloat16 or float16 or float32; W: T or float32;
#   Q: float8_e4m3fn; F: float32
# Writes: output, scales
# Needs: PyTorch alone; shipped for the CPU; any size, any strides.
# Idea: none beyond PyTorch's: a mean, a maximum and a division in float32. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 8eb1ecafa277b41163b1a96e11ee064351f419cc13be40111a071c13f1804aca

import torch


def rms_norm_quant_fp8(
    input: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    scales: torch.Tensor,
    epsilon: float,
) -> None:
    wide = input.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float()
    groups = wide.unflatten(1, (scales.shape[1], -1))
    scales.copy_((groups.abs().amax(-1) / 448.0).clamp_min(1.0 / (448.0 * 512.0)))
    numbers = groups / scales.unsqueeze(-1)
    output.copy_(numbers.clamp(-448.0, 448.0).flatten(1))
