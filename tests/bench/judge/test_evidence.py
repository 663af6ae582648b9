"""NVIDIA's tools around one run of a candidate: what they print, read, and the run itself.

No GPU here: the tools are doubles, scripts that print what the real ones printed and run the
program below them, on the CPU. What they print is quoted: from the Compute Sanitizer User Manual,
from NVIDIA/nsight-training (an older form), and from ncu 2025.3.1 on an H200.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import patcher.bench.machine.installed
from patcher import bench
from patcher.bench import Candidate, Language, MissingError, Outcome, UsageError
from patcher.bench.judge import JudgeSettings, evaluate, tools
from patcher.bench.judge.blob import Layout
from patcher.bench.judge.cases import Secrets
from patcher.bench.judge.counters import counters, metrics, read
from patcher.bench.judge.sanitizer import Sanitized, _control, _options, sanitize
from patcher.bench.judge.sanitizer_text import parse
from patcher.bench.judge.trial import Trial
from patcher.bench.selftest.cases import read_source
from patcher.bench.toolchains import Built, build, toolchain

OP = bench.load_op("fused_add_rms_norm")
SOLUTIONS = {info.name: candidate for info, candidate in OP.solutions()}
PAGE = (Path(__file__).parents[2] / "data/ncu/counters.csv").read_text(encoding="utf-8")
HEAD = "========= COMPUTE-SANITIZER\n"
CLEAN = HEAD + "========= ERROR SUMMARY: 0 errors\n"
NO_RACE = HEAD + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
MISALIGNED = (
    HEAD
    + """\
printed by the program
========= Invalid __global__ write of size 4 bytes
=========     at unaligned_kernel()+0x160 in /home/cuda/memcheck_demo.cu:6
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f6510c00001 is misaligned
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: main [0x8f27] in /home/cuda/memcheck_demo
=========
========= Target application returned an error
========= ERROR SUMMARY: 769 errors
========= ERROR SUMMARY: 669 errors were not printed. Use --print-limit option to adjust
"""
)
RACE = (
    HEAD
    + """\
========= Error: Race reported between Write access at sumKernel(int *, int *)+0x90 in block.cu:41
=========     and Read access at sumKernel(int *, int *)+0x100 in block_error.cu:51 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
)
UNWRITTEN = (
    HEAD
    + """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at vectorAdd(int *)+0x70 in /home/cuda/memset_error.cu:41
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= ERROR SUMMARY: 48 errors
"""
)
UNSUPPORTED = (
    HEAD
    + """\
========= Error: Device not supported. Please refer to the "Supported Devices" section
=========
========= ERROR SUMMARY: 2 errors
"""
)


@pytest.mark.parametrize(
    ("tool", "text", "kind", "kernel", "where"),
    [
        (
            *("memcheck", MISALIGNED, "Invalid __global__ write of size 4 bytes"),
            *("unaligned_kernel()", "memcheck_demo.cu:6"),
        ),
        (
            *("racecheck", RACE, "Race between write and read"),
            *("sumKernel(int *, int *)", "block.cu:41"),
        ),
        (
            *("initcheck", UNWRITTEN, "Uninitialized __global__ memory read of size 4 bytes"),
            *("vectorAdd(int *)", "memset_error.cu:41"),
        ),
        (
            "racecheck",
            "========= ERROR: Race reported between Read access at 0x6360 in "
            "/home/nvidia/convolution.cu:123:convolution(pixel const*, int)\n"
            "=========     and Write access at 0x1fe0 in /home/nvidia/convolution.cu:63:"
            "convolution(pixel const*, int) [1088 hazards]\n",
            *("Race between read and write", "convolution(pixel const*, int)"),
            "convolution.cu:123",
        ),
        (
            "memcheck",
            "========= Invalid __global__ write of size 1 bytes\n"
            "=========     at 0x60 in Iota(unsigned char*)\n"
            "=========     by thread (63,0,0) in block (0,0,0)\n",
            *("Invalid __global__ write of size 1 bytes", "Iota(unsigned char*)", ""),
        ),
        (
            "racecheck",
            "========= ERROR: Potential WAW hazard detected at __shared__ 0x0 in block (0,0,0) :\n"
            "=========     Write Thread (0,0,0) at WAW()+0x2f0 in raceWAW.cu:20\n"
            "=========     Write Thread (1,0,0) at WAW()+0x2f0 in raceWAW.cu:20\n",
            *("Potential WAW hazard detected", "WAW()", "raceWAW.cu:20"),
        ),
    ],
)
def test_each_form_of_a_report_is_read(
    tool: str, text: str, kind: str, kernel: str, where: str
) -> None:
    [finding] = parse(text, tool).findings
    assert (finding.kind, finding.kernel, finding.where) == (kind, kernel, where)
    assert finding.counts
    assert "/home" not in finding.text + finding.summary()


