"""What a programming model needs before a language model is paid to write in it."""

from __future__ import annotations

from typing import Literal

from patcher.bench import Language, MissingError, UsageError
from patcher.bench.toolchains import toolchain
from patcher.judges import remote_judge
from patcher.judges.hardware import hardware_facts

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
    if language.traits.device != "cuda" or language.compile_only:
        return
    import torch

    if not torch.cuda.is_available():
        raise MissingError(
            f"a {language} candidate needs a CUDA device and this machine has none",
            "use a GPU host, judge with --judge exchange:DIR, or write it in cpp",
        )


def device_kind(language: Language) -> Literal["cpu", "cuda"]:
    """Whose sweep a language is shown or timed by."""
    if language.traits.device is not None:
        return language.traits.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_facts(language: Language) -> str:
    """What the agents should know of this machine, in words.

    Raises:
        MissingError: the language needs a CUDA device and there is none.
    """
    if language.compile_only:
        device = _COMPILED.get(language, f"whatever runs {language}")
        return f"nothing: this machine only compiles. The kernel is for {device}"
    return hardware_facts(device_kind(language))


def judge_device_kind(spec: str, language: Language) -> Literal["cpu", "cuda"]:
    """The kind of device that `--judge` judges the language on."""
    remote = remote_judge(spec)
    if remote and language.traits.device is None:
        return remote[0].usual_kind(remote[1])
    return device_kind(language)


def judge_hardware(spec: str, language: Language, threads: int | None = None) -> str:
    """What the agents should know of the hardware on which `--judge` judges, with so many CPU
    threads; None is one, as the judge has it.

    Raises:
        MissingError: it is this machine, and it has no device for the language.
    """
    remote = remote_judge(spec)
    if language.compile_only:
        return device_facts(language)
    kind = judge_device_kind(spec, language)
    found = remote[0].hardware(remote[1], kind) if remote else device_facts(language)
    if kind != "cpu":
        return found
    return f"{'one thread' if threads in (None, 1) else f'{threads} threads'} of {found}"
