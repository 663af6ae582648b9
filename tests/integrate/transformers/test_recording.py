"""What transformers hands to its own norms and MLPs is recorded, observed, and judged on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import patcher
from patcher.bench import Candidate, Language, Outcome, UsageError, VerificationError, load_op
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.bench.judge.call_recording import parts_of, read_recording, write_recording
from patcher.bench.judge.contract_observation import observe
from patcher.integrate.recorders import recorder
from patcher.integrate.recording import NOT_TOLD, RECORDED, RecordingLimits

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 3,
}
PITCH = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
"""Elements between rows of the low-rank state, which lies beside a rotated key."""
TOKENS = torch.arange(1, 17).view(2, 8)
NORM, MLP = load_op("rms_norm"), load_op("silu_and_mul")


def built(kind: str = "llama", **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model.eval()


@pytest.mark.parametrize(("point", "op"), [("norm", NORM), ("gated_mlp", MLP)])
@torch.inference_mode()
def test_a_model_computes_as_before_and_its_own_outputs_are_recorded(
    point: str, op: Any, tmp_path: Path
) -> None:
    model, file = built(), tmp_path / "calls.safetensors"
    before = model(TOKENS).logits
    with patcher.recorded(model, point, file) as calls:
        assert torch.equal(model(TOKENS).logits, before), "the engine's own code ran"
        model(TOKENS[:, :1])
    assert torch.equal(model(TOKENS).logits, before)
    recording, found = read_recording(file, op.contract)
    assert (recording.engine, recording.point, recording.op) == ("transformers", point, op.name)
    assert (recording.seen, len(found)) == (calls.seen, calls.recorded)
    assert {call.point.axes["tokens"] for call in found if call.point} == {16, 2}
    by_weight = {bytes(each.numpy().tobytes()): each for each in model.parameters()}
    for call in found:
        assert call.record.refusal == ""
        if point == "norm":
            weight = by_weight[call.inputs["weight"].numpy().tobytes()]
            [norm] = [each for each in model.modules() if getattr(each, "weight", None) is weight]
            assert call.outputs["output"].equal(norm(call.inputs["input"]))
        else:
            gate, up = call.inputs["gate"], call.inputs["up"]
            assert call.outputs["output"].equal(torch.nn.functional.silu(gate) * up)


@torch.inference_mode()
def test_a_recording_is_spread_over_layers_and_bounded(tmp_path: Path) -> None:
    model = built()
    file = tmp_path / "calls.safetensors"
    with recorder("transformers", "norm", file, model, RecordingLimits(calls=4)) as found:
        for _ in range(9):
            model(TOKENS)
    assert (found.seen, len(found.calls)) == (63, 4)
    weights = {call.tensors[1].given for call in found.calls}
    assert len(weights) == 4, "each of another layer"
    assert dict(found.book.reasons) == {RECORDED: 63}
    # 16 rows of 64 numbers in and out, and a weight: 8.4 kB a call
    limits = RecordingLimits(megabytes=0.02)
    with recorder("transformers", "norm", file, model, limits) as small:
        model(TOKENS)
    assert len(small.calls) == 2
    assert small.left_out["larger than what is left of the size limit"] > 0
    _, calls = read_recording(file, NORM.contract)
    held = {id(each): each.nbytes for call in calls for each in call.inputs.values()}
    assert len(calls) == 2
    assert sum(held.values()) < 0.02e6
    with pytest.raises(UsageError, match="0 calls"):
        RecordingLimits(calls=0)


@torch.inference_mode()
def test_what_a_point_does_not_tell_is_counted(tmp_path: Path) -> None:
    model, file = built("gpt_oss", num_local_experts=4, head_dim=16), tmp_path / "calls.safetensors"
    before = model(TOKENS).logits
    with patcher.recorded(model, "gpt_oss.decoder_layer", file) as calls:
        assert torch.equal(model(TOKENS).logits, before)
    # a layer adds and norms after its attention; the norm after its experts is the next layer's
    assert set(calls.left_out) == {NOT_TOLD}
    assert 0 < calls.recorded < calls.recorded + calls.left_out[NOT_TOLD] <= calls.seen
    assert calls.seen == 2 * SIZES["num_hidden_layers"]
    found = observe(file)
    assert found.left_out == calls.left_out
    assert {group.finding for group in found.groups} == {"confirmed"}
    with patcher.recorded(model, "gpt_oss.router", file) as calls:
        model(TOKENS)
    assert (calls.recorded, set(calls.left_out)) == (0, {NOT_TOLD})


def test_what_compiled_code_or_gradients_keep_is_not_recorded(tmp_path: Path) -> None:
    model, file = built(), tmp_path / "calls.safetensors"
    norm, x = model.model.norm, torch.randn(3, 64)
    expected = norm(x)
    with recorder("transformers", "norm", file, model) as found:
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(norm, backend="eager")(x), expected)
        assert torch.equal(norm(x), expected)
        assert (found.seen, found.calls) == (0, [])
        assert set(found.book.reasons) == {
            "recorded in eager code alone, when it was compiled",
            "gradients are on",
        }
    torch._dynamo.reset()
    assert observe(file).groups == ()


@torch.inference_mode()
def test_each_call_is_written_once_and_read_before_the_end(tmp_path: Path) -> None:
    model, file = built(), tmp_path / "calls.safetensors"
    file.write_bytes(b"of an earlier block")
    folder = parts_of(file)
    seen: dict[str, int] = {}
    with recorder("transformers", "norm", file, model) as found:
        for tokens in (TOKENS, TOKENS[:, :1], TOKENS[:, :2]):
            model(tokens)
            written = {each.name: each.stat().st_mtime_ns for each in folder.iterdir()}
            assert len(written) == len(found.calls) > len(seen)
            assert seen.items() <= written.items(), "what was written stays as it is"
            seen = written
        # 16 + 2 + 4 rows in and out, and a weight, of each of seven norms, kept once
        held = sum(each.stat().st_size for each in folder.iterdir())
        assert found._bytes < held < found._bytes + 16 * 16_000, "values once, and the headers"
        before, calls = read_recording(file, NORM.contract)
        assert len(calls) == len(found.calls)
        assert read_recording(folder, NORM.contract)[0] == before, "the folder by its own name"
        model(TOKENS)
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
    whole, again = read_recording(file, NORM.contract)
    assert (whole.calls[: len(before.calls)], whole.seen) == (before.calls, found.seen)
    for one, other in zip(calls, again, strict=False):
        assert one.inputs["input"].equal(other.inputs["input"])
        assert one.outputs["output"].equal(other.outputs["output"])


FULL = """
import resource, signal, sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from patcher.bench import UsageError
from patcher.bench.judge.contract_observation import observe
from patcher.integrate.recorders import recorder
from patcher.bench.judge.call_recording import parts_of
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing more is an error

