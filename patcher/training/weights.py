"""A language model to train: weights from a folder, the hub or a GGUF file, and a LoRA adapter."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from patcher.bench import MissingError, Record, UsageError

ADAPTER = "adapter"
"""Folder of the trained adapter, in the folder of a training."""
_GGUF = ".gguf"


class LoraOptions(Record):
    """The adapter that is trained; the model's own weights stay as they are."""

    rank: int = 8
    """Of a 1.5B model, 37 MB of float32 weights, and twice as many of the optimiser."""
    alpha: int = 16


class LoadedModel(NamedTuple):
    """A model with its tokenizer."""

    model: Any
    tokenizer: Any

    @property
    def chats(self) -> bool:
        """Whether prompts are messages."""
        return self.tokenizer.chat_template is not None

    def prompt(self, text: str) -> Any:
        """A prompt as TRL takes it."""
        return [{"role": "user", "content": text}] if self.chats else text

    def rendered(self, text: str) -> str:
        """A prompt as the model reads it."""
        if not self.chats:
            return text
        return str(
            self.tokenizer.apply_chat_template(
                self.prompt(text), add_generation_prompt=True, tokenize=False
            )
        )

    def token_count(self, text: str, rendered: bool = True) -> int:
        """Tokens of a prompt as the model reads it, or of a text."""
        text = self.rendered(text) if rendered else text
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def device_here() -> str:
    """Where models are trained: `cuda` where torch finds a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_one_gpu() -> None:
    """Check that a training has one GPU at most.

    Raises:
        UsageError: several are visible, among which TRL would split the batch.
    """
    if device_here() == "cuda" and torch.cuda.device_count() > 1:
        raise UsageError(
            "a training runs on one GPU, and several are visible",
            "show it one: CUDA_VISIBLE_DEVICES=0",
        )


def load_model(
    name: str, adapter: Path | None = None, lora: LoraOptions | None = None
) -> LoadedModel:
    """Load a causal language model; bfloat16 on a GPU, float32 on a CPU.

    Args:
        name: a folder, an id of the Hugging Face hub, or a GGUF file: a path, or
            `OWNER/NAME/FILE.gguf` on the hub.
        adapter: a LoRA adapter to go on with, or the folder of a training that holds one.
        lora: makes the adapter that is trained: a new one, or the given one; None: to sample only.

    Raises:
        UsageError: there is no such model or adapter, or the model's file lacks weights.
        MissingError: `gguf` is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    no_bar: Any = logging.disable_progress_bar
    no_bar()
    # what TRL calls of transformers that is going to be renamed
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    place, more = _place(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, padding_side="left", **more)
        dtype = torch.bfloat16 if device_here() == "cuda" else torch.float32
        both: Any = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, output_loading_info=True, **more, **_unpacked(more)
        )
    except ImportError as error:
        if more:
            raise MissingError("GGUF files need gguf", "pip install gguf") from error
        raise
    except Exception as error:
        raise _refused(
            f"the model {name}",
            error,
            "give a folder with config.json, weights and tokenizer, an id of the hub, or a .gguf",
        ) from error
    model, found = both
    if missing := sorted(found["missing_keys"]):
        raise UsageError(  # transformers draws them at random, and warns
            f"the model {name} lacks {len(missing)} of its weights, such as {missing[0]}",
            "give one that is whole",
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    # a GGUF file has no generation config, and without an end a reply is as long as it may be
    model.generation_config.eos_token_id = sorted({*ends, tokenizer.eos_token_id} - {None})
    on_device: Any = model
    model = _adapted(on_device.to(device_here()), adapter, lora)
    return LoadedModel(model, tokenizer)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What is drawn within, such as a new adapter, depends on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def probabilities_checked() -> Iterator[None]:
    """Within, a model whose probabilities are no numbers is a user's error, not torch's."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise UsageError(
            "the model's probabilities are no numbers: its weights or its adapter are spoilt",
            "train the adapter anew with a smaller --learning-rate",
        ) from error


def finite_weights(model: Any) -> bool:
    """Whether the weights of a model's adapter are numbers."""
    own = [each for name, each in model.named_parameters() if "lora_" in name]
    return all(torch.stack([each.detach().isfinite().all() for each in own]).tolist())


def adapter_folder(path: Path) -> Path:
    """The adapter in a folder, or in the folder of a training.

    Raises:
        UsageError: there is none.
    """
    for folder in (path, path / ADAPTER):
        if (folder / "adapter_config.json").is_file():
            return folder
    raise UsageError(
        f"{path} holds no adapter", "give a folder of `patcher train warm-up` or `reinforce`"
    )


def adapter_digest(path: Path) -> str:
    """What an adapter is, wherever it lies: sha256 of its configuration and weights.

    Raises:
        UsageError: as `adapter_folder`.
    """
    found = hashlib.sha256()
    for file in sorted(adapter_folder(path).glob("adapter_*")):
        found.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return found.hexdigest()


def _refused(what: str, error: Exception, hint: str) -> UsageError:
    """A damaged file ends in whatever its reader raises."""
    said = (str(error).strip().splitlines() or [""])[0]
    return UsageError(f"cannot load {what}: {type(error).__name__}: {said}", hint)


def _place(name: str) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` is told."""
    if not name.endswith(_GGUF):
        return name, {}
    path = Path(name)
    if path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    owner, _, file = name.rpartition("/")
    if owner.count("/") != 1 or path.is_absolute():
        raise UsageError(f"there is no file {name}", "give its path, or OWNER/NAME/FILE.gguf")
    return owner, {"gguf_file": file}


def _unpacked(more: dict[str, str]) -> dict[str, Any]:
    """Has the weights of a GGUF file unpacked: packed ones cannot be trained on. Versions of
    transformers that know no packed ones always unpack."""
    from transformers.utils import quantization_config

    kind: Any = getattr(quantization_config, "GgufConfig", None)
    return {"quantization_config": kind(dequantize=True)} if more and kind else {}


def _adapted(model: Any, adapter: Path | None, lora: LoraOptions | None) -> Any:
    if adapter is not None:
        from peft import PeftModel

        place = adapter_folder(adapter)
        try:
            return PeftModel.from_pretrained(model, str(place), is_trainable=lora is not None)
        except Exception as error:
            raise _refused(
                f"the adapter {place}", error, "give one that is whole, and the model that it is of"
            ) from error
    if lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)
