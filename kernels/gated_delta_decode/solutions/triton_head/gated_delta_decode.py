# Op: gated_delta_decode: one decode step of the gated delta rule: the state of each token's slot
#   decays, and gets the outer product of what its value lacks, times sigmoid(b), and the key; out
#   is its product with the query; queries and keys are normalised; float32.
# Arguments: state[S: slots, value_heads * value_dim * key_dim], qkv[T: tokens, 2 * heads * key_dim
#   + value_heads * value_dim], a[T: tokens, value_heads], b[T: tokens, value_heads], A_log[F:
#   value_heads], dt_bias[T: value_heads], slots[I: tokens], out[T: tokens, value_heads *
#   value_dim]; T: bfloat16 or float16 or float32; S: T or float32; F: float32; I: int32
# Writes: state, out
# Needs: a GPU that Triton drives; any stride of rows; graph-safe.
# Idea: a program has one value head of one token and some rows of its state, which are read and
#   written once and stay in registers.
# Made by: hand; not tuned.
# Figures: not measured.
# Digest: 726ee1e83827255d0d7c97261918a6ebcf3ffb5fecd60ac41a59e6bf7ff73824

import torch
import triton
import triton.language as tl


@triton.jit
def gated_delta_decode_kernel(
    state_ptr, qkv_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, slots_ptr, out_ptr,
    state_pitch, qkv_pitch, a_pitch, b_pitch, heads, value_heads, scale,
    VALUE: tl.constexpr, KEY: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, WIDE)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    out_at = out_ptr + (token * value_heads + head) * VALUE + row
    if slot == 0:
        tl.store(out_at, tl.zeros((ROWS,), out_ptr.dtype.element_ty), mask=row < VALUE)
    else:
        qkv_ptr += token * qkv_pitch
        place = head * heads // value_heads * KEY + lane
        q = tl.load(qkv_ptr + place, mask=lane < KEY, other=0.0).to(tl.float32)
        k = tl.load(qkv_ptr + heads * KEY + place, mask=lane < KEY, other=0.0).to(tl.float32)
        q = q / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
        k = k / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
        v_at = qkv_ptr + 2 * heads * KEY + head * VALUE + row
        v = tl.load(v_at, mask=row < VALUE, other=0.0).to(tl.float32)
        x = tl.load(a_ptr + token * a_pitch + head).to(tl.float32)
        x += tl.load(dt_bias_ptr + head).to(tl.float32)
        # log(1 + e) with the digits of a small e
        e = tl.exp(tl.minimum(x, 20.0))
        above = 1 + e
        step = tl.where(above == 1, e, tl.log(above) * (e / (above - 1)))
        step = tl.where(x > 20, x, step)
        decay = tl.exp(-tl.exp(tl.load(A_log_ptr + head)) * step)
        strength = 1 / (1 + tl.exp(-tl.load(b_ptr + token * b_pitch + head).to(tl.float32)))
        at = state_ptr + slot * state_pitch + (head * VALUE + row[:, None]) * KEY + lane[None, :]
        inside = (row[:, None] < VALUE) & (lane[None, :] < KEY)
        state = tl.load(at, mask=inside, other=0.0).to(tl.float32) * decay
        change = (v - tl.sum(state * k[None, :], axis=1)) * strength
        state += change[:, None] * k[None, :]
        tl.store(at, state.to(state_ptr.dtype.element_ty), mask=inside)
        found = tl.sum(state * q[None, :], axis=1)
        tl.store(out_at, found.to(out_ptr.dtype.element_ty), mask=row < VALUE)


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
    tokens, value_heads = a.shape
    inner = out.shape[1]
    value, key = inner // value_heads, state.shape[1] // inner
    heads = (qkv.shape[1] - inner) // (2 * key)
    wide = triton.next_power_of_2(key)
    rows = min(triton.next_power_of_2(value), max(4096 // wide, 1))
    gated_delta_decode_kernel[(tokens, value_heads, triton.cdiv(value, rows))](
        state, qkv, a, b, A_log, dt_bias, slots, out,
        state.stride(0), qkv.stride(0), a.stride(0), b.stride(0), heads, value_heads, key**-0.5,
        VALUE=value, KEY=key, ROWS=rows, WIDE=wide, num_warps=4,
    )  # fmt: skip
