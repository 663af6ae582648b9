"""Kernel names: one spelling, one family, and what they are."""

from __future__ import annotations

import csv
import gzip
import re
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patcher.hotspot import classify
from patcher.hotspot.names import (
    family,
    function_key,
    match_key,
    normalise,
    printable,
    without_arguments,
)
from patcher.hotspot.readers.kineto import read_kineto
from patcher.hotspot.readers.ncu import read_ncu

DATA = Path(__file__).parents[1] / "data"
TRACE = DATA / "kineto/vllm-decode-kineto.json.gz"
EXPORT = DATA / "nsys/decode.sqlite"


def text_of(name: str) -> str:
    path = DATA / name
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")


def rows(name: str) -> list[list[str]]:
    lines = text_of(f"names/{name}").split("\n")
    return [line.split("\t") for line in lines[1:] if line]


def known_names() -> list[str]:
    return text_of("nsys/kernel_names.txt.gz").splitlines()


def nsys_names() -> list[str]:
    with sqlite3.connect(EXPORT) as database:
        query = (
            "SELECT DISTINCT s.value FROM CUPTI_ACTIVITY_KIND_KERNEL k "
            "JOIN StringIds s ON s.id = k.demangledName"
        )
        return [name for (name,) in database.execute(query)]


def kineto_names() -> tuple[str, ...]:
    launches = read_kineto(TRACE).launches
    assert launches is not None
    return launches.texts


def test_nsys_and_kineto_spell_every_kernel_of_the_same_engine_alike() -> None:
    """The same model and engine under both: 35 kernels, each with one partner."""
    nsys, kineto = (Counter(map(normalise, names)) for names in (nsys_names(), kineto_names()))
    assert nsys == kineto
    assert set(nsys.values()) == {1}
    assert len(nsys) == 35


@pytest.mark.parametrize(
    ("nsys", "kineto"),
    [
        (
            "void at::native::<unnamed>::f<(int)128, (bool)0>(float *)",
            "void at::native::(anonymous namespace)::f<128, false>(float*)",
        ),
        (
            "void f<std::array<char *, (unsigned long)3>>(int, T2)",
            "void f<std::array<char*, 3ul> >(int, std::array<char*, 3ul>)",
        ),
        (
            "void g<void h<T>(const T1 &, bool)::[lambda(const char *, long) (instance 2)]>(T1)",
            "void g<h<T>(T const&, bool)::{lambda(char const*, long)#2}>(T)",
        ),
        (
            "void f<a::b(c &)::[lambda() (instance 3)]::operator ()() const::[lambda(d) "
            "(instance 1)]>(int)",
            "void f<a::b(c&)::{lambda()#3}::operator()() const::{lambda(d)#1}>(int)",
        ),
        ("std::enable_if<!T7, void>::type a::k<int>(T13)", "a::k<int>(int)"),
        ("void k<unsigned int, const long *>(T1)", "void k<unsigned int, long const*>(int)"),
        ("void k<(vllm::Kind)0, (int)-2>(T1 *)", "void k<(vllm::Kind)0, -2>(float*)"),
    ],
)
def test_one_spelling(nsys: str, kineto: str) -> None:
    assert normalise(nsys) == normalise(kineto)


@pytest.mark.parametrize(
    "name",
    [
        "nvjet_sm90_tst_512x8_64x3_2x1_v_bz_TNT",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu",
        "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_7MeanOpsIffffEEjfLi4ELi4EEEEEvT1_",
        "module::GptOssRMSNorm",
        "aten::add",
    ],
)
def test_what_is_spelled_in_one_way_stays(name: str) -> None:
    assert normalise(name) == name


def test_a_kernel_in_a_module_keeps_its_module() -> None:
    assert (
        normalise("module::DecoderLayer/void a::k<(int)1>(int)") == "module::DecoderLayer/a::k<1>"
    )


def test_different_kernels_stay_different() -> None:
    """Of 604 names, those that become one are one kernel under two profilers."""
    found = defaultdict(list)
    for name in known_names():
        found[normalise(name)].append(name)
    same = [names for names in found.values() if len(names) > 1]
    assert len(same) == 2
    for one, other in same:
        assert {"<(int)" in one, "<(int)" in other} == {True, False}


