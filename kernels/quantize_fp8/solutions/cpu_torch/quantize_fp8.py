# Op: quantize_fp8: scales[t, g] = the largest absolute value of x[t, g-th group] over 448, of at
#   least 1e-10 / 448; output = x over its group's scale, rounded to the nearest fp8.
# Arguments: x[T: tokens, groups * group], output[Q: tokens, groups * group], scales[F: tokens,
#   groups]; T: bfloat16 or float16 or float32; Q: float8_e4m3fn; F: float32
# Writes: output, scales
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: none beyond PyTorch's: a maximum and a division in float32. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: dbfb34c3ba91356b3e98b5d27f0bd9c0562a2861dc74f156b7012f0cb9198f1d

import torch


def quantize_fp8(x: torch.Tensor, output: torch.Tensor, scales: torch.Tensor) -> None:
    groups = x.float().unflatten(1, (scales.shape[1], -1))
    scales.copy_(groups.abs().amax(-1).clamp_min(1e-10) / 448.0)
    numbers = groups / scales.unsqueeze(-1)
    output.copy_(numbers.clamp(-448.0, 448.0).flatten(1))
