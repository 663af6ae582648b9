"""TensorRT-LLM's patch point and its workers, against a double of what they rest on.

What the double stands for, and what it was read from: doubles/trtllm/README.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from patch_sample import add_norm_guards, kernel
from trtllm_sample import CALLS, Setup, installed, make_patch

from patcher import bench
from patcher.integrate import CallCounters, Receipt, Store, read_receipts
from patcher.integrate.activation import Switches, activate
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.points import find_point
from patcher.integrate.tensorrt_llm import (
    ENGINE,
    FusedAddRmsNorm,
    check_workers,
    join,
    unseen_by_workers,
    write_module,
)

MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
HAS_MPI = importlib.util.find_spec("mpi4py") is not None and MPIEXEC is not None


@pytest.fixture
def double() -> Iterator[None]:
    with installed():
        yield


def parts() -> tuple[Any, Any]:
    """(the operator's definition, the class of norms)."""
    ops = importlib.import_module("tensorrt_llm._torch.custom_ops")
    norms = importlib.import_module("tensorrt_llm._torch.modules.rms_norm")
    return ops.flashinfer_fused_add_rmsnorm, norms.RMSNorm


def dispatcher(axes: dict[str, AxisBounds] | None = None) -> Dispatcher:
    return Dispatcher(
        "fused_add_rms_norm", kernel, add_norm_guards(axes), CallCounters("p", "0" * 64)
    )


def normed(norm: Any, rows: int = 3, hidden: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, rows, hidden, generator=generator)
    with torch.inference_mode():
        return [tensor.clone() for tensor in norm(x, residual)]


@pytest.mark.usefixtures("double")
def test_the_kernel_is_in_for_every_caller_and_out_again_without_a_trace() -> None:
    op, kind = parts()
    norm = kind(hidden_size=64, eps=1e-5)
    before = normed(norm)
    point, patched = FusedAddRmsNorm(), dispatcher()
    assert "flashinfer_custom_ops.py" in point.find()
    for turn in (1, 2):
        point.install(patched)
        inside = normed(norm)
        compiled = normed(torch.compile(norm, backend="aot_eager", fullgraph=True))
        x, residual = torch.randn(2, 1, 64)
        with torch.inference_mode():
            torch.ops.trtllm.flashinfer_fused_add_rmsnorm(x, residual, norm.weight, 1e-5)
        assert sum(patched.book.calls.values()) == 3 * turn
        torch.testing.assert_close(inside, before)
        assert all(map(torch.equal, inside, compiled))
        point.remove()
        point.remove()
        assert all(map(torch.equal, normed(norm), before))
        assert sum(patched.book.calls.values()) == 3 * turn
    assert "already" not in point.find(), "what was taken out is nobody's patch"
    assert parts() == (op, kind)


@pytest.mark.usefixtures("double")
def test_what_the_guards_refuse_runs_the_operators_own_body() -> None:
    _, kind = parts()
    norm = kind(hidden_size=64, eps=1e-5)
    before = normed(norm)
    patched = dispatcher({"hidden": AxisBounds(maximum=32)})
    point = FusedAddRmsNorm()
    point.install(patched)
    assert all(map(torch.equal, normed(norm), before))
    point.remove()
    assert dict(patched.book.fallbacks) == {"hidden above 32": 1}


@pytest.mark.usefixtures("double")
def test_someone_elses_patch_is_told_of_and_left_in() -> None:
    op, kind = parts()
    point = FusedAddRmsNorm()
    point.install(dispatcher())
    with pytest.raises(bench.UsageError, match="already installed"):
        point.install(dispatcher())
    with pytest.raises(bench.VerificationError, match="already has a kernel for cpu"):
        FusedAddRmsNorm().install(dispatcher())
    calls = []
    op.register_kernel("cpu")(lambda *args: calls.append(args))
    with pytest.raises(bench.VerificationError, match="registered over this patch"):
        point.remove()
    normed(kind(hidden_size=64, eps=1e-5))
    assert len(calls) == 1


@pytest.mark.usefixtures("double")
def test_an_engine_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = importlib.import_module("tensorrt_llm._torch.custom_ops")
    op, kind = parts()
    with monkeypatch.context() as change:
        change.setattr(kind, "forward", lambda self, x, residual=None: x)
        with pytest.raises(bench.VerificationError, match="RMSNorm was replaced"):
            FusedAddRmsNorm().find()
    with monkeypatch.context() as change:
        change.setattr(ops, op._name, op._init_fn)
        with pytest.raises(bench.VerificationError, match="not a torch custom operator"):
            FusedAddRmsNorm().find()
    with monkeypatch.context() as change:
        change.delattr(ops, op._name)
        with pytest.raises(bench.VerificationError, match="only if flashinfer can be imported"):
            FusedAddRmsNorm().find()

    @torch.library.custom_op("trtllm::flashinfer_fused_add_rmsnorm", mutates_args=("input",))
    def other(input: torch.Tensor, weight: torch.Tensor) -> None:
        raise NotImplementedError

    monkeypatch.setattr(ops, op._name, other)
    with pytest.raises(
        bench.VerificationError, match=r"has the schema \(Tensor\(a0!\) input, Tensor wei"
    ):
        FusedAddRmsNorm().find()


def test_without_tensorrt_llm_something_is_missing() -> None:
    with pytest.raises(bench.MissingError, match="TensorRT-LLM cannot be imported") as error:
        find_point(ENGINE, FusedAddRmsNorm.name).fingerprint()
    assert error.value.exit_code == 3


@pytest.mark.usefixtures("double")
def test_another_version_or_text_is_refused_and_the_engine_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "home")
    patch = make_patch(tmp_path / "patch")
    store.apply(patch.folder)
    other = tmp_path / "newer/tensorrt_llm-2.1.0.dist-info/METADATA"
    other.parent.mkdir(parents=True)
    other.write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 2.1.0\n")
    with monkeypatch.context() as change:
        change.syspath_prepend(tmp_path / "newer")
        with pytest.raises(bench.VerificationError, match=r"2\.1\.0 is installed") as error:
            patch.verify_target()
        assert error.value.exit_code == 5
    op, kind = parts()
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x, residual=...: forward(self, x, residual))
    switches = Switches("on", strict=False, receipts=tmp_path / "receipts")
    with caplog.at_level(logging.ERROR), activate(ENGINE, switches=switches, store=store) as active:
        assert list(active.failures) == [patch.manifest.id]
    assert "differs from that of 1.3.0" in caplog.text
    [receipt] = read_receipts(tmp_path / "receipts")
    assert receipt.failure is not None
    assert list(op._backend_fns) == [None], "the engine is as it was"
    with pytest.raises(bench.VerificationError, match=r"rank 0 of 1 ran unpatched: .* differs"):
        check_workers(tmp_path / "receipts", [patch.digest], 1)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ([(0, 4, {})], "rank 1 of 2 wrote no receipt: it ran unpatched"),
        ([(None, 0, {}), (1, 4, {})], "rank 0 of 2 never called p"),
        ([(0, 4, {}), (1, 0, {"dtype x": 8})], "rank 1 of 2 never called p: dtype x"),
        ([(0, 4, {}), (1, 4, {})] * 2, "holds 4 receipts of a patch, one run writes 3"),
    ],
)
def test_a_rank_that_ran_unpatched_is_found(
    written: list[tuple[int | None, int, dict[str, int]]], message: str, tmp_path: Path
) -> None:
    for pid, (rank, calls, fallbacks) in enumerate(written):
        Receipt(
            patch_id="p",
            digest="d",
            pid=pid,
            rank=rank,
            calls={"k": calls} if calls else {},
            fallbacks=fallbacks,
        ).write(tmp_path / f"p.{pid}.json")
    with pytest.raises(bench.VerificationError, match=message) as error:
        check_workers(tmp_path, ["d"], 2)
    assert error.value.exit_code == 5


