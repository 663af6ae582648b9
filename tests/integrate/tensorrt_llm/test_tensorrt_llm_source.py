"""Diffs of TensorRT-LLM's source, on trees of our own whose functions take what the real do."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from patcher import bench
from patcher.integrate.tensorrt_llm_recipe import write_recipe
from patcher.integrate.tensorrt_llm_source import SEAMS, SourceSeam, make_diff

NEEDS_GIT = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
NEEDS_GXX = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

TYPES = """#pragma once
#include <cstdint>
typedef void* cudaStream_t;
struct bf16 { unsigned short bits; };
struct MOEParallelismConfig { int tp_rank; };
struct Blocks {};
template <typename T, typename B> struct QKVPreprocessingParams { T* qkv; B blocks; };
"""
"""Stand-ins for what the engine's headers declare."""

BODIES = {
    "moe_finalize": """
template <class OutputType, class GemmOutputType, class ScaleBiasType>
void finalizeMoeRoutingKernelLauncher(GemmOutputType const* expanded_permuted_rows,
    OutputType* reduced_unpermuted_output, ScaleBiasType const* bias, float const* final_scales,
    int const* unpermuted_row_to_permuted_row, int const* permuted_row_to_unpermuted_row,
    int const* token_selected_experts, int64_t const* expert_first_token_offset,
    int64_t const num_rows, int64_t const padded_cols, int64_t const unpadded_cols,
    int64_t const experts_per_token, int64_t const num_experts_per_node,
    MOEParallelismConfig parallelism_config, bool const enable_alltoall, cudaStream_t stream)
{
    // void finalizeMoeRoutingKernelLauncher() { in a comment
    own("} finalize {");
}
#define INSTANTIATE(T) template void finalizeMoeRoutingKernelLauncher<T, T, T>(T const*, T*);
""",
    "bias_rope_kv": """
template <typename T, typename TCache, typename KVCacheBuffer>
void invokeApplyBiasRopeUpdateKVCacheDispatch(
    QKVPreprocessingParams<T, KVCacheBuffer> params, cudaStream_t stream)
{
    own("rope");
}
""",
}
REPLACEMENTS = {
    "moe_finalize": """#include "types.h"
#include <cstdio>
namespace patcher_kernel
{
inline bool moe_finalize(bf16 const*, bf16*, bf16 const*, float const*, int const*, int const*,
    int const*, int64_t const*, int64_t num_rows, int64_t, int64_t, int64_t, int64_t,
    MOEParallelismConfig, bool, cudaStream_t)
{
    if (num_rows > 8) return false;
    std::puts("new");
    return true;
}
}
""",
    "bias_rope_kv": """#include "types.h"
#include <cstdio>
namespace patcher_kernel
{
inline bool bias_rope_kv(bf16*, QKVPreprocessingParams<bf16, Blocks> params, cudaStream_t)
{
    std::puts("new");
    return true;
}
}
""",
}
CALLS = {
    "moe_finalize": """
    auto run = [](auto* x, int64_t rows) {
        finalizeMoeRoutingKernelLauncher(x, x, x, nullptr, nullptr, nullptr, nullptr, nullptr,
            rows, 1, 1, 1, 1, MOEParallelismConfig{}, false, nullptr);
    };
    run((bf16*) nullptr, 8); run((bf16*) nullptr, 9); run((float*) nullptr, 8);
""",
    "bias_rope_kv": """
    QKVPreprocessingParams<bf16, Blocks> one; QKVPreprocessingParams<float, Blocks> other;
    invokeApplyBiasRopeUpdateKVCacheDispatch<bf16, bf16, Blocks>(one, nullptr);
    invokeApplyBiasRopeUpdateKVCacheDispatch<bf16, signed char, Blocks>(one, nullptr);
    invokeApplyBiasRopeUpdateKVCacheDispatch<float, bf16, Blocks>(other, nullptr);
""",
}
SAID = {
    "moe_finalize": ["new", "} finalize {", "} finalize {"],
    "bias_rope_kv": ["new", "rope", "rope"],
}


def tree_of(folder: Path, seam: SourceSeam, body: str | None = None) -> Path:
    path = folder / seam.path
    path.parent.mkdir(parents=True)
    start = '// licence\n#include "types.h"\n#include <cstdio>\n'
    path.write_text(f"{start}inline void own(char const* what) {{ std::puts(what); }}\n")
    with path.open("a") as stream:
        stream.write(BODIES[seam.name] if body is None else body)
    return folder


