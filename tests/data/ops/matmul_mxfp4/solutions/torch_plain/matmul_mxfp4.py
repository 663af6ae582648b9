import torch

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def matmul_mxfp4(x, weights, scales, out):
    codes = weights.view(torch.uint8)
    table = torch.tensor([*FP4, *(-each for each in FP4)], device=x.device)
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), -1)  # of each byte
    wide = pairs[codes.int()].view(len(codes), -1, 32) * scales.float().unsqueeze(-1)
    torch.mm(x, wide.view(len(codes), -1).T, out=out)