def test_a_normalised_name_is_normal() -> None:
    for name in known_names():
        assert normalise(normalise(name)) == normalise(name)


def test_ncu_meets_the_others_by_its_key() -> None:
    """ncu 2025.3 leaves out `native`, casts and more. It ran another program than the traces, so
    its kernels are written here as Kineto writes their like in kernel_names.txt.gz."""
    kineto = [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, "
        "float, true>(int, float, c10::BFloat16 const*, float*)",
        "void at::native::vectorized_elementwise_kernel<8, at::native::(anonymous "
        "namespace)::silu_kernel(at::TensorIteratorBase&)::{lambda()#1}::operator()() const::"
        "{lambda()#6}::operator()() const::{lambda(c10::BFloat16)#1}, std::array<char*, 2ul> >()",
        "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT",
    ]
    ncu = {match_key(name) for name in read_ncu(DATA / "ncu/raw.csv.gz")}
    assert len(ncu) == 4
    assert {match_key(name) for name in kineto} < ncu


def test_the_key_keeps_what_tells_functions_apart() -> None:
    one = "void at::k<at::silu_kernel(at::T &)::[lambda(float) (instance 1)]>(int)"
    assert match_key(one) == "k<silu_kernel::{lambda(float)#1}>"
    assert match_key(one) != match_key(one.replace("silu", "gelu"))


def test_arguments_alone() -> None:
    assert without_arguments("f<int>(float *)") == "f<int>"
    assert without_arguments("f<int>") == "f<int>"
    assert without_arguments("((") == "(("


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu",
            "_matmul_ogs_NNT_bf16xbf16xmxfp4_swiglu",
        ),
        ("_p_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128", "_p_matmul_ogs_NNT_bf16xbf16xmxfp4"),
        ("triton_red_fused_fused_add_rms_norm_0", "triton_red_fused_fused_add_rms_norm"),
        ("triton_poi_fused_2", "triton_poi_fused_2"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT"),
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_128x64_nn"),
        ("void f<(int)16>(float *)", "void f<(int)16>(float *)"),
    ],
)
def test_variants_of_one_kernel_are_one_family(name: str, expected: str) -> None:
    """Not what is numbered without being named, nor cuBLAS's tiles: those tell kernels apart."""
    assert family(name) == expected


HOSTILE = ("<", "(", "a<", "{lambda(", "a::", "a ", "const ", "operator<", "[lambda(", ")", "_1x1")


@pytest.mark.parametrize("piece", HOSTILE)
def test_nested_brackets_are_one_pass(piece: str) -> None:
    """Anything quadratic would take minutes here."""
    name = printable(piece * 2_000_000)
    assert len(name) == 20_000
    for end in ("", ">", ")", "{"):
        assert isinstance(match_key(name + end), str)
        assert isinstance(family(name + end), str)
        assert len(classify(name + end)) == 2


PIECES = ["::", "<", ">", "(", ")", " ", ",", "const", "operator", "{lambda(", "#1}", "[", "]", "*"]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*PIECES, "void", "a", "(int)", "1ul", "<unnamed>", "…"]), max_size=30)
)
def test_no_name_is_too_odd(pieces: list[str]) -> None:
    name = "".join(pieces)
    for made in (normalise(name), match_key(name), family(name)):
        assert isinstance(made, str)
    assert normalise(name) or not name.strip()
    origin, operation = classify(name)
    assert origin
    assert operation


def test_printable_takes_the_terminal_away() -> None:
    assert printable("a\x1b[31mb\ud800") == "a [31mb "
    assert printable("gemm\u202e\u2066tset\u200b") == "gemm tset "


@pytest.mark.parametrize(("origin", "operation", "name"), rows("expected.tsv.gz"))
def test_kernels_judged_by_hand(origin: str, operation: str, name: str) -> None:
    assert classify(name) == (origin, operation)


def test_little_of_any_profile_stays_unexplained() -> None:
    """Kernel time whose origin is unknown or whose operation is other, of each profile."""
    whole: Counter[str] = Counter()
    vague: Counter[str] = Counter()
    for profile, nanoseconds, name in rows("times.tsv.gz"):
        whole[profile] += int(nanoseconds)
        if classify(name)[0] == "unknown" or classify(name)[1] == "other":
            vague[profile] += int(nanoseconds)
    assert len(whole) > 20
    assert [profile for profile in whole if vague[profile] > 0.02 * whole[profile]] == []