def test_what_is_said_of_the_session_is_no_finding() -> None:
    assert parse(MISALIGNED, "memcheck").errors == 769
    assert parse(NO_RACE, "racecheck").errors == 0
    assert parse(UNSUPPORTED, "memcheck").findings == ()
    for text in ("", "garbage", "=========\n", HEAD, "========= Error: process didn't terminate\n"):
        report = parse(text, "memcheck")
        assert (report.findings, report.errors) == ((), None)


def test_warnings_and_the_races_of_libraries_are_not_held_against_it() -> None:
    [warning] = parse(RACE.replace("Error: Race", "Warning: Race"), "racecheck").findings
    assert not warning.counts
    for library, counts in (("void at::native::reduce_kernel<512>", False), ("reduce", True)):
        text = RACE.replace("sumKernel", library).replace(" in block.cu:41", "")
        [finding] = parse(text, "racecheck").findings
        assert finding.counts is counts
        [wild] = parse(MISALIGNED.replace("unaligned_kernel", library), "memcheck").findings
        assert wild.counts
    [dressed] = parse(RACE.replace("sumKernel", "nvjet_mine"), "racecheck").findings
    assert dressed.counts, "a library's kernel has no lines"


Double = Callable[..., Path]


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Double:
    """A double for one of NVIDIA's tools: prints a recording to its log, runs the program."""
    monkeypatch.setattr(patcher.bench.machine.installed.shutil, "which", lambda _: None)
    for name in ("NCU_PLACES", "SANITIZER_PLACES"):
        monkeypatch.setattr(patcher.bench.machine.installed, name, ())
    monkeypatch.delenv("CUDA_HOME", raising=False)

    def double(name: str, body: str, **recorded: str) -> Path:
        folder = tmp_path / "its tools"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        for key, text in recorded.items():
            (folder / key).write_text(text, encoding="utf-8")
        tool = folder / name
        tool.write_text(
            "#!/bin/sh\n"
            f"here={shlex.quote(str(folder))}\n"
            '[ "$1" = --version ] && echo "Version 2025.3.1.0" && exit\n'
            'asked="$*"\n'
            'while [ "$1" != --log-file ]; do [ "$1" = --tool ] && which=$2; shift; done\n'
            "log=$2; shift 2\n"
            f"{body}\n",
            encoding="utf-8",
        )
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)  # another user runs it
        monkeypatch.setenv(f"PATCHER_{name.upper().replace('-', '_')}", str(tool))
        return tool

    return double


PRINTS = 'cp "$here/$which" "$log" && "$@" || exit 1; grep -q " 0 [eh]" "$log" || exit 99'


def candidate_of(source: str) -> Candidate:
    return Candidate(op=OP.name, language=Language.TORCH, source=source)


def built(source: str) -> Built:
    return build(candidate_of(source), OP.contract)


