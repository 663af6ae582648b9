"""Make a source diff for kernels that TensorRT-LLM launches in C++, where Python cannot patch.

The diff adds a header with the replacement. The function that launches the engine's own kernel
calls it first; if the replacement returns false, the engine's kernel runs. The diff is made for one
checkout, whose function must have the known parameters (NVIDIA/TensorRT-LLM:
cutlass_kernels/moe_gemm/moe_kernels.cu at ac73e31 and 000dea2,
unfusedAttentionKernels/unfusedAttentionKernels_2_template.h at 0097566). Tests show that the diff
applies, reverts and compiles; TensorRT-LLM has not been built with it yet.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from patcher.bench import UsageError, VerificationError

NAMESPACE = "patcher_kernel"
"""The C++ namespace of the replacement's function."""
_KERNELS = "cpp/tensorrt_llm/kernels"


@dataclass(frozen=True)
class SourceSeam:
    """A function of TensorRT-LLM that launches one kernel."""

    name: str
    """Name of the replacement's function, which returns a bool: whether it did the work."""
    path: str
    """Path of the file in the source tree."""
    function: str
    """Name of TensorRT-LLM's function."""
    parameters: tuple[str, ...]
    """Its parameters, type and name."""
    tags: tuple[str, ...] = ()
    """Template parameters that appear in no parameter; they are passed first, as null pointers."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of the call to the replacement, as C++."""
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
"""Functions that can be patched, by the name of the replacement's function."""


@dataclass(frozen=True)
class SourceDiff:
    """A change of one source tree."""

    seam: SourceSeam
    text: str
    """The diff, for `git apply`."""
    before: dict[str, str]
    """sha256 of the changed files before, by path."""
    after: dict[str, str]
    """sha256 of the changed and added files after, by path."""
    function: str
    """sha256 of the changed function's text before."""


def make_diff(tree: Path, seam: SourceSeam, replacement: str) -> SourceDiff:
    """Make the diff that adds a replacement to a source tree; nothing is written.

    Args:
        tree: a checkout of TensorRT-LLM.
        seam: the function to patch.
        replacement: C++ source with `bool patcher_kernel::<seam.name>(...)` for the types that it
            supports, and with the includes that it needs.

    Returns:
        The diff with checksums.

    Raises:
        UsageError: the tree is no such checkout, or the replacement lacks the function.
        VerificationError: the function is missing, has other parameters, or is already patched.
    """
    path = tree / seam.path
    try:
        # read bytes to preserve line endings
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{tree} has no {seam.path}", "give the folder of a checkout of TensorRT-LLM"
        ) from error
    if not re.search(rf"\bbool\s+{seam.name}\s*\(", replacement):
        raise UsageError(
            f"the replacement defines no function `bool {seam.name}(...)`",
            f"define it in namespace {NAMESPACE}; see CONTRIBUTING.md, Add an engine",
        )
    if f"{NAMESPACE}::" in text:
        raise VerificationError(
            f"{seam.path} is already patched", "revert it with `git apply -R` first"
        )
    start, body, end = _definition(text, seam)
    ending = "\r\n" if "\r\n" in text else "\n"
    header = _header(seam, replacement)
    digest = hashlib.sha256(header.encode()).hexdigest()[:12]
    beside = str(Path(seam.path).parent / f"patcher_{seam.name}_{digest}.h")
    call = (
        f"    // {digest}: calls that the replacement does not support continue below",
        f"    if (::{NAMESPACE}::{seam.name}({', '.join(seam.arguments)}))",
        "    {",
        "        return;",
        "    }",
    )
    changed = text[:body] + "".join(ending + line for line in call) + text[body:]
    include = re.search(r"^[ \t]*#[ \t]*include\b", changed, re.MULTILINE)
    if include is None:
        raise VerificationError(f"{seam.path} has no #include", "use a checkout of another version")
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
    """The offsets of the function's start, of its body (after the brace), and of its end.

    Raises:
        VerificationError: the function is not defined exactly once, or has other parameters.
    """
    code = _without_comments(text)
    definitions = []
    for match in re.finditer(rf"\bvoid\s+{seam.function}\s*\(", code):
        end = _closing(code, match.end() - 1, "()")
        brace = re.compile(r"\s*\{").match(code, end)
        if brace is not None:
            definitions.append((match, code[match.end() : end - 1], brace.end()))
    if len(definitions) != 1:
        raise VerificationError(
            f"{seam.path} defines `void {seam.function}(...)` {len(definitions)} times instead of "
            "once",
            "use a supported version of TensorRT-LLM (README), or adapt "
            "integrate/tensorrt_llm_source.py",
        )
    [(match, parameters, body)] = definitions
    actual = [" ".join(each.split()) for each in _split(parameters)]
    expected = [" ".join(each.split()) for each in seam.parameters]
    if actual != expected:
        differing = [line for line in difflib.ndiff(expected, actual) if line[0] in "+-"]
        raise VerificationError(
            f"{seam.function} has other parameters (- expected, + found): " + "; ".join(differing),
            "use a supported version of TensorRT-LLM (README), or adapt "
            "integrate/tensorrt_llm_source.py",
        )
    return match.start(), body, _closing(code, body - 1, "{}")


def _without_comments(text: str) -> str:
    """The text with comments and literals blanked out, so that all brackets are those of code."""
    pattern = re.compile(
        r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
    )
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _closing(code: str, start: int, pair: str) -> int:
    """The offset after the bracket that closes the one at `start`; the text's end if none does."""
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
    """Split at commas outside brackets."""
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
