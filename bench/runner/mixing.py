"""Large tensors that are only read: made where they are needed, and checked where they lie.

A tensor of which any pattern of bits will do is *mixed* on the device: a stretch of a stock of
random bits that was sent once, from a place on and round its end, each 64-bit word xored with one
mask, one bit flipped where the set is a near copy of another. So each set has values of its own in
every word, and 0.3 GB need not travel for each. The bits still have to be read from memory: the
stock is as large as the tensor.

A *digest* stands for bytes that need not come back. The key is told after the calls. 32-bit words
times random 64-bit keys, summed modulo 2^64, row by row and then over the halves of those sums
(multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast"): two contents
agree for one key in 2^32.
"""

from __future__ import annotations

from typing import Any

WIDTH = 1 << 16
ROWS = 128
FILL = 0xFF


class Mixer:
    """Bound to PyTorch's functions when it is made: before any candidate is loaded."""

    def __init__(self) -> None:
        import torch

        self._xor, self._multiply, self._sum = torch.bitwise_xor, torch.mul, torch.sum
        self._int32, self._int64 = torch.int32, torch.int64
        self._generator, self._randint = torch.Generator, torch.randint
        self._stack, self._view = torch.stack, torch.Tensor.view
        self._fill = torch.Tensor.fill_

    def mix(self, target: Any, stock: Any, recipe: list[int]) -> None:
        """Fill `target` (uint8, a multiple of 8 bytes, no longer than the stock) as the recipe
        says: first word, mask, and the byte whose lowest bit is flipped or -1.
        """
        at, mask, flipped = recipe
        words, source = self._view(target, self._int64), self._view(stock, self._int64)
        if len(words) > len(source):
            raise ValueError(f"{len(words)} words of a stock of {len(source)}")
        first = min(len(words), len(source) - at)
        self._xor(source[at : at + first], mask, out=words[:first])
        if first < len(words):
            self._xor(source[: len(words) - first], mask, out=words[first:])
        if flipped >= 0:
            byte = target[flipped : flipped + 1]
            self._xor(byte, 1, out=byte)

    def surround(self, block: Any) -> None:
        """Red zones before a tensor is mixed between them."""
        self._fill(block, FILL)

    def digest(self, data: Any, key: int) -> int:
        """Of bytes (uint8, a multiple of 4)."""
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
        found, at = [], 0
        for each in sums:
            end = at + len(each)
            halves = (each & 0xFFFFFFFF) * low[at:end] + (each >> 32) * high[at:end]
            found.append(self._sum(halves))
            at = end
        return int(self._sum(self._stack(found)).item()) if found else 0