def sanitized(source: str, limit_s: float = 60) -> Sanitized:
    sweep = OP.sweep("cpu").model_copy(update={"values": (1, 4)})
    candidate = candidate_of(source)
    return sanitize(OP, candidate, built(source), sweep, "cpu", Secrets(1), limit_s=limit_s)


FINE = """
import torch

def fused_add_rms_norm(input, residual, weight, epsilon):
    print("called with", tuple(input.shape), input.dtype, bool(input.isfinite().all()))
    residual.add_(input)
"""


def test_without_the_tool_the_gate_says_so(double: Double) -> None:
    said = sanitized(FINE)
    assert said.outcome is None
    assert said.detail == "not here: compute-sanitizer is not installed"
    double("compute-sanitizer", "").write_text("#!/bin/sh\nexit 2\n")
    said = sanitized(FINE)
    assert said.outcome is None
    assert said.detail == "not here: compute-sanitizer does not run: it ends with status 2"


def test_all_three_tools_are_run(double: Double) -> None:
    clean = {"memcheck": CLEAN, "racecheck": NO_RACE, "initcheck": CLEAN}
    double("compute-sanitizer", PRINTS, **clean)
    said = sanitized(FINE)
    assert said.outcome is None
    assert said.detail == (
        "memcheck, racecheck, initcheck found nothing in 5 calls; compute-sanitizer 2025.3.1.0"
    )


@pytest.mark.parametrize(
    ("tool", "text"), [("memcheck", MISALIGNED), ("racecheck", RACE), ("initcheck", UNWRITTEN)]
)
def test_a_finding_is_a_guard_violation(double: Double, tool: str, text: str) -> None:
    recorded = {"memcheck": CLEAN, "racecheck": NO_RACE, "initcheck": CLEAN, tool: text}
    double("compute-sanitizer", PRINTS, **recorded)
    said = sanitized(FINE)
    assert said.outcome is Outcome.GUARD_VIOLATION
    assert said.detail.startswith(f"{tool}: ")
    assert ".cu:" in said.detail
    assert "/home" not in said.detail + said.log


HANDS_OVER = FINE + "# by an mbarrier\n"
CONTROLLED = (
    'for job; do :; done; grep -q \'"slots": \\[\\]\' "$job" && which=control; '
    'cp "$here/$which" "$log"; "$@" || exit 1; grep -q " 0 [eh]" "$log" || exit 99'
)


def control_of(body: str) -> tools.ToolJob:
    """A call of something that runs here; the double says what the tool says of it."""
    nothing = Layout(slots=(), set_bytes=0, sent_bytes=0, returned_bytes=0)
    call = tools.Call(nothing, (), torch.empty(0, dtype=torch.uint8), ())
    return tools.ToolJob("cpu", built(f"def {OP.name}():\n    {body}\n"), OP.name, (call,))


