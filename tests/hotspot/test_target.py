"""The profiled program marks what it does: NVTX ranges without CUDA, seen by whoever listens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nvtx
import pytest
import torch
import transformers
from patch_sample import TINY

from patcher.bench import load_op
from patcher.hotspot import target
from patcher.hotspot.capture import ERROR
from patcher.hotspot.names import is_whole, normalise, sizes_in


class Listener:
    """In place of a profiler: the ranges as they are opened and closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: list[str] = []
        self.paths: list[tuple[str, ...]] = []
        monkeypatch.setattr(nvtx, "push_range", self.push)
        monkeypatch.setattr(nvtx, "pop_range", self.pop)

    def push(self, name: str) -> None:
        self.open.append(name)
        self.paths.append(tuple(self.open))

    def pop(self) -> None:
        self.open.pop()


def run(monkeypatch: pytest.MonkeyPatch, out: Path, steps: int) -> int:
    arguments = ["target", f"[{TINY.model_dump_json()}]", str(steps), "torch", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    return target.main()


def test_a_cpu_profile_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heard = Listener(monkeypatch)
    assert run(monkeypatch, tmp_path / "rows.json", 3) == 0
    assert heard.open == []
    assert heard.paths[0] == ("decode",)
    assert [path for path in heard.paths if path[-1] == "step"] == 3 * [("decode", "step")]
    layer = ("decode", "step", "module::GptOssDecoderLayer")
    norms = [path for path in heard.paths if path[-1] == "module::GptOssRMSNorm"]
    layers = [path for path in heard.paths if path == layer]
    assert len(norms) == 2 * len(layers) + 3, "two in each layer, and the last one of each step"
    assert (*layer, "module::GptOssRMSNorm") in norms
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert rows["steps"] == 3
    [norm] = [row for row in rows["rows"] if "GptOssRMSNorm" in row["name"]]
    assert norm["instances"] == len(norms)


def test_a_norm_within_a_part_of_a_layer_is_a_row_of_its_own() -> None:
    names: list[str] = []
    config = transformers.Qwen3Config(
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=8,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with target.module_ranges(model, names.append, lambda: None):
        model(torch.zeros(1, 1, dtype=torch.int64))
    norms = [name for name in names if "RMSNorm" in name]
    plain, own = "module::Qwen3RMSNorm", ("q_norm(2, 8)", "k_norm(1, 8)")
    assert norms == [plain, *(f"{plain}.{name}" for name in own), plain, plain]
    assert all(is_whole(name) for name in norms)
    assert not is_whole("module::Qwen3Attention")
    assert [sizes_in(name) for name in norms] == [None, (2, 8), (1, 8), None, None]
    covers = load_op("fused_add_rms_norm").contract.matches
    assert [covers(normalise(name)) for name in norms] == [True, False, False, True, True]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_one_sentence(
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(target, "open_decoder", fail)
    assert run(monkeypatch, tmp_path / "rows.json", 1) == 2
    told = json.loads(capsys.readouterr().err.splitlines()[-1].removeprefix(ERROR))
    assert "needs more memory" in told["message"]
    assert "smaller batch" in told["hint"]


def test_another_error_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(target, "open_decoder", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run(monkeypatch, tmp_path / "rows.json", 1)


def test_ranges_need_no_profiler() -> None:
    with target.nvtx_range("decode"):
        pass


def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert run(monkeypatch, tmp_path / "rows.json", 1) == 3
    told = json.loads(capsys.readouterr().err.splitlines()[-1].removeprefix(ERROR))
    assert told["hint"] == "pip install 'patcher[profile]'"
