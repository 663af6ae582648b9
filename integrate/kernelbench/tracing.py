"""The trace of a problem file, which the sandbox makes.

`runner` runs the file under `patcher.bench.sandbox`, as compilers run: no network, no GPU, no file
but its own, limits on memory and time. A trace is kept by content, so that an import that was
stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import shutil
import sys
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from patcher.bench import parse_json, problem, write_atomically
from patcher.bench.sandbox import plain_file, strangers_folder
from patcher.bench.toolchains import cache_root
from patcher.bench.toolchains.compilers import run_compiler
from patcher.integrate.formats.foreign_contract import Refused
from patcher.integrate.kernelbench.problem import Problem, ProblemTrace, plain

TRACE_S = 300.0
"""Time limit in seconds of one trace."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_ADVICE = (
    (
        re.compile(
            r"can't allocate memory|not enough memory|^MemoryError|after \d+ s|GiB of memory"
        ),
        "the sandbox has 8 GiB and 5 minutes for a problem; for smaller sizes give --scale 16, or "
        "--size NAME=SIZE",
    ),
    (
        re.compile(r"huggingface|Hugging Face|HF_HUB_OFFLINE|outgoing traffic", re.IGNORECASE),
        "the sandbox has no network and no cache of Hugging Face; build the module from a config "
        "that the file holds, as by AutoModelForCausalLM.from_config(GPT2Config()).eval(), and "
        "call it with use_cache=False",
    ),
)
_BYTES = 20_000_000
_RUNNER = Path(__file__).with_name("runner")


def trace_own(path: Path) -> ProblemTrace:
    """Trace a problem file of ours in this process, without the sandbox.

    Raises:
        Refused: it cannot be traced.
    """
    from patcher.integrate.kernelbench.runner import script
    from patcher.integrate.kernelbench.runner.values import Unfit

    try:
        document = json.dumps(script.trace(str(path)), allow_nan=False)
    except Unfit as reason:
        raise Refused(plain(str(reason))) from reason
    except Exception as error:  # torch.export raises what it likes
        raise Refused(plain(f"{type(error).__name__}: {error}")) from error
    return ProblemTrace.model_validate(parse_json(document.encode()))


def trace(found: Problem) -> ProblemTrace:
    """Run a problem in the sandbox and check what comes back, or use its earlier trace.

    Raises:
        Refused: it cannot be traced.
    """
    kept = cache_root() / "traces" / f"{_key(found.source)}.json"
    told = plain_file(kept, _BYTES + 1)
    if told is not None:
        try:
            return _checked(told)
        except Refused:
            pass  # damaged since
    told = _run(found.source)
    traced = _checked(told)
    try:
        write_atomically(kept, told)
    except OSError:
        return traced  # without a cache it costs time only
    return traced


def _run(source: str) -> bytes:
    with strangers_folder("patcher-problem-") as work:
        (work / "problem.py").write_text(source, encoding="utf-8")
        shutil.copytree(
            _RUNNER, work / "patcher_trace", ignore=shutil.ignore_patterns("__pycache__")
        )
        command = [sys.executable, "-P", "-m", "patcher_trace.script", "problem.py", "trace.json"]
        environment = {"PYTHONPATH": str(work), **OFFLINE}
        code, log = run_compiler(command, work, TRACE_S, environment)
        told = plain_file(work / "trace.json", _BYTES + 1) if code == 0 else None
        if told is None:
            last = plain((log.strip().splitlines() or [f"exit code {code}"])[-1])
            hint = "; a larger --scale may help" if code else ""
            raise Refused(advised(f"the sandbox ended its trace: {last}", hint))
        if len(told) > _BYTES:
            raise Refused("its trace is too large")
        return told


def _checked(told: bytes) -> ProblemTrace:
    try:
        document = parse_json(told)
        if isinstance(document, dict) and "refused" in document:
            raise Refused(advised(plain(str(document["refused"]))))
        return ProblemTrace.model_validate(document)
    except (ValidationError, ValueError) as error:
        raise Refused(f"its trace is damaged: {problem(error):.200}") from error


def advised(reason: str, otherwise: str = "") -> str:
    """A reason with what can be done, where that is known."""
    for pattern, advice in _ADVICE:
        if pattern.search(reason):
            return f"{reason}: {advice}"
    return reason + otherwise


def _key(source: str) -> str:
    runner = [path.read_text(encoding="utf-8") for path in sorted(_RUNNER.glob("*.py"))]
    told = json.dumps([source, *runner, _installed()])
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@cache
def _installed() -> list[str]:
    """A problem may import any of them."""
    found = importlib.metadata.distributions()
    return [sys.version, *sorted({f"{each.name} {each.version}" for each in found})]
