"""Compose a problem file of up to five operators: a function of seed, index and kind of device.

Shapes are found by running each step on PyTorch's meta device, so the list of operators in
`operators.toml` needs no rules of its own: a step that does not fit is drawn anew.
"""

from __future__ import annotations

import random
import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from patcher.bench import Record

DeviceKind = Literal["cpu", "cuda"]
DEPTHS = {1: 10, 2: 20, 3: 25, 4: 25, 5: 20}
"""Number of operators, with weights; five is CUDA Agent's limit."""
LAYOUTS = {"rows": 30, "sequence": 25, "image": 20, "signal": 10, "volume": 5, "tokens": 10}
DECODE_SHARE = 0.25
"""Share of tasks with the few rows of a decode step."""
PRECISIONS = {"cpu": {"fp32": 6, "bf16": 3, "fp16": 1}, "cuda": {"fp32": 3, "tf32": 3, "bf16": 4}}
RATES = {"cpu": (8e9, 4e10), "cuda": (2e12, 3e13)}
"""Bytes and operations per second with which sizes are chosen; no measurement of any machine."""
LARGE_MS, DECODE_MS = (1.0, 30.0), (0.0, 30.0)
"""Bounds of the estimate, inside 1 to 100 ms since an estimate is wrong by some factor."""
MOST_CALL_BYTES = 300 << 20
"""The judge takes a third of a GiB a call."""
_TRIES = 60
_SECTIONS = {"own": 45, "any": 25, "pair": 15, "turn": 8, "end": 7}
_WIDTH = {"cpu": [256, 320, 512, 768, 1000, 1024, 2048], "cuda": [1024, 2048, 2880, 4096, 5120]}
_SIZES: dict[str, dict[str, list[list[int]]]] = {
    "cpu": {
        "rows": [[256, 512, 1024, 2048, 4096], _WIDTH["cpu"]],
        "sequence": [[2, 4, 8, 16], [64, 128, 200, 256, 512], [64, 96, 128, 256, 512]],
        "tokens": [[4, 8, 16, 32], [128, 256, 512, 1024]],
        "signal": [[8, 16, 32], [16, 24, 32, 64, 128], [256, 500, 1024, 2048]],
        "image": [[4, 8, 16, 32], [8, 16, 24, 32, 64], [28, 32, 56, 64], [28, 32, 56, 64]],
        "volume": [[2, 4, 8], [8, 16, 32], [8, 16], [8, 16, 24], [8, 16, 24]],
        "decode": [[4, 8, 16, 32, 64, 128], [512, 768, 1024, 2048]],
    },
    "cuda": {
        "rows": [[4096, 8192, 16384, 32768], _WIDTH["cuda"]],
        "sequence": [[4, 8, 16, 32], [512, 1000, 1024, 2048], [256, 512, 768, 1024]],
        "tokens": [[8, 16, 32], [1024, 2048]],
        "signal": [[32, 64, 128], [64, 96, 128, 256], [1024, 2000, 4096]],
        "image": [[32, 64, 128], [32, 48, 64, 128], [56, 64, 112, 128], [56, 64, 112, 128]],
        "volume": [[8, 16], [16, 32, 64], [16, 32], [24, 32, 48], [24, 32, 48]],
        "decode": [[4, 8, 16, 32, 64, 128], [1024, 2048, 2880, 4096, 5120, 8192]],
    },
}
"""Sizes of each axis."""
_OUT = {"rows": "rows", "sequence": "sequence", "tokens": "sequence"}
_SPACE: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}


class ModuleComposition(Record):
    """A composed problem."""

    name: str
    source: str
    """A problem file of KernelBench's form."""
    operators: tuple[str, ...]
    """Of `operators.toml`, in order."""
    size_class: Literal["large", "decode"]
    layout: str
    precision: str
    """The column that its op has: fp32, tf32, bf16 or fp16."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the inputs."""


class NoFit(Exception):
    """A drawn composition does not fit; the message says why."""


@cache
def operators() -> dict[str, dict[str, tuple[str, str]]]:
    """By section and name: the call, and what `__init__` builds for it, or nothing."""
    text = Path(__file__).with_name("operators.toml").read_text(encoding="utf-8")
    return {
        section: {
            name: (entry, "") if isinstance(entry, str) else tuple(entry)
            for name, entry in entries.items()
        }
        for section, entries in tomllib.loads(text).items()
    }


def compose(seed: int, index: int, device: DeviceKind) -> ModuleComposition:
    """Candidate `index` of a seed.

    Raises:
        NoFit: none of the draws fits.
    """
    draw = random.Random(f"{seed}/{index}/{device}")
    why = ""
    for _ in range(_TRIES):
        try:
            return _Draft(draw, device).composition(f"{seed}_{index:05d}")
        except NoFit as reason:
            why = str(reason)
    raise NoFit(why)