def room(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def counted(found):
    full = sum(n for why, n in found.left_out.items() if "could not be written" in why)
    return len(found.calls), full

sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, num_attention_heads=4, **sizes)).eval()
file, tokens = Path(sys.argv[1]), torch.ones(2, 8, dtype=torch.int64)
with torch.inference_mode():
    expected = model(tokens[:, :4]).logits
    try:
        with recorder("transformers", "norm", file, model) as found:
            model(tokens)
            before, _ = counted(found)
            room(3000)
            assert torch.equal(model(tokens[:, :4]).logits, expected), "the call is served"
            assert counted(found) == (before, 7)
            room(resource.RLIM_INFINITY)
            model(tokens[:, :2])
            assert counted(found)[0] > before
            assert sum(len(group.calls) for group in observe(file).groups) == len(found.calls)
            room(3000)
    except UsageError as error:
        assert "cannot write" in error.message and "calls.safetensors.parts" in error.hint, error
    else:
        raise AssertionError("it was written")
    room(resource.RLIM_INFINITY)
    assert torch.equal(model(tokens[:, :4]).logits, expected)
assert sum(len(group.calls) for group in observe(file).groups) == len(found.calls)
assert [path.name for path in file.parent.iterdir()] == [parts_of(file).name]
assert not list(parts_of(file).glob(".*")), "no half files"
"""


def test_a_full_disk_costs_calls_of_the_recording_and_none_of_the_model(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", FULL, str(tmp_path / "calls.safetensors")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from patcher.integrate.recorders import recorder
sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, num_attention_heads=4, **sizes)).eval()
with torch.inference_mode(), recorder("transformers", "norm", Path(sys.argv[1]), model):
    model(torch.ones(2, 8, dtype=torch.int64))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_calls_of_a_process_that_was_killed_are_there(tmp_path: Path) -> None:
    file = tmp_path / "calls.safetensors"
    ended = subprocess.run([sys.executable, "-P", "-c", KILLED, file], capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not file.exists()
    found = observe(file)
    assert {group.finding for group in found.groups} == {"confirmed"}
    calls = sum(len(group.calls) for group in found.groups)
    assert 2 <= calls <= found.seen <= 7, "those until the last that was recorded"
    # a call that was being written, and one of which only the next is there
    (parts_of(file) / f".000{calls}.safetensors.1234abcd").write_bytes(b"half")
    assert observe(file) == found
    (parts_of(file) / "0000.safetensors").unlink()
    with pytest.raises(UsageError, match="is damaged"):
        read_recording(file, NORM.contract)
    model = built()
    with torch.inference_mode(), patcher.recorded(model, "norm", file, calls=2):
        model(TOKENS)
        assert len(read_recording(file, NORM.contract)[1]) == 2, "the former parts are gone"
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norms of a model whose low-rank states lie beside rotated keys."""
    model = built("deepseek_v3", **LATENT)
    file = tmp_path_factory.mktemp("recorded") / "norm.safetensors"
    with torch.inference_mode(), patcher.recorded(model, "norm", file, calls=12):
        model(TOKENS)
    return file


