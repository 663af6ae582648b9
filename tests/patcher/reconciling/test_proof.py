"""Receipts against profiles: real ones, with the norm's kernel under the name of a patch's."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from patch_sample import CANDIDATE, OP
from proof_sample import (
    EXPORT,
    OLD,
    TRITON,
    claims,
    made,
    patched_profile,
    renamed,
    triton_patch,
)

from patcher.bench import Candidate, Language, VerificationError
from patcher.captures import ran
from patcher.hotspot import Profile, read
from patcher.integrate import Patch
from patcher.reconciling.proof import Proof, kernel_names, prove, seen_per_step


def cuda_patch(folder: Path, spaces: str = "namespace {") -> Patch:
    source = (
        f"{spaces}\ntemplate <typename T, int N>\n"
        "__global__ void __launch_bounds__(256, 2)\nadd_norm(T* x) {}\n}\n"
        "__global__ static void second(int) {}\n"
    )
    return made(folder, Candidate(op=OP.name, language=Language.CUDA, source=source))


@pytest.fixture(scope="module")
def stock() -> Profile:
    return read(EXPORT, "gpt-oss-20b")


@pytest.fixture
def patch(tmp_path: Path) -> Patch:
    return triton_patch(tmp_path / "patch")


@pytest.fixture
def patched(tmp_path: Path) -> Profile:
    return read(patched_profile(tmp_path / "patched.sqlite", f"{TRITON}_0"), "gpt-oss-20b")


def launches(profile: Profile, name: str) -> int:
    return sum(kernel.instances for kernel in profile.kernels if name in kernel.name)


def new_row(proof: Proof) -> Any:
    [row] = [row for row in proof.rows if row.role == "new"]
    return row


def test_the_new_kernel_is_there_as_often_as_claimed_and_the_old_is_gone(
    stock: Profile, patched: Profile, patch: Patch
) -> None:
    count = launches(patched, TRITON)
    assert count == launches(stock, OLD) > 0
    proof = prove([claims(patch, count)], patched, patch, whole=True)
    assert proof.passed, proof
    [row] = proof.rows
    assert (row.role, row.launches, row.claimed) == ("new", count, count)
    assert proof.expected_per_step == 2 * 24 == row.per_step
    assert prove([claims(patch, 100 * count)], patched, patch).passed, "the profile is a part"


def test_a_librarys_kernels_that_a_point_replaces_must_be_gone_or_fewer(
    patched: Profile, patch: Patch, stock: Profile
) -> None:
    """Of a matmul, say: its name is no op's own, and other layers go on to call it."""
    receipt = claims(patch, 5000)
    assert prove([receipt], patched, patch).passed

    def replacing(pattern: str) -> Patch:
        contract = patch.contract
        points = [one.model_copy(update={"replaces": pattern}) for one in contract.patch_points]
        told = contract.model_copy(update={"patch_points": tuple(points)})
        manifest = patch.manifest.model_copy(update={"contract": told})
        return Patch(patch.folder, manifest, patch.digest)

    library = "(^|[^a-z])nvjet_"
    found = prove([receipt], patched, replacing(library))
    assert not found.passed
    assert any("nvjet_" in row.kernel for row in found.rows if row.role == "old")
    assert prove([receipt], patched, replacing("no_such_kernel")).passed
    # with what ran before: fewer, by as many as the new one has launches
    assert prove([receipt], patched, replacing(library), before=stock).passed
    assert not prove([receipt], patched, replacing(library), before=patched).passed


def test_counts_that_differ_are_told(patched: Profile, patch: Patch) -> None:
    count = launches(patched, TRITON)
    for calls, whole in ((count - 1, False), (count + 1, True), (count - 1, True)):
        proof = prove([claims(patch, calls)], patched, patch, whole=whole)
        assert not proof.passed
        assert f"{count:,} launches" in new_row(proof).said


