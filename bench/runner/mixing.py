"""Create large read-only tensors in the runner, and check them there by digest.

A large tensor is *mixed* on the device from a pool that was sent once: random bits for a tensor
that may hold any, its own values for weights. It is a stretch of its part of the pool that wraps
around the end, with each 64-bit word xored with one mask, which for weights has bits of mantissas
alone. If the set is a near copy of another, one bit is flipped, or a weight's exponent. So each set
has different values in every word, and 0.3 GB need not be sent for each. The part is as large as
the tensor, so the values still have to be read from memory.

A *digest* replaces bytes that need not be returned. Its key is sent after the calls. 32-bit words
are multiplied by random 64-bit keys and summed modulo 2^64, row by row and then over the halves of
those sums (multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast"). Two
different contents agree for one key in 2^32.

What is returned has a *checksum* for each piece. The judge reads pieces in several threads, and
compares what it has with what was there when the runner replied.
"""

from __future__ import annotations

import zlib
from typing import Any

WIDTH = 1 << 16
ROWS = 128
FILL = 0xFF
PIECE_BYTES = 32 << 20
_crc = zlib.crc32  # bound before any candidate is loaded


def checksums(data: Any) -> list[int]:
    """CRC-32 of each piece of a memory view of bytes."""
    return [_crc(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES)]


class Mixer:
    """Mixes and digests tensors. It binds PyTorch's functions before any candidate is loaded."""

    def __init__(self) -> None:
        import torch

        self._xor, self._multiply, self._sum = torch.bitwise_xor, torch.mul, torch.sum
        self._int32, self._int64 = torch.int32, torch.int64
        self._generator, self._randint = torch.Generator, torch.randint
        self._stack, self._view = torch.stack, torch.Tensor.view
        self._fill = torch.Tensor.fill_

    def mix(self, target: Any, stock: Any, recipe: list[int]) -> None:
        """Fill a tensor by its recipe.

        Args:
            target: uint8, a multiple of 8 bytes, no longer than the stock.
            stock: the pool, uint8.
            recipe: first word, mask, a byte and what it is xored with at last, and begin and size
                of the tensor's part of the pool in bytes.
        """
        at, mask, changed, bits, begin, size = recipe
        words = self._view(target, self._int64)
        source = self._view(stock[begin : begin + size], self._int64)
        if len(words) > len(source):
            raise ValueError(f"{len(words)} words of a stock of {len(source)}")
        first = min(len(words), len(source) - at)
        self._xor(source[at : at + first], mask, out=words[:first])
        if first < len(words):
            self._xor(source[: len(words) - first], mask, out=words[first:])
        if bits:
            byte = target[changed : changed + 1]
            self._xor(byte, bits, out=byte)

    def surround(self, block: Any) -> None:
        """Fill a block with the red zone's pattern, before a tensor is mixed into it."""
        self._fill(block, FILL)

    def digest(self, data: Any, key: int) -> int:
        """Digest of bytes (uint8, a multiple of 4) with a key."""
        words = self._view(data, self._int32)
        rows = -(-len(words) // WIDTH)
        drawn = self._randint(
            -(1 << 63),
            (1 << 63) - 1,
            (WIDTH + 2 * rows,),
            generator=self._generator().manual_seed(key),
            dtype=self._int64,
        ).to(data.device)
        keys, low, high = drawn[:WIDTH], drawn[WIDTH : WIDTH + rows], drawn[WIDTH + rows :]
        end, step, sums = len(words) // WIDTH * WIDTH, ROWS * WIDTH, []
        for at in range(0, end, step):
            part = self._view(words[at : min(at + step, end)], -1, WIDTH)
            sums.append(self._sum(self._multiply(part, keys), 1))
        if rest := len(words) - end:
            sums.append(self._view(self._sum(self._multiply(words[end:], keys[:rest])), 1))
        parts, at = [], 0
        for each in sums:
            end = at + len(each)
            halves = (each & 0xFFFFFFFF) * low[at:end] + (each >> 32) * high[at:end]
            parts.append(self._sum(halves))
            at = end
        return int(self._sum(self._stack(parts)).item()) if parts else 0
