# Op: decode_attention_fp8: attention of one new token of each request over its paged KV cache in
#   fp8, with optional window and sinks; float32.
# Arguments: query[Q: tokens, group * kv_heads * head_dim], key_cache[C: blocks, block_size,
#   kv_heads, head_dim], value_cache[C: blocks, block_size, kv_heads, head_dim], q_scale[F: scaled],
#   k_scale[F: 1], v_scale[F: 1], block_table[I: tokens, pages], lengths[I: tokens], window[I:
#   windowed], sinks[T: sinked * group * kv_heads], out[T: tokens, group * kv_heads * head_dim],
#   scale; T: bfloat16 or float16 or float32; Q: T or float8_e4m3fn; C: float8_e4m3fn; F: float32;
#   I: int32
# Writes: out
# Needs: PyTorch alone; shipped for the CPU; any stride of rows; caches of any strides with dense
#   heads.
# Idea: a request at a time: its places from the block table, scores, softmax, sum; scales multiply
#   scores and sums. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 9b5b21e06997d61e6cc8b44132bdaeec945f40a93a166714100647f363f7820c

import torch


def decode_attention_fp8(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    window: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    factor = scale * k_scale * (q_scale if q_scale.numel() else 1.0)
    out.zero_()
    for token, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        first = max(length - int(window), 0) if window.numel() else 0
        places = torch.arange(first, length)
        blocks = block_table[token].long()[places // block_size]
        keys, values = (
            cache[blocks, places % block_size].float().transpose(0, 1)
            for cache in (key_cache, value_cache)
        )
        heads = query[token].float().view(kv_heads, -1, head_dim)
        scores = heads @ keys.transpose(1, 2) * factor
        if sinks.numel():
            scores = torch.cat((scores, sinks.float().view(kv_heads, -1, 1)), -1)
        weights = scores.softmax(-1)[..., : len(places)]
        out[token] = (weights @ values * v_scale).to(out.dtype).view(-1)