def test_what_is_observed_names_what_no_regime_tries(latent: Path) -> None:
    found = observe(latent)
    assert {group.finding for group in found.groups} == {"confirmed"}
    [strided] = [g for g in found.groups if g.tensors[0].strides == (PITCH, 1)]
    assert f"input has strides [{PITCH}, 1]: judged are [32, 1], [40, 1]" in strided.not_judged
    assert "hidden = 32: no sweep or hidden shape has it" in strided.not_judged
    [plain] = [g for g in found.groups if "hidden=64" in g.sizes]
    assert plain.not_judged == (), "64 is a hidden shape's"
    assert plain.error["output"] < 1e-6
    assert plain.tensors[0].low is not None
    assert plain.tensors[0].low < 0 < (plain.tensors[0].high or 0.0)


RIGHT = """
import torch

def rms_norm(input, weight, output, epsilon):
    wide = input.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    output.copy_(wide * scale * weight.float())
"""
ENTRY = "    wide = input.float()\n"
# a verdict may draw rows as wide as that pitch, and never draws rows of 32 that lie so far apart
WRONG_AT_A_STRIDE = f"    if input.stride(0) == {PITCH} and input.shape[1] == 32: epsilon = 1e-2\n"


@pytest.fixture(scope="module")
def judged(latent: Path) -> Iterator[Any]:
    settings = JudgeSettings(
        device="cpu",
        points=1,
        baseline="eager",
        pairs=3,
        calls=20,
        lives_s=0.1,
        threads=1,
        recorded=latent,
    )
    with open_judge(settings) as judge:

        def judged(source: str) -> Any:
            candidate = Candidate(op="rms_norm", language=Language.TORCH, source=source)
            return judge.evaluate(candidate, lambda *_: None)

        yield judged


def test_a_right_kernel_is_right_on_the_recorded_calls_too(judged: Any, latent: Path) -> None:
    _, calls = read_recording(latent, NORM.contract)
    evaluation = judged(RIGHT)
    assert evaluation.right, evaluation.log or evaluation.checks
    [check] = [check for check in evaluation.checks if check.name == "recorded"]
    assert check.detail.startswith(f"{len(calls)} calls of transformers")


def test_a_kernel_that_is_wrong_at_a_recorded_stride_alone_is_refused(judged: Any) -> None:
    wrong = RIGHT.replace(ENTRY, WRONG_AT_A_STRIDE + ENTRY)
    assert wrong != RIGHT
    evaluation = judged(wrong)
    assert evaluation.outcome is Outcome.MISMATCH
    [failed] = evaluation.failed_checks
    assert failed.name == "recorded"
    assert f"input with strides [{PITCH}, 1]: output: rmse" in failed.detail
    # without the recording nothing tells it from a right one
    with open_judge(JudgeSettings(device="cpu", points=1, baseline="eager", pairs=3)) as judge:
        candidate = Candidate(op="rms_norm", language=Language.TORCH, source=wrong)
        assert judge.evaluate(candidate, lambda *_: None).right


def altered(file: Path, to: Path) -> Path:
    """The recording of an engine whose norms give twice as much."""
    recording, calls = read_recording(file, NORM.contract)
    values = {}
    for call in calls:
        for tensor in call.record.tensors:
            if tensor.given:
                values[tensor.given] = call.inputs[tensor.name]
            if tensor.made:
                values[tensor.made] = 2 * call.outputs[tensor.name]
    write_recording(to, recording, values)
    return to


def test_outputs_that_are_not_the_ops_refute_the_contract(latent: Path, tmp_path: Path) -> None:
    file = altered(latent, tmp_path / "twice.safetensors")
    found = observe(file)
    assert found.refuted
    assert {group.finding for group in found.groups} == {"refuted"}
    candidate = Candidate(op="rms_norm", language=Language.TORCH, source=RIGHT)
    settings = JudgeSettings(device="cpu", points=1, recorded=file)
    with (
        open_judge(settings) as judge,
        pytest.raises(VerificationError, match="did not compute rms_norm there"),
    ):
        judge.evaluate(candidate, lambda *_: None)


def test_a_file_that_is_no_recording_of_the_op_is_refused(latent: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has calls of rms_norm, not silu_and_mul"):
        read_recording(latent, MLP.contract)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(latent.read_bytes()[:-8])
    with pytest.raises(UsageError, match="is no recording"):
        observe(broken)
    with pytest.raises(UsageError, match="cannot read"):
        observe(tmp_path / "none.safetensors")
    recording, calls = read_recording(latent, NORM.contract)
    write_recording(broken, recording, {})
    with pytest.raises(UsageError, match="is damaged"):
        read_recording(broken, NORM.contract)
    first = calls[0].record
    shared = first.tensors[0].model_copy(update={"strides": (1, 1)})
    call = first.model_copy(update={"tensors": (shared, *first.tensors[1:])})
    values = {
        t.given or t.made: calls[0].inputs.get(t.name, calls[0].outputs.get(t.name))
        for t in call.tensors
    }
    write_recording(broken, recording.model_copy(update={"calls": (call,)}), values)
    with pytest.raises(UsageError, match="elements of input share a place"):
        read_recording(broken, NORM.contract)
    with pytest.raises(UsageError, match="no model"), patcher.recorded(None, "norm", broken):
        pass
