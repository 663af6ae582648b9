"""How a kernel is built, apart from its text: what a search needs to tell designs from each other.

Two sources that differ in names, comments, layout or the order of independent words have one
structure; another launch shape, vector width, tile or algorithm is another. Python (Triton and the
like) goes by the shape of its syntax tree, C-like languages by a skeleton of kinds of tokens; both
by the features that decide speed: launches, vectors, tiles, where data is kept.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from patcher.bench import Candidate

SHINGLE = 4
"""Skeletons are compared by their runs of so many tokens."""
APART = 0.2
"""From this distance on two kernels count as two designs."""


@dataclass(frozen=True)
class Structure:
    """One design."""

    key: str
    """The same for the same skeleton and features; 12 hex digits."""
    shingles: frozenset[str]
    features: frozenset[str]
    """In words, e.g. `warp shuffle`, `vector of 4`, `size 256`."""

    def distance(self, other: Structure) -> float:
        """0 for the same design, 1 for nothing in common."""
        if self.key == other.key:
            return 0.0
        # A launch or tile size alone is a tuning of one design: features weigh less.
        skeleton = _jaccard(self.shingles, other.shingles)
        return 1.0 - 0.75 * skeleton - 0.25 * _jaccard(self.features, other.features)


def structure(candidate: Candidate) -> Structure:
    """The structure of a candidate; what does not parse goes by its tokens."""
    return _structure(candidate.source, candidate.file_name.endswith(".py"))


@lru_cache(maxsize=512)
def _structure(source: str, python: bool) -> Structure:
    skeleton: Sequence[str] | None = None
    if python:
        skeleton = _python_skeleton(source)
        features = frozenset(_features(_without_python_comments(source), _PYTHON))
    else:
        features = frozenset(_features(_without_comments(source), _NATIVE))
    if skeleton is None:
        skeleton = list(_tokens(_without_comments(source)))
    runs = range(max(1, len(skeleton) - SHINGLE + 1))
    shingles = frozenset(" ".join(skeleton[at : at + SHINGLE]) for at in runs)
    whole = "\n".join([*skeleton, "", *sorted(features)])
    return Structure(hashlib.sha256(whole.encode()).hexdigest()[:12], shingles, features)


def _jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b) if a or b else 1.0


# What libraries name is structure (`tl.dot`, `tl.atomic_add`); what the author names is not.
_LIBRARIES = {"tl", "triton", "torch", "cute", "cutlass", "math", "libdevice"}


def _python_skeleton(source: str) -> list[str] | None:
    """Kinds of nodes in order, library functions by name; None when it is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = []
    for node in _walk(tree):
        if isinstance(node, ast.Attribute) and _root(node) in _LIBRARIES:
            found.append(node.attr)
        elif isinstance(node, ast.keyword) and node.arg in _LAUNCH_KEYWORDS:
            found.append(str(node.arg))
        elif not isinstance(node, (ast.Load, ast.Store, ast.Import, ast.ImportFrom, ast.alias)):
            found.append(type(node).__name__)
    return found


_LAUNCH_KEYWORDS = {"num_warps", "num_stages", "num_ctas", "eviction_policy", "cache_modifier"}


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """In order of the source, without docstrings and annotations."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        children = list(ast.iter_child_nodes(node))
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            children.remove(first)
        skipped = [getattr(node, name, None) for name in ("annotation", "returns")]
        stack += [child for child in reversed(children) if not any(child is one for one in skipped)]


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


_KEYWORDS = (
    "auto|bool|break|case|char|class|const|constexpr|continue|default|do|double|else|enum|"
    "extern|float|for|half|if|inline|int|long|namespace|operator|return|short|signed|sizeof|"
    "static|struct|switch|template|throw|typename|union|unsigned|using|void|volatile|while"
)
"""As alternatives of a pattern."""
_VECTOR = re.compile(r"(?:float|half|int|uint|short|ushort|char|uchar|double|bfloat16)(\d+)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_KEPT_NAME = re.compile(
    r"__\w+|_mm\w+|v(?:ld|st|add|mul|fma|cvt)\w*q?_\w+|atomic\w+|wmma|\w+_async"
    rf"|{_KEYWORDS}|{_VECTOR.pattern}"
)
_TOKEN = re.compile(
    r"\#[ \t]*pragma[^\n]*|[A-Za-z_]\w*|0[xX][\da-fA-F]+\w*|(?:\d[\d']*\.?\d*|\.\d+)"
    r"(?:[eE][+-]?\d+)?\w*|<<<|>>>|->|::|<<=?|>>=?|[-+*/%&|^=!<>]=|&&|\|\||\+\+|--|\S"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|(\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+')", re.DOTALL)


def _without_comments(source: str) -> str:
    """C-like: comments and the texts of literals gone, and the lines that include."""
    bare = _COMMENT.sub(lambda found: ' "" ' if found[1] else " ", source)
    return re.sub(r"^[ \t]*#[ \t]*include[^\n]*", "", bare, flags=re.MULTILINE)


def _without_python_comments(source: str) -> str:
    return re.sub(r"#[^\n]*", "", source)


def _tokens(text: str) -> Iterator[str]:
    """Kinds: names become `n` unless they are the language's or an intrinsic, numbers `0`."""
    for found in _TOKEN.finditer(text):
        token = found[0]
        if token.startswith("#"):
            yield " ".join(token.split()).replace("# ", "#")  # a pragma
        elif token[0].isdigit() or (token[0] == "." and len(token) > 1):
            yield "0"
        elif _NAME.fullmatch(token) and not _KEPT_NAME.fullmatch(token):
            yield "n"
        else:
            yield token