@dataclass
class _Draft:
    """One attempt, a line of `forward` after another."""

    draw: random.Random
    device: DeviceKind
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    built: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    bytes: int = 0
    ms: float = 0.0
    """The estimate: each step reads its operands and writes its result."""

    def composition(self, number: str) -> ModuleComposition:
        draw = self.draw
        depth = _weighted(draw, DEPTHS)
        decode = draw.random() < DECODE_SHARE
        self.layout = begun = "rows" if decode else _weighted(draw, LAYOUTS)
        precision = _weighted(draw, PRECISIONS[self.device])
        shape = [draw.choice(each) for each in _SIZES[self.device]["decode" if decode else begun]]
        kind = torch.int64 if begun == "tokens" else torch.float32
        self.current = self._input(torch.empty(shape, dtype=kind, device="meta"))
        for left in reversed(range(depth)):
            self._step(last=left == 0)
        low, high = DECODE_MS if decode else LARGE_MS
        if not low <= self.ms <= high:
            raise NoFit("the estimated time lies outside the class")
        result = self.values[self.current]
        called = sum(4 * each.numel() for each in (*self.inputs.values(), result)) + self.bytes
        if called > MOST_CALL_BYTES:
            raise NoFit("its tensors exceed what the judge takes")
        return ModuleComposition(
            name=f"task_{number}_{'_'.join(self.names)}"[:80].rstrip("_"),
            source=self._source(number, result),
            operators=tuple(self.names),
            size_class="decode" if decode else "large",
            layout=begun,
            precision=precision,
            shapes=tuple(tuple(each.shape) for each in self.inputs.values()),
        )

    def _input(self, value: torch.Tensor) -> str:
        name = f"x{len(self.inputs)}" if self.inputs else "x"
        self.inputs[name] = self.values[name] = value
        return name

    def _step(self, last: bool) -> None:
        draw, table = self.draw, operators()
        turns = [name for name in table if name.startswith(f"{self.layout}>")]
        own = [self.layout, *(["last"] if self.layout in ("rows", "sequence") else [])]
        choices = {name: weight for name, weight in _SECTIONS.items() if name != "end" or last}
        if self.layout == "tokens":
            choices = {"turn": 1}
        elif not turns:
            del choices["turn"]
        section = _weighted(draw, choices)
        section = {"own": draw.choice(own), "turn": draw.choice(turns or own)}.get(section, section)
        name = draw.choice(sorted(table[section]))
        call, build = table[section][name]
        other = self._other() if section == "pair" else ""
        known: dict[str, str] = {}
        build, call = self._filled(build, known), self._filled(call, known)
        member = f"self.m{len(self.built)}" if build else ""
        result = self._run(call, build, other)
        target = f"v{len(self.lines)}"
        named = {"x": self.current, "y": other, "m": member}
        text = re.sub(r"(?<![\w.])[xym](?!\w)", lambda match: named[match[0]], call)
        self.lines.append(f"{target} = {text}")
        if build:
            self.built.append(f"{member} = {build}")
        self.names.append(name)
        self.layout = section.partition(">")[2] or self.layout
        self.values[target], self.current = result, target

    def _other(self) -> str:
        """Another value of the current one's shape, or a new input."""
        now = self.values[self.current]
        fit = [n for n, v in self.values.items() if v.shape == now.shape and n != self.current]
        if fit and self.draw.random() < 0.7:
            return self.draw.choice(fit)
        return self._input(torch.empty_like(now))

    def _filled(self, text: str, known: dict[str, str]) -> str:
        value = self.values[self.current]
        wide = self.layout in ("rows", "sequence")
        sizes = _SIZES[self.device][_OUT.get(self.layout, self.layout)]
        known.setdefault("C", str(value.shape[-1 if wide or value.dim() < 2 else 1]))
        known.setdefault("O", str(self.draw.choice(sizes[-1 if self.layout in _OUT else 1])))

        def one(match: re.Match[str]) -> str:
            name, _, among = match[1].rpartition("=")
            if not name and match[1] in known:
                return known[match[1]]
            found: str = self.draw.choice(among.split("|"))
            if name:
                known[name] = found
            return found

        return re.sub(r"<([^<> ]+)>", one, text)

    def _run(self, call: str, build: str, other: str) -> torch.Tensor:
        given = self.values[self.current]
        space = {**_SPACE, "x": given, "y": self.values.get(other)}
        counter = FlopCounterMode(display=False)
        state = 0
        try:
            with torch.device("meta"), torch.no_grad(), counter:
                if build:
                    space["m"] = member = eval(build, space)
                    tensors = (
                        [*member.parameters(), *member.buffers()]
                        if isinstance(member, nn.Module)
                        else [member]
                    )
                    state = sum(4 * each.numel() for each in tensors)
                result: torch.Tensor = eval(call, space)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise NoFit(f"{call}: {error}") from error
        if not result.is_floating_point() or not result.numel() or result.dim() < 1:
            raise NoFit(f"{call} gives no numbers")
        if 4 * result.numel() > MOST_CALL_BYTES:
            raise NoFit(f"{call} is too large")
        moved = 4 * (given.numel() + result.numel()) + state
        bandwidth, flops = RATES[self.device]
        self.bytes += state
        self.ms += 1e3 * max(moved / bandwidth, counter.get_total_flops() / flops)
        return result

    def _source(self, number: str, result: torch.Tensor) -> str:
        batch = next(iter(self.inputs.values())).shape[0]
        made = []
        for value in self.inputs.values():
            sizes = ", ".join(map(str, value.shape[1:]))
            first = "batch_size" if value.shape[0] == batch else str(value.shape[0])
            shape = f"{first}, {sizes}" if sizes else f"{first},"
            whole = value.dtype == torch.int64
            made.append(f"torch.randint(0, 4096, ({shape}))" if whole else f"torch.randn({shape})")
        init = ["super().__init__()", *self.built]
        body = [*self.lines, f"return {self.current}"]
        margin = "\n        "
        return (
            f'"""Task {number}: {", ".join(self.names)}."""\n\n'
            "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n"
            f"batch_size = {batch}\n\n\n"
            "class Model(nn.Module):\n"
            f"    def __init__(self):{margin}{margin.join(init)}\n\n"
            f"    def forward(self, {', '.join(self.inputs)}):{margin}{margin.join(body)}\n\n\n"
            f"def get_inputs():\n    return [{', '.join(made)}]\n\n\n"
            "def get_init_inputs():\n    return []\n"
        )


def _weighted(draw: random.Random, choices: dict[Any, int]) -> Any:
    return draw.choices(list(choices), weights=list(choices.values()))[0]
