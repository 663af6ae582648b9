"""Models that are built after a patch was switched on, by transformers' own patch mapping.

`transformers.monkey_patching.register_patch_mapping` swaps classes by name while `from_pretrained`
and `from_config` build a model. Only the body's class is registered: the mapping also rewrites
`_can_record_outputs`, which all models share, wherever that names a registered class, and never
puts it back; it names layers, attention and router, but not the body. The stand-in builds what
transformers builds, becomes transformers' own class again, and hands itself over.

The mapping does not reach a model whose class is called directly, nor `AutoModel`, which builds
the body alone: hand those to `activate("transformers", model)`.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from bench import PatcherError, VerificationError

if TYPE_CHECKING:
    from integrate.dispatch import Dispatcher
    from integrate.transformers.forwards import GptOssPoint

log = logging.getLogger("patcher")

_KEY = "GptOssModel"
_REGISTRATION = threading.Lock()


class ModelsBuiltLater:
    """Puts a patch point into each model that transformers builds, until it is removed."""

    def __init__(self, point: type[GptOssPoint], kernel: Dispatcher) -> None:
        self._point, self._kernel = point, kernel
        self._active = False
        self._patched: list[weakref.ref[GptOssPoint]] = []
        """The forwards of a model hold its point: when it goes, its point goes."""

    @staticmethod
    def find() -> str:
        """In words.

        Raises:
            VerificationError: someone else has registered a class for the body.
        """
        from transformers.monkey_patching import get_patch_mapping

        registered: Any = get_patch_mapping().get(_KEY)
        if registered is not None and not hasattr(registered, "handed_to"):
            raise VerificationError(
                f"{_KEY} has a patch mapping of someone else's", "unregister that one first"
            )
        return "gpt-oss models that transformers builds from now on"

    def install(self) -> None:
        """Register for all models to come."""
        from transformers.models.gpt_oss import modeling_gpt_oss as source
        from transformers.monkey_patching import get_patch_mapping, register_patch_mapping

        with _REGISTRATION:
            self.find()
            own = _own_class(source.GptOssModel)
            before: Any = get_patch_mapping().get(_KEY, own)
            self._active = True
            stand_in = _stand_in(before, own, self)
            register_patch_mapping({_KEY: stand_in}, overwrite=True)

    def remove(self) -> None:
        """Leave models to come alone, and take the patch out of those that were built.

        Raises:
            VerificationError: someone patched over it; see `PatchPoint.remove`.
        """
        from transformers.models.gpt_oss import modeling_gpt_oss as source
        from transformers.monkey_patching import (
            get_patch_mapping,
            register_patch_mapping,
            unregister_patch_mapping,
        )

        self._active = False
        with _REGISTRATION:
            before: Any = get_patch_mapping().get(_KEY)
            left: Any = before
            while hasattr(left, "handed_to") and not left.handed_to._active:
                left = left.__base__
            if left is not None and left is _own_class(source.GptOssModel):
                unregister_patch_mapping([_KEY])
            elif left is not before:
                register_patch_mapping({_KEY: left}, overwrite=True)
            # a constructor that raised has left transformers' classes swapped
            for name, module in list(sys.modules.items()):
                found = vars(module).get(_KEY) if name.startswith("transformers") else None
                if found is not None and found is not _own_class(found):
                    setattr(module, _KEY, _own_class(found))
        patched, self._patched = self._patched, []
        for reference in patched:
            point = reference()
            if point is not None:
                point.remove()

    def take(self, body: Any) -> None:
        """Put the patch into a model that was built; one that does not fit is left alone."""
        if not self._active:
            return
        point = self._point(body)
        try:
            point.install(self._kernel)
        except PatcherError as error:
            if self._kernel.strict:
                raise
            log.error("a model is not patched, the engine's own runs: %s", error)
            self._kernel.book.reasons["a model that is not what the patch replaces"] += 1
            return
        self._patched.append(weakref.ref(point))


def _stand_in(base: Any, own: Any, later: ModelsBuiltLater) -> type[Any]:
    """A class that builds what `base` builds and hands it over as an instance of `own`."""

    def build(self: Any, *args: Any, **more: Any) -> None:
        base.__init__(self, *args, **more)
        self.__class__ = own
        later.take(self)

    # named as transformers' own: its registries go by the name
    space = {"__init__": build, "__module__": own.__module__, "__qualname__": own.__qualname__}
    made: Any = type(own.__name__, (base,), space)
    made.handed_to = later
    return made  # type: ignore[no-any-return]


def _own_class(kind: Any) -> Any:
    while hasattr(kind, "handed_to"):
        kind = kind.__base__
    return kind
