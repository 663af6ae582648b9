"""Where TensorRT-LLM launches a kernel in C++ there is no seam in Python: a diff and a recipe.

The diff adds a header with the replacement and asks it first, at the start of the function that
launches the engine's own kernel; what the replacement says no to runs as before. It is made for
one checked-out tree, whose function must take what was read in NVIDIA/TensorRT-LLM:
cutlass_kernels/moe_gemm/moe_kernels.cu (ac73e31, 000dea2) and
unfusedAttentionKernels/unfusedAttentionKernels_2_template.h (0097566). Nobody has built
TensorRT-LLM with such a diff yet; what is tested is that it applies, reverts and compiles.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from patcher.bench import UsageError, VerificationError

NAMESPACE = "patcher_kernel"
"""Where the replacement defines its function."""
_KERNELS = "cpp/tensorrt_llm/kernels"


@dataclass(frozen=True)
class SourceSeam:
    """A function of TensorRT-LLM that launches one kernel."""

    name: str
    """Of the function that the replacement defines: it gives a bool, whether it did the work."""
    path: str
    """In the tree."""
    function: str
    parameters: tuple[str, ...]
    """Type and name, as they were read."""
    tags: tuple[str, ...] = ()
    """Template parameters that no parameter tells of: given first, as null pointers to them."""

    @property
    def arguments(self) -> tuple[str, ...]:
        tags = tuple(f"static_cast<{tag}*>(nullptr)" for tag in self.tags)
        return tags + tuple(parameter.split()[-1] for parameter in self.parameters)


SEAMS = {
    seam.name: seam
    for seam in (
        SourceSeam(
            name="moe_finalize",
            path=f"{_KERNELS}/cutlass_kernels/moe_gemm/moe_kernels.cu",
            function="finalizeMoeRoutingKernelLauncher",
            parameters=(
                "GemmOutputType const* expanded_permuted_rows",
                "OutputType* reduced_unpermuted_output",
                "ScaleBiasType const* bias",
                "float const* final_scales",
                "int const* unpermuted_row_to_permuted_row",
                "int const* permuted_row_to_unpermuted_row",
                "int const* token_selected_experts",
                "int64_t const* expert_first_token_offset",
                "int64_t const num_rows",
                "int64_t const padded_cols",
                "int64_t const unpadded_cols",
                "int64_t const experts_per_token",
                "int64_t const num_experts_per_node",
                "MOEParallelismConfig parallelism_config",
                "bool const enable_alltoall",
                "cudaStream_t stream",
            ),
        ),
        SourceSeam(
            name="bias_rope_kv",
            path=f"{_KERNELS}/unfusedAttentionKernels/unfusedAttentionKernels_2_template.h",
            function="invokeApplyBiasRopeUpdateKVCacheDispatch",
            parameters=(
                "QKVPreprocessingParams<T, KVCacheBuffer> params",
                "cudaStream_t stream",
            ),
            tags=("TCache",),
        ),
    )
}
"""By the name of the replacement's function."""


@dataclass(frozen=True)
class SourceDiff:
    """A change of one source tree."""

    seam: SourceSeam
    text: str
    """For `git apply`."""
    before: dict[str, str]
    """sha256 of the files that it changes, by path."""
    after: dict[str, str]
    """sha256 of the files that it changes or adds."""
    function: str
    """sha256 of the text of the function that it changes, as it was."""