def git_apply(tree: Path, diff: str, *options: str) -> None:
    done = subprocess.run(
        ["git", "apply", *options], input=diff.encode(), cwd=tree, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def digests(tree: Path) -> dict[str, str]:
    return {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in tree.rglob("*")
        if path.is_file()
    }


@NEEDS_GIT
@pytest.mark.parametrize("name", SEAMS)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_diff_applies_and_reverts_to_the_same_bytes(
    name: str, ending: str, tmp_path: Path
) -> None:
    seam = SEAMS[name]
    tree = tree_of(tmp_path, seam)
    path = tree / seam.path
    path.write_bytes(path.read_text().rstrip().replace("\n", ending).encode())
    before = digests(tree)
    diff = make_diff(tree, seam, REPLACEMENTS[name])
    assert diff.before == before
    git_apply(tree, diff.text, "--check")
    git_apply(tree, diff.text)
    assert digests(tree) == diff.after
    with pytest.raises(bench.VerificationError, match="is already patched"):
        make_diff(tree, seam, REPLACEMENTS[name])
    git_apply(tree, diff.text, "-R")
    assert digests(tree) == before


@NEEDS_GIT
@NEEDS_GXX
@pytest.mark.parametrize("name", SEAMS)
def test_the_replacement_is_asked_first_and_for_its_types_alone(name: str, tmp_path: Path) -> None:
    seam = SEAMS[name]
    tree = tree_of(tmp_path / "tree", seam)
    git_apply(tree, make_diff(tree, seam, REPLACEMENTS[name]).text)
    (tmp_path / "types.h").write_text(TYPES)
    main = tmp_path / "main.cpp"
    main.write_text(f'#include "{tree / seam.path}"\nint main() {{{CALLS[name]}}}\n')
    program = tmp_path / "program"
    subprocess.run(
        ["g++", "-std=c++17", "-I", str(tmp_path), "-o", str(program), str(main)], check=True
    )
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == SAID[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("int64_t const padded_cols, ", ""), r"- int64_t const padded_cols"),
        (("bool const enable_alltoall", "bool const all"), r"- bool .*; \+ bool const all"),
        (("void finalizeMoeRouting", "int finalizeMoeRouting"), "0 times instead of once"),
        (("    own(", "    // own("), None),
    ],
)
def test_another_function_is_refused_with_what_differs(
    change: tuple[str, str], message: str | None, tmp_path: Path
) -> None:
    seam = SEAMS["moe_finalize"]
    tree = tree_of(tmp_path, seam, BODIES["moe_finalize"].replace(*change))
    if message is None:
        same = tree_of(tmp_path / "same", seam)
        replacement = REPLACEMENTS[seam.name]
        other, whole = make_diff(tree, seam, replacement), make_diff(same, seam, replacement)
        assert other.function != whole.function, "what the body was is told by its digest"
        return
    with pytest.raises(bench.VerificationError, match=message) as error:
        make_diff(tree, seam, REPLACEMENTS[seam.name])
    assert error.value.exit_code == 5


def test_no_tree_and_no_replacement_are_usage_errors(tmp_path: Path) -> None:
    seam = SEAMS["bias_rope_kv"]
    with pytest.raises(bench.UsageError, match="has no cpp/tensorrt_llm/kernels"):
        make_diff(tmp_path, seam, REPLACEMENTS[seam.name])
    with pytest.raises(bench.UsageError, match="defines no function `bool bias_rope_kv"):
        make_diff(tree_of(tmp_path, seam), seam, REPLACEMENTS["moe_finalize"])


@NEEDS_GIT
def test_the_recipes_own_checks_hold(tmp_path: Path) -> None:
    """Its first and third block are run, but for the build, which needs TensorRT-LLM."""
    seam = SEAMS["moe_finalize"]
    tree = tree_of(tmp_path / "tree", seam)
    diff = make_diff(tree, seam, REPLACEMENTS[seam.name])
    recipe = write_recipe(tmp_path / "recipe", diff).read_text()
    blocks = [part.partition("```")[0] for part in recipe.split("```bash\n")[1:]]
    assert len(blocks) == 5
    build = 'python3 scripts/build_wheel.py --cuda_architectures "90-real"\n'
    assert build in blocks[2]
    for block in (blocks[0], blocks[2].replace(build, "")):
        subprocess.run(
            ["bash", "-euc", block],
            cwd=tree,
            env={"PATH": "/usr/bin:/bin", "PATCH": str(tmp_path / "recipe")},
            check=True,
            capture_output=True,
        )
    assert digests(tree) == diff.after
    for block in blocks:
        subprocess.run(["bash", "-n", "-c", block], check=True)