@pytest.mark.usefixtures("double")
def test_switches_that_workers_do_not_see_are_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in os.environ if "PATCHER_" in name]:
        monkeypatch.delenv(name)
    assert unseen_by_workers() is None
    monkeypatch.setenv("PATCHER_PATCHES", "on")
    monkeypatch.setenv("PATCHER_HOME", str(tmp_path))
    with caplog.at_level(logging.ERROR), join() as active:
        assert not active.installed
    assert "TLLM_PATCHER_PATCHES is not" in caplog.text
    monkeypatch.setenv("PATCHER_STRICT", "false")
    join().close()
    monkeypatch.setenv("PATCHER_STRICT", "1")
    with pytest.raises(bench.UsageError, match="so they would run unpatched") as error:
        join()
    assert error.value.exit_code == 2
    assert error.value.hint == "export TLLM_PATCHER_PATCHES=on"


def test_the_generated_package_is_refused_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(bench.UsageError, match="cannot write"):
        write_module(tmp_path / "file")


@pytest.mark.slow
def test_a_patch_reaches_every_worker_and_leaves_no_trace(tmp_path: Path) -> None:
    """Newer versions: names of modules. Workers are Python processes that stand in for MPI's."""
    setup = Setup(tmp_path)
    way = {"TRTLLM_DOUBLE_WAY": "modules", "TRTLLM_DOUBLE_POOL": "subprocess"}
    patched = setup.run("patched", ranks=2, **way)
    assert check_workers(setup.receipts, [setup.digest], 2) == {0: CALLS, 1: CALLS}
    receipts = read_receipts(setup.receipts)
    assert len(receipts) == 3, "two workers, and the process that started them"
    assert not any(receipt.fallbacks for receipt in receipts)
    # without the option the same environment patches nothing, and that is found
    setup.receipts = tmp_path / "none"
    setup.receipts.mkdir()
    assert setup.run("reverted", module=False, **way) == patched[:1]
    with pytest.raises(bench.VerificationError, match="rank 0 of 1 wrote no receipt"):
        check_workers(setup.receipts, [setup.digest], 1)


def test_older_versions_send_classes(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.run("run", TRTLLM_DOUBLE_WAY="classes", TRTLLM_DOUBLE_POOL="subprocess")
    assert check_workers(setup.receipts, [setup.digest], 1) == {0: CALLS}


@pytest.mark.skipif(not HAS_MPI, reason="mpi4py or mpiexec is not installed")
def test_a_patch_reaches_the_workers_that_mpi_spawns(tmp_path: Path) -> None:
    setup = Setup(tmp_path, MPIEXEC, "-n", "1", sys.executable)
    setup.run("run", ranks=2, TRTLLM_DOUBLE_WAY="classes", TRTLLM_DOUBLE_POOL="mpi4py")
    assert check_workers(setup.receipts, [setup.digest], 2) == {0: CALLS, 1: CALLS}
    assert len(read_receipts(setup.receipts)) == 3