def test_all_known_names_have_an_origin_and_an_operation() -> None:
    names = known_names()
    assert len(names) == 604
    found = [classify(name) for name in names]
    assert [n for n, (origin, _) in zip(names, found, strict=True) if origin == "unknown"] == []
    assert [n for n, (_, operation) in zip(names, found, strict=True) if operation == "other"] == []


def test_the_two_spellings_of_a_kernel_are_classified_alike() -> None:
    by_key = {normalise(name): classify(name) for name in nsys_names()}
    for name in kineto_names():
        assert classify(name) == by_key[normalise(name)]


def test_the_tables_are_tables() -> None:
    for name, columns in (("expected.tsv.gz", 3), ("times.tsv.gz", 3)):
        text = text_of(f"names/{name}")
        assert {len(row) for row in csv.reader(text.splitlines(), "excel-tab", quoting=3)} == {
            columns
        }
        assert not re.search(r"\r|/home/", text)


ELSEWHERE = {
    # reads buffers that a collective or a matmul wrote; no collective itself
    "triton_poi_fused_add_all_reduce_0": ("generated by Inductor", "elementwise"),
    "triton_red_fused_add_all_reduce_mean_mul_pow_rsqrt_1": ("generated by Inductor", "norm"),
    "triton_poi_fused_add_mm_view_5": ("generated by Inductor", "elementwise"),
    "triton_per_fused__flash_attention_forward_add_3": ("generated by Inductor", "elementwise"),
    "triton_tem_fused_mm_3": ("generated by Inductor", "matmul"),
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)": ("communication",) * 2,
    "Cijk_Alik_Bljk_BBS_BH_MT32x32x256_MI16x16x1": ("tuned library source", "matmul"),
    "_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rms": ("library source", "norm"),
    "_ZN2ck16kernel_gemm_xdl_cshuffleIf": ("library source", "matmul"),
    "_ZN5aiter24add_rmsnorm_quant_kernelIDF16b": ("library source", "norm"),
    "_ZN5aiter34fmoe_bf16_blockscaleFp8_g1u1_vs_siluE": ("library source", "MoE matmul"),
    "__amd_rocclr_copyBuffer": ("library source", "copy"),
    "wvSplitK_hf_sml_<__hip_bfloat16>": ("engine source", "matmul"),
    "void paged_attention_ll4mi_reduce_kernel<__hip_bfloat16>()": ("engine source", "attention"),
    "_ZN5aiter33pa_bf16_noquant_gqa16_1tg_4w_mtp0E": ("library source", "attention"),
    "f4gemm_bf16_per1x32Fp4_BpreShuffle_128x512": ("library source", "matmul"),
    "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32": ("library source", "matmul"),
    "SubTensorOpWithCastTensor1d": ("library source", "copy"),
    "rcclGenericKernel()": ("communication", "communication"),
    "attn_fwd": ("program source", "attention"),
    "at::native::xpu::VectorizedElementwiseKernel<4>": ("PyTorch source", "elementwise"),
    "_ZTSN2at6native3xpu29VectorizedElementwiseKernelILi4EE": ("PyTorch source", "elementwise"),
    "gen_gemm_kernel": ("library source", "matmul"),
    "triton_bmm_5": ("generated by Inductor", "matmul"),
    "triton__0d1d2d3d": ("generated by Inductor", "other"),
    "void moe::dev::finalize::finalizeKernel<4>()": ("engine source", "MoE routing"),
    "void at::native::RowwiseMomentsCUDAKernel<float>()": ("PyTorch source", "norm"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_of_inductor_rocm_and_xpu(name: str) -> None:
    assert classify(name) == ELSEWHERE[name]


@pytest.mark.parametrize(
    ("mangled", "function"),
    [
        ("_ZN2at6native29vectorized_elementwise_kernelILi4EEE", "vectorized_elementwise_kernel"),
        ("_Z6squarePf", "square"),
        ("_Z", "_Z"),
        ("void at::native::reduce_kernel<512>(int)", "reduce_kernel"),
        ("_topk_forward", "_topk_forward"),
    ],
)
def test_the_function_of_a_name(mangled: str, function: str) -> None:
    assert function_key(mangled) == function
