"""Designs are told apart by how they are built, not by their text."""

from __future__ import annotations

import pytest

from patcher.attempts.structure import APART, structure
from patcher.bench import Candidate, Language, load_ops

CUDA = """
// adds
__global__ void add(const float* a, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a[i] + 1.0f;  /* one */
}
void op(const float* a, float* out, int n) { add<<<(n + 255) / 256, 256>>>(a, out, n); }
"""
CUDA_RENAMED = """
#include <cuda_runtime.h>
__global__ void plus_one(const float* source, float* target, int count)
{
  // where we are
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) target[at] = source[at] + 1.0f;
}
void op(const float* source, float* target, int count)
{ plus_one<<<(count + 255) / 256, 256>>>(source, target, count); }
"""
CUDA_VECTOR = """
__global__ void add(const float4* a, float4* out, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    float4 v = __ldg(a + i);
    v.x += 1; v.y += 1; v.z += 1; v.w += 1;
    out[i] = v;
  }
}
void op(const float4* a, float4* out, int n) { add<<<132, 512>>>(a, out, n); }
"""
TRITON = '''
@triton.jit
def add(a, out, n, BLOCK: tl.constexpr):
    """Adds."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(a + at, mask=at < n) + 1, mask=at < n)

def op(a, out):
    add[(4,)](a, out, a.numel(), BLOCK=1024, num_warps=4)
'''
TRITON_RENAMED = """
@triton.jit
def plus(src, dst, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # where
    tl.store(dst + i, tl.load(src + i, mask=i < count) + 1, mask=i < count)

def op(src, dst) -> None:
    plus[(4,)](src, dst, src.numel(), BLOCK=1024, num_warps=4)
"""


def of(source: str, language: Language):  # type: ignore[no-untyped-def]
    return structure(Candidate(op="op", language=language, source=source))


@pytest.mark.parametrize(
    ("a", "b", "language"),
    [(CUDA, CUDA_RENAMED, Language.CUDA), (TRITON, TRITON_RENAMED, Language.TRITON)],
)
def test_names_comments_and_layout_are_no_structure(a: str, b: str, language: Language) -> None:
    assert of(a, language).key == of(b, language).key
    assert of(a, language).distance(of(b, language)) == 0


@pytest.mark.parametrize(
    ("a", "b", "language"),
    [
        (CUDA, CUDA.replace("/ 256, 256", "/ 256, 512"), Language.CUDA),
        (TRITON, TRITON.replace("BLOCK=1024", "BLOCK=256"), Language.TRITON),
        (TRITON, TRITON.replace("num_warps=4", "num_warps=8"), Language.TRITON),
        (TRITON, TRITON.replace("tl.store(out + at,", "tl.atomic_add(out + at,"), Language.TRITON),
    ],
)
def test_launches_tiles_and_operations_are(a: str, b: str, language: Language) -> None:
    first, second = of(a, language), of(b, language)
    assert first.key != second.key
    assert first.distance(second) == second.distance(first) > 0


def test_another_design_is_far_and_another_launch_is_near() -> None:
    near = of(CUDA, Language.CUDA).distance(of(CUDA.replace("256>>>", "512>>>"), Language.CUDA))
    far = of(CUDA, Language.CUDA).distance(of(CUDA_VECTOR, Language.CUDA))
    assert near < APART < far <= 1


def test_features_in_words() -> None:
    assert {"vector of 4", "read-only loads", "size 512", "1 kernel", "grid-stride loop"} <= of(
        CUDA_VECTOR, Language.CUDA
    ).features
    assert {"size 1024", "size 4", "1 kernel"} <= of(TRITON, Language.TRITON).features


@pytest.mark.parametrize(
    "source", ["", "def (", "\0", "(" * 5000, "'" * 999, "/*", "<<<" * 500, "a" * 100_000]
)
@pytest.mark.parametrize("language", [Language.CUDA, Language.TRITON])
def test_no_source_is_too_odd(source: str, language: Language) -> None:
    assert len(of(source, language).key) == 12


def test_the_librarys_solutions_of_one_language_differ_by_op() -> None:
    triton = [
        structure(candidate)
        for op in load_ops().values()
        for info, candidate in op.solutions()
        if info.language is Language.TRITON
    ]
    assert len(triton) > 3
    pairs = [(a, b) for index, a in enumerate(triton) for b in triton[:index]]
    assert all(a.key != b.key for a, b in pairs)
