"""Points whose parts are found in a built model by what they hold, and tried on numbers."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch

from patcher.bench import VerificationError
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import dispatches_itself
from patcher.integrate.survey import survey
from patcher.integrate.transformers.forwards import ForwardPatch, ForwardsPoint
from patcher.integrate.transformers.parts import kind_of, refuse_replaced, sentence_of
from patcher.integrate.transformers.swap import Forward, ModuleSwap

ELSE = "it computes something else"
"""Why a layer keeps the engine's own code where no more is known than what a probe gave."""


class ProbedPoint(ForwardsPoint):
    """Replaces the `forward` of parts of a built model; it must hold its weights already."""

    role: ClassVar[str]
    """What a part is, in words, such as `norm`."""
    wanted: ClassVar[str]
    """What such a part computes, in words, after `role`."""
    others: ClassVar[str]
    """What a model has where it has none, in words."""

    @abstractmethod
    def of_role(self, layer: Any) -> bool:
        """See `LayerPoint`: whether a module holds what such a part does, and is called as one."""

    @abstractmethod
    def computes(self, part: Any) -> bool:
        """Whether a part computes what the op does, with its own weights."""

    @abstractmethod
    def new_forward(self, part: Any, seam: ForwardPatch, original: Forward) -> Forward:
        """The forward that calls the kernel."""

    @abstractmethod
    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        """See `LayerPoint`."""

    def would_take_of(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """The modules that are taken in a model whose weights are not in memory, once for each call
        in a step."""
        return [each for each in model.modules() if self.of_role(each) and self.would_take(each)]

    def would_take(self, layer: Any) -> bool:
        """Whether such a module of the role is taken: it is tried with other weights."""
        try:
            return self.computes(with_other_weights(layer))
        except RuntimeError:  # its settings do not fit together
            return False

    def find(self) -> str:
        """See `ForwardsPoint.find`; models that are built later have no weights to try yet."""
        if self.target is None:
            raise VerificationError(
                f"{self.role}s are found in a built model alone",
                'call integrate.activate("transformers", model) once the model is built',
            )
        with _without_autocast(self.target):
            return super().find()

    def install(self, kernel: Dispatcher) -> None:
        if self.target is None:
            self.find()
        with _without_autocast(self.target):
            super().install(kernel)

    def applies(self, layer: Any) -> str | None:
        """See `LayerPoint`."""
        return None if self.computes(layer) else ELSE

    def _parts(self) -> list[torch.nn.Module]:
        parts = [each for each in self.target.modules() if self.of_role(each)]
        for part in parts:
            refuse_replaced(part)
            if type(part) is not kind_of(part):
                raise VerificationError(
                    f"{kind_of(part).__name__} is already patched", "remove the other patch first"
                )
            for name, tensor in self.constants(part).items():
                if dispatches_itself(tensor):
                    raise VerificationError(
                        f"{kind_of(part).__name__}.{name} is a {type(tensor).__name__}, which no "
                        "kernel of a patch can read",
                        "patch the model before it is sharded or converted",
                    )
        taken = [part for part in parts if self._tried(part)]
        if not taken and any(held.is_meta for part in parts for held in part.parameters()):
            raise VerificationError(
                f"{type(self.target).__name__} has no {self.role} whose weights are in memory",
                "load the model on one device, without device_map or offload",
            )
        if not taken:
            raise VerificationError(
                f"{type(self.target).__name__} has no {self.role} {self.wanted}"
                + _told(Counter(filter(None, map(self.applies, parts)))),
                f"its {self.others} are of another kind; revert the patch",
            )
        return taken

    def _tried(self, part: Any) -> bool:
        try:
            return self.computes(part)
        except RuntimeError as error:  # its parts do not fit together outside the whole model
            raise VerificationError(
                f"{kind_of(part).__name__} cannot be tried alone: {sentence_of(error)}",
                "patch the model before it is sharded or converted",
            ) from error

    def _swaps_for(self, kernel: Dispatcher) -> list[ModuleSwap]:
        seam, parts = ForwardPatch(kernel, self.original), self._parts()
        self._count(kernel, [(part,) for part in parts])
        return [
            ModuleSwap(part, partial(self.new_forward, part, seam), self, seam.refuse)
            for part in parts
        ]

    def _count(self, kernel: Dispatcher, taken: Sequence[tuple[torch.nn.Module, ...]]) -> None:
        """Have the counters tell what is taken, each with the modules that it needs, and what of
        these is replaced later."""
        kernel.book.surveys[0] = survey(self, kernel.guards, self.target.modules())
        names = {module: name for name, module in self.target.named_modules()}
        paths = [
            [s for each in needed for s in _path(self.target, names[each])] for needed in taken
        ]
        kernel.book.replaced = partial(_replaced, paths)


def with_other_weights(module: Any) -> Any:
    """A copy of a module whose weights are not in memory, with others."""
    held = copy.deepcopy(module).to_empty(device="cpu")
    for tensor in (*held.parameters(), *held.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor)
    return held


def _without_autocast(model: Any) -> ExitStack:
    """Parts are tried in the dtypes of their weights, where a patch is put in under autocast, too:
    calls under autocast run the model's own code."""
    kinds = {held.device.type for held in model.parameters()}
    stack = ExitStack()
    for kind in filter(torch.amp.is_autocast_available, sorted(kinds)):
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _told(refused: Counter[str]) -> str:
    """`: 2: it also computes sigmoid`, where a point says more than that it is something else."""
    refused.pop(ELSE, None)
    return "".join(f"; {count:,}: {reason}" for reason, count in refused.most_common())


_Step = tuple[dict[str, Any], str, torch.nn.Module]
"""The parts of a module, by name; the name of one, and what it was."""


def _path(module: torch.nn.Module, name: str) -> Iterator[_Step]:
    """The steps from a module to one of its parts; they are few, and quick to look at again."""
    for step in filter(None, name.split(".")):
        held: dict[str, Any] = module._modules
        module = held[step]
        yield held, step, module


def _replaced(paths: Sequence[Sequence[_Step]]) -> int:
    return sum(any(held.get(step) is not was for held, step, was in path) for path in paths)
