"""Weights from a GGUF file, by the loader of the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from patcher.bench import UsageError

HIDDEN, HEADS, WIDE = 32, 2, 64


def write_gguf(path: Path, left_out: str = "") -> None:
    """A Qwen2 of one layer, whose tokens are bytes, less one of its weights."""
    import gguf
    import numpy as np
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*bytes_to_unicode().values(), "in", *special]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(32768)
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 3) + [3] * 3)
    writer.add_token_merges(["i n"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_pad_token_id(len(tokens) - 3)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (WIDE, HIDDEN),
        "blk.0.ffn_up.weight": (WIDE, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, WIDE),
    }
    for each in "qkv":
        shapes[f"blk.0.attn_{each}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"blk.0.attn_{each}.bias"] = (HIDDEN,)
    shapes.pop(left_out, None)
    for name, shape in shapes.items():
        writer.add_tensor(name, draw.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gets_an_adapter_that_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    from patcher.training.weights import LoraOptions, load_model

    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    loaded = load_model(str(file), lora=LoraOptions(rank=2))
    assert loaded.chats
    asked = loaded.rendered("sum it in C")
    assert asked == "<|im_start|>user\nsum it in C<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.token_count("sum it in C") < len(asked)
    trained = [name for name, each in loaded.model.named_parameters() if each.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)
    given: Any = loaded.tokenizer(asked, return_tensors="pt", add_special_tokens=False)
    end = loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (given["input_ids"] == end).sum() == 1
    assert loaded.tokenizer.eos_token_id == end
    loaded.model.save_pretrained(str(tmp_path / "adapter"))
    again = load_model(str(file), tmp_path / "adapter")
    logits = [each.model(**given).logits for each in (loaded, again)]
    assert (logits[0] == logits[1]).all()


def test_a_model_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """transformers would draw them at random."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    from patcher.training.weights import load_model

    file = tmp_path / "tiny.gguf"
    write_gguf(file, left_out="blk.0.attn_output.weight")
    with pytest.raises(UsageError, match=r"lacks 1 of its weights, such as .*o_proj"):
        load_model(str(file))


def test_what_is_no_model_or_no_adapter_is_said(tmp_path: Path) -> None:
    from patcher.training.weights import adapter_folder, load_model

    with pytest.raises(UsageError, match="there is no file"):
        load_model("tiny.gguf")
    with pytest.raises(UsageError, match="cannot load the model"):
        load_model(str(tmp_path))
    with pytest.raises(UsageError, match="holds no adapter"):
        adapter_folder(tmp_path)
