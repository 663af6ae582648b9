"""PTX: what its directives say, how it is assembled, and what the host function does with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from patcher.bench import Candidate, Language, Op, guess_language, load_op
from patcher.bench.toolchains import EXAMPLE_OP, Built, build, compilers, load, ptx, toolchain
from patcher.bench.toolchains.ptx import find_ptxas, host_unit
from patcher.bench.toolchains.ptx_source import PtxSourceError, kernel_names, kernels_of

OPS = Path(__file__).parents[2] / "data/ops"
ENTRY = ".visible .entry k(.param .u64 x, .param .u64 out, .param .f32 scale, .param .u32 n)\n"
WHOLE = f"//@ kernel k\n//@ grid n\n{ENTRY}.reqntid 64 {{ ret; }}\n"


@pytest.fixture(autouse=True)
def _ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHER_OPS", str(OPS))


@pytest.fixture
def op() -> Op:
    return load_op(EXAMPLE_OP)


def example() -> Candidate:
    source = toolchain(Language.PTX).example
    return Candidate(op=EXAMPLE_OP, language=Language.PTX, source=source)


def needs(language: Language) -> None:
    if missing := toolchain(language).missing():
        pytest.skip(f"{language}: {missing}")


def assembled(source: str, op: Op) -> Built:
    needs(Language.PTX)
    return build(Candidate(op=op.name, language=Language.PTX, source=source), op.contract)


def test_directives_and_parameters_become_a_launch(op: Op) -> None:
    source = (
        "//@ kernel wide\n//@ when T == float32, n % 4 == 0\n//@ when x_stride_0 == 1\n"
        "//@ grid min(n // 4, 1024), 2\n//@ block 32, 8\n//@ shared 4 * n + 16\n"
        "/* .entry none( */\n"
        ".visible .entry wide(.param .u64 .ptr .global .align 16 y, .param .f64 scale,\n"
        "  .param .s64 out_size_0) { ret; }\n" + WHOLE
    )
    wide, other = kernels_of(source, "a.ptx", op.contract)
    assert wide.conditions == [
        "has_dtype(x, kDLFloat, 32, 1)",
        "(x.size(0) % INT64_C(4)) == INT64_C(0)",
        "x.stride(0) == INT64_C(1)",
    ]
    assert wide.grid == [
        "std::min<int64_t>((x.size(0) / INT64_C(4)), INT64_C(1024))",
        "INT64_C(2)",
        "1",
    ]
    assert wide.block == ["INT64_C(32)", "INT64_C(8)", "1"]
    assert wide.shared == "((INT64_C(4) * x.size(0)) + INT64_C(16))"
    assert wide.arguments == [
        ("void*", "y.data_ptr()"),
        ("double", "static_cast<double>(scale)"),
        ("int64_t", "static_cast<int64_t>(out.size(0))"),
    ]
    assert (other.name, other.block, other.shared) == ("k", ["64", "1", "1"], "0")
    assert kernel_names(source) == ["wide", "k"]


def test_every_dtype_of_a_contract_is_told_apart() -> None:
    contract = load_op("matmul_mxfp4").contract
    symbols = contract.dtypes
    for symbol, options in symbols.items():
        for option in options:
            name = option.removeprefix("=")
            if name in symbols:
                continue
            [kernel] = kernels_of(
                f"//@ kernel k\n//@ when {symbol} == {name}\n//@ grid 1\n"
                ".visible .entry k()\n.reqntid 1 { ret; }",
                "a.ptx",
                contract,
            )
            assert re.fullmatch(r"has_dtype\(\w+, kDL\w+, \d+, [12]\)", kernel.conditions[0])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("ret;", "line 1: no `//@ kernel NAME`"),
        ("\n//@ grid 1", "line 2: `//@ grid` stands before any"),
        ("//@ kernel none", "line 1: there is no `.entry none`"),
        (WHOLE.replace("//@ grid n\n", ""), "line 1: k has no `//@ grid`"),
        (WHOLE.replace(".reqntid 64", ""), "line 1: k has no `//@ block`"),
        (WHOLE + "//@ kernel k\n", "line 5: k has directives already"),
        (WHOLE.replace("grid n", "grid m"), "line 2: m is no tensor, scalar or axis of scaled_add"),
        (WHOLE.replace("grid n", "grid n / 2"), "line 2: `n / 2` is neither"),
        (WHOLE.replace("grid n", "grid __import__('os')"), "line 2: .* is neither"),
        (WHOLE.replace("grid n", "grid n, 1, 1, 1"), "line 2: `//@ grid` has 4 expressions"),
        (WHOLE.replace("grid n", "grid (("), r"line 2: `\(\(` is no expression"),
        (WHOLE.replace("grid n", "size n"), "line 2: unknown `//@ size`"),
        (WHOLE.replace("grid n", "when n"), "line 2: `n` is no comparison"),
        (WHOLE.replace("grid n", "when T == float99"), "line 2: .*: say `T == float32`"),
        (WHOLE.replace(".u64 x", ".u32 x"), "line 3: x is a tensor's address, so it is .u64"),
        (WHOLE.replace(".f32 scale", ".u32 scale"), "line 3: scale is a float"),
        (WHOLE.replace(".u32 n", ".f32 n"), "line 3: n is a whole number"),
        (WHOLE.replace(".u32 n", ".b8 n[16]"), "line 3: the parameter .* is of none"),
        (WHOLE.replace(".u64 x", ".u64 z"), "line 3: z is no tensor"),
        (WHOLE.replace(".u64 x", ".u64 x_size_1"), "line 3: x_size_1 is no tensor"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(source: str, message: str, op: Op) -> None:
    with pytest.raises(PtxSourceError, match=f"a.ptx, {message}"):
        kernels_of(source, "a.ptx", op.contract)
    built = assembled(source, op)
    assert not built.ok
    assert built.log.startswith("scaled_add.ptx, line ")


def test_ptxas_says_the_line_and_what_a_kernel_uses(op: Op) -> None:
    source = example().source
    built = assembled(source, op)
    assert built.ok, built.log
    assert re.search(r"Used \d+ registers", built.log)
    assert built.command.startswith("ptxas -O3 ")
    lines = source.splitlines()
    wrong = next(n for n, text in enumerate(lines, 1) if "ld.param.u32 %n" in text)
    lines[wrong - 1] = "  ld.param.u32 %n, [none];"
    said = assembled("\n".join(lines), op)
    assert not said.ok
    assert f"scaled_add.ptx, line {wrong}; error   : Unknown symbol 'none'" in said.log
    assert "/tmp" not in said.log


def test_a_build_is_of_its_assembler_and_its_directives(
    op: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(Language.PTX)

    def cached(candidate: Candidate) -> bool:
        built = build(candidate, op.contract, folder=tmp_path)
        assert built.ok, built.log
        return built.cached

    assert not cached(example())
    assert cached(example())
    other = example().source.replace("grid (n + 255) // 256", "grid (n + 511) // 256")
    assert not cached(example().model_copy(update={"source": other}))
    version = compilers.version
    later = lambda name: version(name).replace("13.0", "99.0") + name  # noqa: E731
    monkeypatch.setattr(ptx, "version", later)
    assert not cached(example())


def test_the_library_binds_arguments_by_dtype_and_needs_the_driver(op: Op) -> None:
    """What shows without a GPU: which kernel is chosen, and that the driver is not here."""
    built = assembled(example().source, op)
    function = load(built, EXAMPLE_OP)
    doubles = [torch.ones(8, dtype=torch.float64) for _ in range(3)]
    with pytest.raises(TypeError, match=r"no kernel of scaled_add\.ptx takes these tensors"):
        function(*doubles, 0.5)
    empty = [torch.ones(0) for _ in range(3)]
    function(*empty, 0.5)  # a grid of no block is nothing to launch
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            function(*(torch.ones(8) for _ in range(3)), 0.5)


def test_ptxas_is_found_in_packages_where_no_toolkit_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "search_path", lambda: str(tmp_path))
    wheel = tmp_path / "site/triton/backends/nvidia/bin"
    wheel.mkdir(parents=True)
    monkeypatch.setattr(
        ptx, "_folders", lambda name: (str(tmp_path / "site/triton"),) if name == "triton" else ()
    )
    assert find_ptxas() is None
    missing = toolchain(Language.PTX).missing()
    assert missing is not None
    assert "ptxas is in neither PATH" in missing.reason
    (wheel / "ptxas").write_text("#!/bin/sh\n", encoding="utf-8")
    (wheel / "ptxas").chmod(0o755)
    assert find_ptxas() == str(wheel / "ptxas")
    lacking = toolchain(Language.PTX).missing()
    assert lacking is not None
    assert "g++" in lacking.reason


def test_the_host_function_holds_the_cubin_and_the_launches(op: Op) -> None:
    kernels = kernels_of(WHOLE, "a.ptx", op.contract)
    unit = host_unit(op.contract, "a.ptx", kernels, b"\x7fELF")
    assert "image[] = {127,69,76,70}" in unit
    assert "void* argument_0 = x.data_ptr();" in unit
    assert 'return run("k", {x.size(0), 1, 1}, {64, 1, 1}, 0, x.device(), arguments);' in unit


def test_a_file_is_told_by_its_suffix() -> None:
    assert guess_language(Path("a.ptx"), WHOLE) is Language.PTX


INLINE = """
__device__ float fused(float a, float b, float c) {
  float d;
  asm volatile("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
"""


@pytest.mark.slow
def test_cuda_may_hold_ptx_inline(op: Op) -> None:
    needs(Language.CUDA)
    source = toolchain(Language.CUDA).example
    plain = "T(float(x[i]) + scale * float(y[i]))"
    assert plain in source
    inline = source.replace(plain, "T(fused(scale, float(y[i]), float(x[i])))")
    inline = inline.replace("template <typename T>", INLINE + "template <typename T>", 1)
    candidate = Candidate(op=op.name, language=Language.CUDA, source=inline)
    built = build(candidate, op.contract)
    assert built.ok, built.log
    broken = candidate.model_copy(update={"source": inline.replace("fma.rn.f32", "fma.none.f32")})
    said = build(broken, op.contract)
    assert not said.ok
    assert "fma" in said.log
