# Op: mamba2_decode: one decode step of Mamba2: the state of each token's slot decays and gets its
#   step times B and x; out is its product with C, plus D x, times silu(z) where there is z;
#   float32.
# Arguments: state[S: slots, group * groups, head_dim, state_size], x[T: tokens, group * groups *
#   head_dim], dt[T: tokens, group * groups], dt_bias[T: group * groups], A[F: group * groups], B[T:
#   tokens, groups * state_size], C[T: tokens, groups * state_size], D[T: group * groups], z[T:
#   tokens, gated * group * groups * head_dim], slots[I: tokens], out[T: tokens, group * groups *
#   head_dim]; T: bfloat16 or float16 or float32; S: T or float32; F: float32; I: int32
# Writes: state, out
# Needs: a GPU that Triton drives; any stride of rows; a state of any strides with dense rows;
#   graph-safe.
# Idea: a program has one head of one token and some rows of its state, which are read and written
#   once and stay in registers.
# Made by: hand; not tuned.
# Figures: not measured.
# Digest: 11cfbc075977c4e8e9ca5083794931223eb7343714875b5bfa261bcc5b818fe8

import torch
import triton
import triton.language as tl


@triton.jit
def mamba2_decode_kernel(
    state_ptr, x_ptr, dt_ptr, dt_bias_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, slots_ptr, out_ptr,
    slot_pitch, head_pitch, row_pitch, x_pitch, dt_pitch, b_pitch, c_pitch, z_pitch, out_pitch,
    group, GATED: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, WIDE)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    place = head * DIM + row
    x = tl.load(x_ptr + token * x_pitch + place, mask=row < DIM, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + token * dt_pitch + head).to(tl.float32)
    dt += tl.load(dt_bias_ptr + head).to(tl.float32)
    # log(1 + e) with the digits of a small e
    e = tl.exp(tl.minimum(dt, 20.0))
    above = 1 + e
    step = tl.where(above == 1, e, tl.log(above) * (e / (above - 1)))
    step = tl.where(dt > 20, dt, step)
    at = head // group * SIZE + lane
    b = tl.load(B_ptr + token * b_pitch + at, mask=lane < SIZE, other=0.0).to(tl.float32)
    c = tl.load(C_ptr + token * c_pitch + at, mask=lane < SIZE, other=0.0).to(tl.float32)
    at = state_ptr + slot * slot_pitch + head * head_pitch
    at = at + row[:, None] * row_pitch + lane[None, :]
    inside = (row[:, None] < DIM) & (lane[None, :] < SIZE) & (slot > 0)
    state = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    state = state * tl.exp(tl.load(A_ptr + head) * step) + (step * x)[:, None] * b[None, :]
    tl.store(at, state.to(state_ptr.dtype.element_ty), mask=inside)
    found = tl.sum(state * c[None, :], axis=1) + tl.load(D_ptr + head).to(tl.float32) * x
    if GATED:
        z = tl.load(z_ptr + token * z_pitch + place, mask=row < DIM, other=0.0).to(tl.float32)
        found = found * (z / (1 + tl.exp(-z)))
    found = found.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_pitch + place, found, mask=row < DIM)


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
    _, heads, dim, size = state.shape
    wide = triton.next_power_of_2(size)
    rows = min(triton.next_power_of_2(dim), max(4096 // wide, 1))
    mamba2_decode_kernel[(len(x), heads, triton.cdiv(dim, rows))](
        state, x, dt, dt_bias, A, B, C, D, z if z.numel() else x, slots, out,
        *state.stride()[:3], x.stride(0), dt.stride(0), B.stride(0), C.stride(0), z.stride(0),
        out.stride(0), heads * size // B.shape[1],
        GATED=z.numel() > 0, DIM=dim, SIZE=size, ROWS=rows, WIDE=wide, num_warps=4,
    )  # fmt: skip
