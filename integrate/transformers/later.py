"""Models that are built after a patch was switched on: the body's constructor hands them over.

Not by transformers' own patch mapping (`monkey_patching.register_patch_mapping`), which harms:
with any class registered, 5.17 looks through all modules for it whenever a model is built, which
raises where torchvision is missing (the aliases of its image processors); it rewrites
`_can_record_outputs`, which all models share, and never puts it back; a constructor that raises
leaves transformers' classes swapped; and it does not reach `AutoModel` or a class that is called.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

from patcher.bench import PatcherError, VerificationError
from patcher.integrate.transformers.parts import written_by_transformers

if TYPE_CHECKING:
    from patcher.integrate.dispatch import Dispatcher
    from patcher.integrate.points import PatchPoint

log = logging.getLogger("patcher")

_CONSTRUCTORS = threading.Lock()


class ModelsBuiltLater:
    """Puts a patch point into each gpt-oss that is built, however it is, until it is removed."""

    def __init__(self, point: type[PatchPoint], kernel: Dispatcher) -> None:
        self._point, self._kernel = point, kernel
        self._active = False
        self._patched: list[weakref.ref[PatchPoint]] = []
        """The forwards of a model hold its point: when it goes, its point goes."""

    @staticmethod
    def find() -> str:
        """In words.

        Raises:
            VerificationError: someone else has put a constructor on transformers' body.
        """
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssModel

        constructor: Any = GptOssModel.__init__
        while hasattr(constructor, "handed_to"):
            constructor = constructor.__wrapped__
        if not written_by_transformers(constructor):
            raise VerificationError(
                "GptOssModel.__init__ was replaced by other code",
                "remove the other patch first",
            )
        return "gpt-oss models that are built from now on"

    def install(self) -> None:
        """Wait for models."""
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        kind: Any = source.GptOssModel
        with _CONSTRUCTORS:
            self.find()
            own = kind.__init__

            @functools.wraps(own)
            def build(body: Any, *args: Any, **more: Any) -> None:
                own(body, *args, **more)
                self._take(body)

            build.handed_to = self  # type: ignore[attr-defined]
            self._active = True
            kind.__init__ = build

    def remove(self) -> None:
        """Leave models to come alone, and take the patch out of those that were built.

        Raises:
            VerificationError: someone patched over it; see `PatchPoint.remove`.
        """
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        kind: Any = source.GptOssModel
        self._active = False
        with _CONSTRUCTORS:
            # one that others lie over is idle until they go, too
            while hasattr(kind.__init__, "handed_to") and not kind.__init__.handed_to._active:
                kind.__init__ = kind.__init__.__wrapped__
        patched, self._patched = self._patched, []
        for reference in patched:
            point = reference()
            if point is not None:
                point.remove()
        self.find()

    def _take(self, body: Any) -> None:
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
