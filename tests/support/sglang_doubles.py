"""Doubles of packages that SGLang's modules import but its patch points do not use.

SGLang is read and run on a CPU from its unpacked wheel, as vLLM is (`vllm_doubles`). As a pytest
plugin (`-p sglang_doubles`) this module lets packages be imported that need a GPU. None of them is
called: SGLang runs its PyTorch code on a CPU (`SGLANG_USE_CPU_ENGINE`).
"""

from __future__ import annotations

import os
import sys

from transformers.utils.import_utils import is_torchvision_available
from vllm_doubles import DOUBLED, Finder

is_torchvision_available()  # transformers looks once, and must not take the double for the package
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sys.meta_path.append(
    Finder(DOUBLED | {"compressed_tensors", "sgl_kernel", "torchvision", "tvm_ffi"})  # type: ignore[arg-type]
)
