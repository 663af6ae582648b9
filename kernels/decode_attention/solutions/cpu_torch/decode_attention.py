# Op: decode_attention: attention of one new token of each request over its paged KV cache, with
#   optional window and sinks; float32.
# Arguments: query[T: tokens, group * kv_heads * head_dim], key_cache[T: blocks, block_size,
#   kv_heads, head_dim], value_cache[T: blocks, block_size, kv_heads, head_dim], block_table[I:
#   tokens, pages], lengths[I: tokens], window[I: windowed], sinks[T: sinked * group * kv_heads],
#   out[T: tokens, group * kv_heads * head_dim], scale; T: bfloat16 or float16 or float32; I: int32
# Writes: out
# Needs: PyTorch alone; shipped for the CPU; any stride of rows; caches of any strides with dense
#   heads.
# Idea: a request at a time: its places from the block table, scores, softmax, sum. It is here to be
#   right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: b700d9eab16b0c11ee1f16f32973b3c2af230c9f7d699e0f5784b2b54495c1cb

import torch


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    window: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    block_size, kv_heads, head_dim = key_cache.shape[1:]
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
        scores = heads @ keys.transpose(1, 2) * scale
        if sinks.numel():
            scores = torch.cat((scores, sinks.float().view(kv_heads, -1, 1)), -1)
        weights = scores.softmax(-1)[..., : len(places)]
        out[token] = (weights @ values).to(out.dtype).view(-1)