def test_a_call_may_run_one_of_several_kernels_by_its_shape(
    patched: Profile, tmp_path: Path
) -> None:
    patch = cuda_patch(tmp_path / "cuda")
    count = launches(patched, TRITON)
    theirs = next(one for one in patched.kernels if TRITON in one.name)
    parts = [
        theirs.model_copy(update={"name": f"<unnamed>::{name}", "instances": instances})
        for name, instances in (("add_norm<float>", count // 4), ("second", count - count // 4))
    ]
    others = tuple(one for one in patched.kernels if TRITON not in one.name)
    profile = patched.model_copy(update={"kernels": (*others, *parts)})
    receipt = claims(patch, count)
    for whole in (False, True):
        proof = prove([receipt], profile, patch, whole=whole)
        assert proof.passed, proof
    assert "by the contract 48, which its kernels share (48 in all)" in proof.rows[0].said
    assert seen_per_step(patch, receipt, profile) == 48
    fewer = parts[1].model_copy(update={"instances": count // 4})
    profile = patched.model_copy(update={"kernels": (*others, parts[0], fewer)})
    assert not prove([receipt], profile, patch).passed
    assert seen_per_step(patch, receipt, profile) == 12


def test_a_kernels_launch_bounds_may_be_reckoned(tmp_path: Path) -> None:
    bounds = "256, 2", "32 * (W + 1) * kGroups, 1", "(NW + 4) * 32", "f(g(1), 2)"
    source = "".join(
        f"__global__ void __launch_bounds__({one}) kernel_{number}(int* x) {{}}\n"
        for number, one in enumerate(bounds)
    )
    patch = made(tmp_path / "p", Candidate(op=OP.name, language=Language.CUDA, source=source))
    assert {f"kernel_{number}" for number in range(4)} <= kernel_names(patch)


def test_a_kernel_that_runs_in_some_layers_only_is_told(patch: Patch, stock: Profile) -> None:
    half = [
        kernel.model_copy(update={"name": f"{TRITON}_0"}) if kernel.name == f"{OLD}_0" else kernel
        for kernel in stock.kernels
    ]
    profile = stock.model_copy(update={"kernels": tuple(half)})
    proof = prove([claims(patch, 10**6)], profile, patch)
    assert {row.role: row.passed for row in proof.rows} == {"new": False, "old": False}
    assert "by the contract 48" in new_row(proof).said
    [old] = [row for row in proof.rows if row.role == "old"]
    assert old.kernel == f"{OLD}_1"
    assert "still runs" in old.said


def test_an_unpatched_run_never_passes(stock: Profile, patch: Patch) -> None:
    proof = prove([claims(patch, 10**6)], stock, patch)
    assert not proof.passed
    assert proof.problems == (
        f"the profile has no kernel called {' or '.join(sorted(kernel_names(patch)))}",
    )
    assert {row.kernel for row in proof.rows} == {f"{OLD}_0", f"{OLD}_1"}


def test_a_capture_without_the_kernel_in_its_steps_is_not_of_the_patched_engine(
    patched: Profile, stock: Profile, patch: Patch
) -> None:
    told = ran(patch, [claims(patch, 10**6)], patched, [patch])
    assert "ran 1,000,000 times since the engine's start, 0 calls fell back; " in told
    assert "launches in the profiled steps" in told
    with pytest.raises(VerificationError, match=r"not run in this profile.*; 0 launches in the"):
        ran(patch, [claims(patch, 10**6)], stock, [patch])
    with pytest.raises(VerificationError, match="ran 0 times"):
        ran(patch, [], None, [patch])


def test_receipts_that_claim_nothing_or_another_patch_never_pass(
    patched: Profile, patch: Patch
) -> None:
    for receipt, said in (
        (claims(patch, 0), "claim no call"),
        (claims(patch, 10**6, digest="other"), "another patch of that id"),
        (claims(patch, 10**6, failure="no compiler"), "no compiler"),
        (claims(patch, 10**6, patch_id="other"), "claim no call"),
    ):
        proof = prove([receipt], patched, patch)
        assert not proof.passed
        assert any(said in problem for problem in proof.problems)


def test_old_kernels_may_be_left_as_often_as_calls_fell_back(
    tmp_path: Path, patch: Patch, stock: Profile
) -> None:
    shutil.copy(EXPORT, tmp_path / "some.sqlite")
    profile = read(renamed(tmp_path / "some.sqlite", f"{OLD}_1", f"{TRITON}_1"), "another")
    left = launches(profile, OLD)
    for fallbacks, passed in ((left, True), (left - 1, False)):
        receipt = claims(patch, 10**6, fallbacks={"not contiguous": fallbacks})
        assert prove([receipt], profile, patch).passed is passed
    proof = prove([claims(patch, 10**6)], profile, patch, before=stock)
    assert proof.passed, "they do other work, too, and run less often by what the new one does"
    assert not prove([claims(patch, 10**6)], profile, patch, before=profile).passed


def test_every_worker_of_a_layer_counts(patched: Profile, patch: Patch) -> None:
    twice = [
        kernel.model_copy(update={"instances": 2 * kernel.instances}) for kernel in patched.kernels
    ]
    both = patched.model_copy(update={"kernels": tuple(twice)})
    ranks = [claims(patch, 10**6, pid=pid, rank=pid) for pid in (0, 1)]
    assert prove(ranks, both, patch).passed
    assert not prove(ranks[:1], both, patch).passed


@pytest.mark.parametrize(
    ("shown", "ours"),
    [
        ("void (anonymous namespace)::add_norm<__nv_bfloat16, (int)4>(T1 *)", True),
        ("void <unnamed>::add_norm<__nv_bfloat16, (int)4>(T1 *)", True),
        ("add_norm", True),
        ("second(int)", True),
        ("void vllm::add_norm<__nv_bfloat16, (int)4>(T1 *)", False),
        ("void flashinfer::norm::(anonymous namespace)::add_norm<1>()", False),
        ("void add_norm_quant<1>(T1 *)", False),
        ("void fused_add_norm<1>(T1 *)", False),
    ],
)
def test_a_name_in_an_engines_namespace_is_the_engines(
    shown: str, ours: bool, stock: Profile, tmp_path: Path
) -> None:
    patch = cuda_patch(tmp_path / "patch")
    named = stock.kernels[0].model_copy(update={"name": shown})
    profile = stock.model_copy(update={"kernels": (named,), "layers": None})
    proof = prove([claims(patch, 10**6)], profile, patch)
    assert [row.role for row in proof.rows] == (["new"] if ours else [])
    assert proof.passed is ours


def test_a_namespace_of_the_source_is_its_own(stock: Profile, tmp_path: Path) -> None:
    patch = cuda_patch(tmp_path / "patch", "namespace mine::deep {")
    named = stock.kernels[0].model_copy(update={"name": "void mine::deep::add_norm<1>()"})
    profile = stock.model_copy(update={"kernels": (named,), "layers": None})
    assert prove([claims(patch, 10**6)], profile, patch).passed


def test_cute_dsl_adds_its_arguments_types_to_a_name(stock: Profile, tmp_path: Path) -> None:
    source = (
        "import cutlass.cute as cute\n@cute.kernel\ndef add_norm(x):\n    pass\n"
        "@cute.jit\ndef fused_add_rms_norm_host(x):\n    pass\ndef fused_add_rms_norm(x): pass\n"
    )
    candidate = Candidate(op=OP.name, language=Language.CUTEDSL, source=source)
    patch = made(tmp_path / "patch", candidate)
    for name, ours in (
        ("kernel_cutlass_add_norm_tensorptrbf16gmemoi641_tensorptrbf16gmemoi641__0", True),
        ("kernel_cutlass_other_tensorptrbf16gmemoi641__0", False),
    ):
        named = stock.kernels[0].model_copy(update={"name": name})
        profile = stock.model_copy(update={"kernels": (named,), "layers": None})
        assert prove([claims(patch, 10**6)], profile, patch).passed is ours


def test_names_come_from_the_source(tmp_path: Path) -> None:
    triton, cuda = triton_patch(tmp_path / "t"), cuda_patch(tmp_path / "c")
    cpp = made(tmp_path / "p", CANDIDATE)
    for patch, names in (
        (triton, {f"{TRITON}_0", f"{TRITON}_1"}),
        (cuda, {"add_norm", "second"}),
        (cpp, set[str]()),
    ):
        assert kernel_names(patch) == names | {f"patcher::fused_add_rms_norm_{patch.digest[:12]}"}
    for info, candidate in OP.solutions():
        if candidate.language in (Language.CUDA, Language.TRITON):
            found = kernel_names(made(tmp_path / info.name, candidate))
            own = {name for name in found if "::" not in name}
            assert own
            assert all(re.search(rf"\b{name}\(", candidate.source) for name in own)


@pytest.mark.parametrize(
    ("once", "taken", "expected"), [(True, 48, 48), (True, 3, 3), (True, None, 48), (False, 3, 48)]
)
def test_where_layers_are_called_once_receipts_say_how_many(
    once: bool, taken: int | None, expected: int, tmp_path: Path
) -> None:
    patch = triton_patch(tmp_path / "patch")
    specs = tuple(
        spec.model_copy(update={"once_per_layer_taken": once})
        for spec in patch.contract.patch_points
    )
    contract = patch.contract.model_copy(update={"patch_points": specs})
    manifest = patch.manifest.model_copy(update={"contract": contract})
    other = Patch(patch.folder, manifest, patch.digest)
    profile = read(patched_profile(tmp_path / "patched.sqlite", f"{TRITON}_0"), "gpt-oss-20b")
    proof = prove([claims(patch, 5000, layers_taken=taken)], profile, other)
    assert proof.expected_per_step == expected
    assert proof.passed == (expected == 48)
