"""Patch a transformers model, see that the kernel runs, and take it out again."""

from pathlib import Path

import torch
import transformers

import patcher

OP = "fused_add_rms_norm"
SOURCE = Path(__file__).parents[1] / f"kernels/{OP}/solutions/cpu_simd/{OP}.cpp"

# a kernel that is right and faster becomes a patch
v = patcher.evaluate(OP, SOURCE, pairs=3)
print(v)
patch = patcher.bundle(v, SOURCE, "norm.zip")

# a small model with random weights; yours comes from `from_pretrained`
config = transformers.GptOssConfig(
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_local_experts=4,
    vocab_size=512,
)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
prompt = torch.arange(8).reshape(2, 4)


def generate() -> torch.Tensor:
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)


before = generate()
with patcher.patched(model, patch) as receipt:
    patched = generate()
print(receipt)
print(receipt.to_pandas().to_string(index=False))

assert receipt.total_calls > 0, "the patched kernel ran"
assert torch.equal(generate(), before), "and it is out again"
print("same tokens with the patch:", torch.equal(patched, before))