@pytest.mark.slow
def test_races_are_set_aside_where_a_right_hand_over_is_reported_too(
    double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = control_of("pass")
    monkeypatch.setattr(patcher.bench.judge.sanitizer, "_control", lambda op, device: job)
    recorded = {"memcheck": CLEAN, "racecheck": RACE, "initcheck": CLEAN}
    double("compute-sanitizer", CONTROLLED, control=RACE, **recorded)
    said = sanitized(HANDS_OVER)
    assert said.outcome is None
    assert said.set_aside
    assert said.detail == (
        "memcheck, initcheck found nothing in 5 calls; 1 reports of racecheck set aside, since it "
        "also reports a correct hand-over by mbarriers; compute-sanitizer 2025.3.1.0"
    )
    assert "block.cu:41" in said.log
    plain = sanitized(FINE)
    assert plain.outcome is Outcome.GUARD_VIOLATION, "it has no mbarriers"
    # a tool that follows the hand-over is believed
    double("compute-sanitizer", CONTROLLED, control=NO_RACE, **recorded)
    said = sanitized(HANDS_OVER)
    assert said.outcome is Outcome.GUARD_VIOLATION
    assert not said.set_aside
    # other tools' findings are never set aside
    double("compute-sanitizer", CONTROLLED, control=RACE, **{**recorded, "initcheck": UNWRITTEN})
    said = sanitized(HANDS_OVER)
    assert said.outcome is Outcome.GUARD_VIOLATION
    assert said.detail.startswith("initcheck: ")


@pytest.mark.parametrize("broken", ["control that says nothing", "control that breaks", "none"])
def test_without_a_control_that_ran_a_race_counts(
    broken: str, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "raise RuntimeError" if broken == "control that breaks" else "pass"
    job = None if broken == "none" else control_of(body)
    monkeypatch.setattr(patcher.bench.judge.sanitizer, "_control", lambda op, device: job)
    said_of_it = HEAD if broken == "control that says nothing" else RACE
    recorded = {"memcheck": CLEAN, "racecheck": RACE, "initcheck": CLEAN}
    double("compute-sanitizer", CONTROLLED, control=said_of_it, **recorded)
    assert sanitized(HANDS_OVER).outcome is Outcome.GUARD_VIOLATION


def test_what_is_asked_of_racecheck_follows_its_version() -> None:
    proxies = "--racecheck-fence-proxy-async"
    assert proxies not in _options("racecheck", "2026.3.0.0")
    assert proxies in _options("racecheck", "2026.4.0.0")
    assert proxies not in _options("memcheck", "2026.4.0.0")


@pytest.mark.skipif(toolchain(Language.CUDA).missing() is not None, reason="needs nvcc")
def test_the_control_builds() -> None:
    job = _control(OP, "cuda")
    assert job is not None
    assert job.built is not None
    assert job.built.path is not None
    assert job.built.path.is_file()


RIGHT = """
import torch

def fused_add_rms_norm(input, residual, weight, epsilon):
    total = input.float() + residual.float()
    residual.copy_(total)
    gain = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon) * weight.float()
    input.copy_(total * gain{noise})
"""


@pytest.mark.parametrize("noise", ["", " * (1 + 2e-7 * torch.rand(()))"])
def test_who_escapes_racecheck_is_looked_at_longer(
    noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = Sanitized(outcome=None, detail="set aside", set_aside=True)
    monkeypatch.setattr(Trial, "sanitized", lambda self, *_: self.believed(aside))
    monkeypatch.setattr(Trial, "repeats", lambda *_: None)
    monkeypatch.setattr("patcher.bench.judge.judge.load_again", lambda *_: None)
    settings = JudgeSettings(device="cpu", points=1, sanitize=True, calls=10, lives_s=0)
    verdict = evaluate(candidate_of(RIGHT.replace("{noise}", noise)), settings)
    [check] = [one for one in verdict.checks if one.name == "sanitizer"]
    if noise:
        assert verdict.outcome is Outcome.GUARD_VIOLATION
        assert check.detail.startswith("races were reported, and equal inputs gave other bits")
    else:
        assert verdict.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)
        assert check.detail == "set aside; instead, equal bits in 30 calls at each of two sizes"


def test_a_tool_that_does_not_work_here_accuses_nobody(double: Double) -> None:
    double("compute-sanitizer", PRINTS, memcheck=UNSUPPORTED)
    said = sanitized(FINE)
    assert said.outcome is None
    assert said.detail.startswith("not here: compute-sanitizer's memcheck does not work")
    assert "Device not supported" in said.detail


@pytest.mark.parametrize(
    ("body", "limit_s", "told"),
    [
        ("raise ValueError('no such shape')", 60, "ValueError: no such shape"),
        ("import os; os._exit(3)", 60, "it ended without a word"),
        ("import time; time.sleep(100)", 8, "not done after 8 s"),
    ],
)
def test_a_candidate_that_breaks_below_the_tool(
    double: Double, body: str, limit_s: float, told: str
) -> None:
    double("compute-sanitizer", PRINTS, memcheck=CLEAN)
    said = sanitized(f"def fused_add_rms_norm(*arguments):\n    {body}\n", limit_s)
    assert said.outcome is Outcome.RUNTIME_ERROR
    assert said.detail == f"memcheck: the candidate fails below it: {told}"


def test_the_run_gives_what_was_sent_and_is_confined(double: Double, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    source = FINE + f"    import os\n    print(os.path.exists({str(secret)!r}))\n"
    tool = double("compute-sanitizer", 'cp "$here/memcheck" "$log"; exec "$@"', memcheck=CLEAN)
    call = tools.Call.of(OP, OP.sweep("cpu").points()[0], seed=1)
    job = tools.ToolJob("cpu", built(source), OP.name, (call,), warm=1, repeat=2)
    ran = tools.run(tool, (), job)
    assert (ran.ok, ran.code) == (True, 0)
    lines = ran.printed.splitlines()
    assert lines == ["called with (1, 256) torch.float32 True", "False"] * 3


def test_what_only_gets_written_is_not_filled() -> None:
    call = tools.Call.of(OP, OP.sweep("cpu").points()[0], seed=1)
    assert call.blank == tuple(t.name for t in OP.contract.tensors if t.access == "write")


def test_no_link_and_no_pipe_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    assert [tools._text(tmp_path / name) for name in ("real", "link", "pipe", "none")] == [
        *("secret", "", "", ""),
    ]


def test_the_home_is_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for place, shown in (
        ("opt/cuda/bin/tool", "opt/cuda"),
        ("me/cuda/bin/tool", "me/cuda"),
        ("me/bin/tool", "me/bin"),
        ("me/tool", "me/tool"),
    ):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert tools.installed_with(path) == [tmp_path / shown]


@pytest.mark.parametrize(
    ("kernel", "library"),
    [
        ("void at::<unnamed>::vectorized_layer_norm_kernel<c10::BFloat16>", "PyTorch"),
        ("void at::native::(anonymous namespace)::reduce_kernel<512>", "PyTorch"),
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT", "cuBLAS"),
        ("void cublasLt::splitKreduce_kernel<32>", "cuBLAS"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "cuBLAS or cuDNN"),
        ("void <unnamed>::norm<c10::BFloat16>(at::BFloat16 *)", None),
        ("void cutlass::device_kernel<MyGemm>(Params)", None),
        ("triton_poi_fused_add_0", None),
        ("_fused_add_rms_norm_kernel", None),
    ],
)
def test_whose_kernel_it_is(kernel: str, library: str | None) -> None:
    assert tools.library_of(kernel) == library


def test_a_page_of_ncu_is_read() -> None:
    keys = {name: metric.key for metric in metrics() for name in metric.names}
    kernels = read(PAGE, keys)
    assert sum(kernel.launches for kernel in kernels) == 9
    assert {kernel.library for kernel in kernels} == {"PyTorch", "cuBLAS"}
    [gemm] = [kernel for kernel in kernels if kernel.library == "cuBLAS"]
    assert (gemm.launches, gemm.grid, gemm.block) == (2, "(2, 66, 1)", "(384, 1, 1)")
    tensor = gemm.values["tensor_pipe_pct"]
    assert (tensor.value, tensor.unit) == (pytest.approx(92.3, abs=0.5), "%")
    assert gemm.values["registers_per_thread"].value == 168
    read_us = gemm.values["dram_read_bytes"].value / 4.8e6  # 4.8 TB/s
    assert gemm.duration_us is not None
    assert gemm.duration_us > read_us
    assert read(PAGE[: len(PAGE) // 2], keys)
    assert read("==PROF== Connected to process 1\n", keys) == []


NCU = 'cat "$here/page" > "$log"; exec "$@"'


def counted(source: str = FINE, **more: bool) -> list[bench.KernelCounters]:
    candidate = Candidate(op=OP.name, language=Language.TORCH, source=source)
    point = OP.sweep("cpu").points()[0]
    return counters(candidate, built(source), point, device="cpu", limit_s=60, **more)


def test_counters_are_of_the_candidates_own_kernels(double: Double) -> None:
    page = "==PROF== Connected to process 1\n" + PAGE.replace("nvjet_sm90", "_my_kernel")
    double("ncu", NCU, page=page)
    [own] = counted()
    assert own.kernel.startswith("_my_kernel")
    assert own.library is None
    assert own.values["occupancy_pct"].unit == "%"
    labels = [kernel.library for kernel in counted(libraries=True)]
    assert None in labels
    assert "PyTorch" in labels


def test_a_metric_that_this_ncu_does_not_know_is_asked_by_its_next_name(double: Double) -> None:
    body = (
        'case "$asked" in *sm__inst_executed.sum*) '
        "echo '==ERROR== Failed to find metric regex:^sm__inst_executed\\.sum$' > \"$log\"; exit 1"
        f";; esac; {NCU}"
    )
    double("ncu", body, page=PAGE.replace("nvjet_sm90", "_my_kernel"))
    [own] = counted()
    assert own.values["instructions"].metric == "smsp__inst_executed.sum"


@pytest.mark.parametrize(
    ("said", "message", "hint"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
            "Performance Counters on the target device 0.",
            *("only administrators", "NVreg_RestrictProfilingToAdminUsers=0"),
        ),
        (
            "==ERROR== Cuda driver is not compatible with Nsight Compute.",
            *("Cuda driver is not compatible", "doctor"),
        ),
    ],
)
def test_why_there_are_no_counters(double: Double, said: str, message: str, hint: str) -> None:
    double("ncu", 'cat "$here/page" > "$log"; "$@"; exit 1', page=said + "\n")
    with pytest.raises(MissingError, match=message) as error:
        counted()
    assert hint in error.value.hint


def test_without_ncu_or_kernels_or_a_sound_candidate(double: Double) -> None:
    with pytest.raises(MissingError, match="not here"):
        counted()
    double("ncu", NCU, page="==PROF== Connected\n==WARNING== No kernels were profiled.\n")
    assert counted() == []
    with pytest.raises(UsageError, match="KeyError"):
        counted("def fused_add_rms_norm(*arguments):\n    raise KeyError('axis')\n")


def test_the_24_metrics_are_there_once() -> None:
    assert len({metric.key for metric in metrics()}) == 24
    names = [name for metric in metrics() for name in metric.names]
    assert len(set(names)) == len(names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the gate's word on a machine without one")
def test_the_gate_is_for_cuda() -> None:
    settings = JudgeSettings(sanitize=True, baseline="eager", points=1, pairs=3, threads=1)
    evaluation = evaluate(SOLUTIONS["cpu_simd"], settings)
    [check] = [check for check in evaluation.checks if check.name == "sanitizer"]
    assert check.passed
    assert "not for the CPU" in check.detail


@pytest.mark.skipif(
    not torch.cuda.is_available()
    or patcher.bench.machine.installed.find_compute_sanitizer() is None,
    reason="needs a CUDA device and compute-sanitizer",
)
@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("faults/gpu_missing_barrier", Outcome.GUARD_VIOLATION),
        ("cheats/64_writes_past_the_end", Outcome.GUARD_VIOLATION),
        (None, None),
    ],
)
def test_on_a_gpu_the_gate_finds_what_is_planted(name: str | None, outcome: Outcome | None) -> None:
    candidate = SOLUTIONS["cuda_row"]
    if name is not None:
        source = Path(__file__).parents[2] / f"corpus/{name}.cu"
        candidate = Candidate(op=OP.name, language=Language.CUDA, source=read_source(source))
    made = build(candidate, OP.contract)
    said = sanitize(OP, made, OP.sweep("cuda"), "cuda", Secrets(1))
    assert said.outcome == outcome, said.detail
