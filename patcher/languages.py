"""What a programming model needs before a language model is paid to write in it."""

from __future__ import annotations

import platform
from typing import Literal

from bench import Language, MissingError, UsageError
from bench.environment import describe
from bench.toolchains import toolchain

_COMPILED = {
    Language.HIP: "an AMD GPU",
    Language.SYCL: "a GPU that SYCL drives",
    Language.METAL: "an Apple GPU",
}


def require_sense(language: Language | None, *, whole: bool, sweep: str | None) -> None:
    """Refuse what a language that is only compiled can have nowhere.

    Raises:
        UsageError: a served model is to run such a kernel, or a sweep of it is to be timed.
    """
    if language is None or not language.compile_only:
        return
    only = f"a {language} kernel is only compiled here, never run or timed"
    if whole:
        raise UsageError(
            f"{only}: no engine can be patched with it",
            f"use `patcher optimize OP --language {language}`, or another language",
        )
    if sweep is not None:
        raise UsageError(f"{only}: there is no sweep of it", "drop --sweep")


def require_here(language: Language) -> None:
    """Refuse what this machine can neither build nor run.

    Raises:
        MissingError: no compiler, or no device, for the language.
    """
    toolchain(language).demand()
    if language in (Language.CPP, Language.TORCH) or language.compile_only:
        return
    import torch

    if not torch.cuda.is_available():
        raise MissingError(
            f"a {language} candidate needs a CUDA device and this machine has none",
            "go on with `patcher resume` on a GPU host, or write it in cpp",
        )


def device_kind(language: Language) -> Literal["cpu", "cuda"]:
    """Whose sweep a language is shown or timed by."""
    if language is Language.TORCH:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cpu" if language is Language.CPP else "cuda"


def device_facts(language: Language) -> str:
    """What the agents should know of the hardware, in words."""
    if language.compile_only:
        return f"nothing: this machine only compiles. The kernel is for {_COMPILED[language]}"
    if device_kind(language) == "cpu":
        return (
            f"one thread of {describe('cpu').device} ({platform.machine()}); called from Python, "
            "so the fixed cost of a call counts. The same source must also compile and run on "
            "x86-64 without AVX-512 and on 64-bit Arm"
        )
    import torch

    device = torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability()
    return (
        f"{device.name}: compute capability {major}.{minor}, {device.multi_processor_count} "
        f"multiprocessors, {device.total_memory / 2**30:.0f} GiB, L2 {device.L2_cache_size >> 20} "
        "MiB. Timed as one call per buffer set inside a CUDA graph: no allocation, no "
        "synchronisation and no default-stream launch in a call; the launch itself is microseconds"
    )