_NATIVE = {
    "shared memory": r"\b__shared__\b|\bthreadgroup\b|\blocal_accessor\b",
    "dynamic shared memory": r"\bextern\s+__shared__",
    "warp shuffle": r"\b__shfl\w*|\b__reduce_\w+_sync|\bsimd_shuffle\w*",
    "block barrier": r"\b__syncthreads\w*|\bthreadgroup_barrier",
    "tensor cores": r"\bwmma\b|\bmma_?sync\b|\bmma\.sync|\bwgmma",
    "asynchronous copies": r"\bcp_async|\bmemcpy_async\b|cp\.async|\btma_",
    "atomics": r"\batomic\w+\s*\(",
    "cooperative groups": r"\bcooperative_groups\b|\bthis_cluster\b",
    "launch bounds": r"\b__launch_bounds__\b",
    "read-only loads": r"\b__ldg\b|\b__ldcs\b|\b__ldca\b",
    "threads": r"#\s*pragma\s+omp[^\n]{0,200}\bparallel\b|\bstd::thread\b",
    "simd pragma": r"#\s*pragma\s+omp[^\n]{0,200}\bsimd\b",
    "unrolled": r"#\s*pragma\s+unroll|#\s*pragma\s+GCC\s+unroll",
    "AVX2": r"\b_mm256_\w+",
    "AVX-512": r"\b_mm512_\w+",
    "NEON": r"\bfloat32x4_t\b",
    "template": r"\btemplate\s*<",
    "grid-stride loop": r"\+=\s*(?:[\w:()]*\s*\()?\s*(?:gridDim|blockDim)\b",
}
_PYTHON = {
    "tensor cores": r"\btl\.dot\b|\bcute\.gemm\b",
    "atomics": r"\btl\.atomic_\w+",
    "reduction": r"\btl\.(?:sum|max|min|reduce)\b",
    "scan": r"\btl\.(?:cumsum|associative_scan)\b",
    "loop": r"\btl\.(?:range|static_range)\b|\bfor\s+\w+\s+in\s+range\b",
    "block pointers": r"\btl\.(?:make_block_ptr|make_tensor_descriptor)\b",
    "several kernels": r"@triton\.jit[\s\S]*@triton\.jit",
    "autotune": r"@triton\.autotune",
    "pipelining": r"\bnum_stages\s*=\s*[2-9]",
    "fixed grid": r"\bnum_programs\b|\bmulti_processor_count\b",
}
_SIZE = re.compile(
    r"\b[A-Z_a-z]{0,60}(?:BLOCK|TILE|THREADS|WARPS|ROWS|VEC|UNROLL|STAGES|num_warps|num_stages|Block|Tile"
    r"|Threads|Warps|Rows|Vec)\w{0,60}\s*=\s*(\d+)"
)
_LAUNCH = re.compile(r"<<<.{1,200}?,\s*(\d+)\b", re.DOTALL)


def _features(text: str, named: dict[str, str]) -> Iterator[str]:
    for name, pattern in named.items():
        if re.search(pattern, text):
            yield name
    for found in _VECTOR.finditer(text):
        if found[1] in ("2", "4", "8", "16"):
            yield f"vector of {found[1]}"
    for found in [*_SIZE.finditer(text), *_LAUNCH.finditer(text)]:
        yield f"size {found[1]}"
    kernels = len(re.findall(r"\b__global__\b|@triton\.jit", text))
    if kernels:
        yield f"{kernels} kernel" + ("s" if kernels > 1 else "")
