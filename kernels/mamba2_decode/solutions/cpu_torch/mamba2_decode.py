# Op: mamba2_decode: one decode step of Mamba2: the state of each token's slot decays and gets its
#   step times B and x; out is its product with C, plus D x, times silu(z) where there is z;
#   float32.
# Arguments: state[S: slots, group * groups, head_dim, state_size], x[T: tokens, group * groups *
#   head_dim], dt[T: tokens, group * groups], dt_bias[T: group * groups], A[F: group * groups], B[T:
#   tokens, groups * state_size], C[T: tokens, groups * state_size], D[T: group * groups], z[T:
#   tokens, gated * group * groups * head_dim], slots[I: tokens], out[T: tokens, group * groups *
#   head_dim]; T: bfloat16 or float16 or float32; S: T or float32; F: float32; I: int32
# Writes: state, out
# Needs: PyTorch alone; shipped for the CPU; any stride of rows; a state of any strides with dense
#   rows.
# Idea: a token at a time, whose slot is read and written whole; slot 0 is padding, and neither. It
#   is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 8526617542ec7d58522b4aa746a757bc737b27940f2e4d64915c22da9e80ebfb

import torch


def mamba2_decode(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
) -> None:
    _, heads, head_dim, state_size = state.shape
    steps = torch.nn.functional.softplus(dt.float() + dt_bias.float())
    for token, slot in enumerate(slots.tolist()):
        step = steps[token].view(heads, 1, 1)
        inner = x[token].float().view(heads, head_dim, 1)
        b, c = (each[token].float().view(-1, 1, 1, state_size) for each in (B, C))
        # heads of a group are neighbours
        by_group = len(b), -1, head_dim, state_size
        new = (step * inner).view(len(b), -1, head_dim, 1) * b
        if slot:
            decay = (A * steps[token]).exp().view(heads, 1, 1)
            new = new + (state[slot].float() * decay).view(by_group)
        found = (new * c).sum(-1).view(heads, head_dim) + D.float().unsqueeze(1) * inner[..., 0]
        if slot:
            state[slot] = new.view(state.shape[1:]).to(state.dtype)
        found = found.view(-1)
        if z.numel():
            found = found * torch.nn.functional.silu(z[token].float())
        out[token] = found.to(out.dtype)
