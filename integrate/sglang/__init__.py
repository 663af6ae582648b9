"""SGLang's general plugin: installs patches in every process that holds a model, and only there.

SGLang 0.5.23 loads plugins (entry points `sglang.srt.plugins`) in the main process, in each
scheduler, in the detokenizer and in the controller of data parallel replicas. Only schedulers build
a model. So loading only registers hooks around `ModelRunner.load_model` and after
`ModelRunner.init_cuda_graphs`, by SGLang's own `HookRegistry`. When the first runs, device and
parallel groups exist, but the model is not yet built. SGLang runs each size eagerly before it
records it, which builds and proves the kernels for that size.

Without an enabled patch, the plugin imports only the standard library.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patcher.integrate.activation import Activation


def register() -> None:
    """The entry point `sglang.srt.plugins`; idempotent.

    Raises:
        SystemExit: with `PATCHER_STRICT`, the reason why no patch can be installed. SGLang logs
            every other exception of a plugin and serves without it.
    """
    chosen = os.environ.get("PATCHER_PATCHES") or os.environ.get("TLLM_PATCHER_PATCHES") or "off"
    if chosen.strip() == "off":
        return
    from patcher.integrate.sglang.plugin import hook

    hook()


def activation() -> Activation:
    """The patches that the plugin installed in this process, whose model is loaded.

    Raises:
        VerificationError: with `PATCHER_STRICT`, SGLang did not call the hook; it only logs why.
    """
    from patcher.integrate.sglang.plugin import active_here

    return active_here()
