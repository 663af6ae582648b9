# Op: gated_delta_decode: one decode step of the gated delta rule: the state of each token's slot
#   decays, and gets the outer product of what its value lacks, times sigmoid(b), and the key; out
#   is its product with the query; queries and keys are normalised; float32.
# Arguments: state[S: slots, value_heads * value_dim * key_dim], qkv[T: tokens, 2 * heads * key_dim
#   + value_heads * value_dim], a[T: tokens, value_heads], b[T: tokens, value_heads], A_log[F:
#   value_heads], dt_bias[T: value_heads], slots[I: tokens], out[T: tokens, value_heads *
#   value_dim]; T: bfloat16 or float16 or float32; S: T or float32; F: float32; I: int32
# Writes: state, out
# Needs: PyTorch alone; shipped for the CPU; any stride of rows.
# Idea: a token at a time, whose slot is read and written whole; slot 0 is padding, and gives zeros.
#   It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: c937e1ec3e16ef74e912c3aba723b42ba67ce7e4a4570518d452372db14c1794

import torch


def gated_delta_decode(
    state: torch.Tensor,
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
) -> None:
    value_heads, inner = a.shape[1], out.shape[1]
    key_dim = state.shape[1] // inner
    keys = (qkv.shape[1] - inner) // 2
    of = torch.arange(value_heads) * (keys // key_dim) // value_heads
    steps = torch.nn.functional.softplus(a.float() + dt_bias.float())
    decays = (-A_log.exp() * steps).exp()
    strengths = b.float().sigmoid()
    for token, slot in enumerate(slots.tolist()):
        if not slot:
            out[token] = 0
            continue
        row = qkv[token].float()
        q, k = row[: 2 * keys].view(2, -1, key_dim)
        q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() / key_dim**0.5
        k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        q, k = q[of].unsqueeze(1), k[of].unsqueeze(1)
        value = row[2 * keys :].view(value_heads, -1, 1)
        held = state[slot].view(value_heads, -1, key_dim)
        now = held.float() * decays[token].view(-1, 1, 1)
        change = (value - (now * k).sum(-1, keepdim=True)) * strengths[token].view(-1, 1, 1)
        now = now + change * k
        held.copy_(now)
        out[token] = (now * q).sum(-1).view(-1)
