"""Double: what runs in a worker. The model is built after the classes from outside are known."""

from typing import Any

import torch


def worker_main(
    prompts: list[list[int]],
    output_tokens: int,
    batch: int,
    _torch_model_class_mapping: dict[str, Any] | None = None,
    external_model_modules: dict[str, str] | None = None,
) -> list[list[int]]:
    """Greedy tokens of each prompt; every rank computes all, as if each held the whole model."""
    from tensorrt_llm._torch.models import modeling_utils

    torch.set_num_threads(1)
    if _torch_model_class_mapping is not None:
        from tensorrt_llm._torch.models.modeling_auto import MODEL_CLASS_MAPPING

        MODEL_CLASS_MAPPING.update(**_torch_model_class_mapping)
    if external_model_modules is not None:
        modeling_utils.register_external_model_modules(external_model_modules)
    kind = modeling_utils.get_registered_model_class("GptOssForCausalLM")
    assert kind is not None
    model = kind()
    told = []
    with torch.inference_mode():
        for start in range(0, len(prompts), batch):
            token = torch.tensor([prompt[-1] for prompt in prompts[start : start + batch]])
            steps = []
            for _ in range(output_tokens):
                token = model(token)
                steps.append(token)
            told += torch.stack(steps, dim=1).tolist()
    return told
