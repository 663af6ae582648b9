"""Double: how the process that was started hands model classes to its workers, in both ways."""

import os
from typing import Any

from ..llmapi.mpi_session import MpiPoolSession
from .worker import worker_main

WAY = "TRTLLM_DOUBLE_WAY"
"""`classes`: the mapping, pickled (005bc84, b93e14c); `modules`: names of modules (later)."""


class GenerationExecutorProxy:
    def __init__(self, model_world_size: int) -> None:
        self.mpi_session = MpiPoolSession(n_workers=model_world_size)

    def generate(self, **work: Any) -> list[list[list[int]]]:
        """The tokens that each rank found."""
        from tensorrt_llm._torch.models import modeling_gpt_oss, modeling_utils  # noqa: F401
        from tensorrt_llm._torch.models.modeling_auto import MODEL_CLASS_MAPPING

        if os.environ.get(WAY) == "modules":
            work["external_model_modules"] = modeling_utils.export_external_model_modules()
        else:
            work["_torch_model_class_mapping"] = MODEL_CLASS_MAPPING
        futures = self.mpi_session.submit(worker_main, **work)
        return [future.result() for future in futures]

    def shutdown(self) -> None:
        self.mpi_session.shutdown()