def make_diff(tree: Path, seam: SourceSeam, replacement: str) -> SourceDiff:
    """The change that puts a replacement into a tree; nothing is written.

    Args:
        tree: a checkout of TensorRT-LLM.
        replacement: C++ source with `bool patcher_kernel::<seam.name>(...)`, for the types that
            it was made for; it includes what it needs.

    Raises:
        UsageError: that is no such tree, or the replacement defines no such function.
        VerificationError: the function is not there, takes something else, or is patched already.
    """
    path = tree / seam.path
    try:
        # bytes, so that line ends stay what they are
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{tree} has no {seam.path}", "give the folder of a checkout of TensorRT-LLM"
        ) from error
    if not re.search(rf"\bbool\s+{seam.name}\s*\(", replacement):
        raise UsageError(
            f"the replacement defines no function `bool {seam.name}(...)`",
            f"it must, in namespace {NAMESPACE}; see CONTRIBUTING.md, Add an engine",
        )
    if f"{NAMESPACE}::" in text:
        raise VerificationError(
            f"{seam.path} holds a patch already", "take it out with `git apply -R` first"
        )
    start, body, end = _definition(text, seam)
    ending = "\r\n" if "\r\n" in text else "\n"
    header = _header(seam, replacement)
    digest = hashlib.sha256(header.encode()).hexdigest()[:12]
    beside = str(Path(seam.path).parent / f"patcher_{seam.name}_{digest}.h")
    call = (
        f"    // {digest}: what the replacement is not for goes on below",
        f"    if (::{NAMESPACE}::{seam.name}({', '.join(seam.arguments)}))",
        "    {",
        "        return;",
        "    }",
    )
    changed = text[:body] + "".join(ending + line for line in call) + text[body:]
    include = re.search(r"^[ \t]*#[ \t]*include\b", changed, re.MULTILINE)
    if include is None:
        raise VerificationError(f"{seam.path} includes nothing", "use another version's checkout")
    at = include.start()
    changed = f'{changed[:at]}#include "{Path(beside).name}"{ending}{changed[at:]}'
    return SourceDiff(
        seam=seam,
        text=_git_diff(seam.path, text, changed) + _git_diff(beside, None, header),
        before={seam.path: _sha256(text)},
        after={seam.path: _sha256(changed), beside: _sha256(header)},
        function=_sha256(text[start:end]),
    )


def _definition(text: str, seam: SourceSeam) -> tuple[int, int, int]:
    """Where the function begins, where its body does (after the brace), and where it ends.

    Raises:
        VerificationError: it is not there once, or takes something else.
    """
    code = _without_comments(text)
    found = []
    for match in re.finditer(rf"\bvoid\s+{seam.function}\s*\(", code):
        closed = _closing(code, match.end() - 1, "()")
        brace = re.compile(r"\s*\{").match(code, closed)
        if brace is not None:
            found.append((match, code[match.end() : closed - 1], brace.end()))
    if len(found) != 1:
        raise VerificationError(
            f"{seam.path} defines `void {seam.function}(...)` {len(found)} times, once was "
            "expected",
            "use a version of TensorRT-LLM that was read (README), or adapt "
            "integrate/tensorrt_llm_source.py",
        )
    [(match, parameters, body)] = found
    taken = [" ".join(each.split()) for each in _split(parameters)]
    expected = [" ".join(each.split()) for each in seam.parameters]
    if taken != expected:
        differing = [line for line in difflib.ndiff(expected, taken) if line[0] in "+-"]
        raise VerificationError(
            f"{seam.function} takes something else than was read (- read, + found): "
            + "; ".join(differing),
            "use a version of TensorRT-LLM that was read (README), or adapt "
            "integrate/tensorrt_llm_source.py",
        )
    return match.start(), body, _closing(code, body - 1, "{}")


def _without_comments(text: str) -> str:
    """The same length, with comments and literals blanked: what is left are code's own brackets."""
    pattern = re.compile(
        r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
    )
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _closing(code: str, start: int, pair: str) -> int:
    """Behind the bracket that closes the one at `start`; the end of the text if none does."""
    depth = 0
    for index in range(start, len(code)):
        if code[index] == pair[0]:
            depth += 1
        elif code[index] == pair[1]:
            depth -= 1
            if depth == 0:
                return index + 1
    return len(code)


def _split(parameters: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth = [""], 0
    for character in parameters:
        depth += (character in "<([{") - (character in ">)]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _header(seam: SourceSeam, replacement: str) -> str:
    return (
        f"// Made by patcher for {seam.function}.\n#pragma once\n\n{replacement.rstrip()}\n\n"
        f"namespace {NAMESPACE}\n{{\n"
        "// for types that the replacement has no function for\n"
        f"template <typename... Args>\ninline bool {seam.name}(Args const&...)\n{{\n"
        f"    return false;\n}}\n}} // namespace {NAMESPACE}\n"
    )


def _git_diff(path: str, before: str | None, after: str) -> str:
    lines = difflib.unified_diff(
        (before or "").splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"a/{path}" if before is not None else "/dev/null",
        f"b/{path}",
    )
    ended = (
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
    new = "new file mode 100644\n" if before is None else ""
    return f"diff --git a/{path} b/{path}\n{new}" + "".join(ended)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
