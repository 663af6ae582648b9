"""Patch models that are built after a patch was installed, by their body's constructor.

transformers' own patch mapping (`monkey_patching.register_patch_mapping`) is not used, for four
reasons. With any class registered, 5.17 searches all modules whenever a model is built, which
raises without torchvision (aliases of image processors). It rewrites `_can_record_outputs`, which
all models share, and never restores it. A constructor that raises leaves classes swapped. It does
not apply to `AutoModel` or to direct calls of a class.
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
    """Patches each gpt-oss model that is built, in any way, until it is removed."""

    def __init__(self, point: type[PatchPoint], kernel: Dispatcher) -> None:
        self._point, self._kernel = point, kernel
        self._active = False
        self._patched: list[weakref.ref[PatchPoint]] = []
        """Weak references: a model's forwards own its point, which is freed with the model."""

    @staticmethod
    def find() -> str:
        """A description of the target.

        Raises:
            VerificationError: other code has replaced the constructor of transformers' body.
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
        """Wrap the constructor of transformers' body."""
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        kind: Any = source.GptOssModel
        with _CONSTRUCTORS:
            self.find()
            own = kind.__init__

            @functools.wraps(own)
            def build(body: Any, *args: Any, **more: Any) -> None:
                own(body, *args, **more)
                self._patch(body)

            build.handed_to = self  # type: ignore[attr-defined]
            self._active = True
            kind.__init__ = build

    def remove(self) -> None:
        """Stop patching new models, and remove the patch from the patched ones.

        Raises:
            VerificationError: another patch was installed over it; see `PatchPoint.remove`.
        """
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        kind: Any = source.GptOssModel
        self._active = False
        with _CONSTRUCTORS:
            # a constructor wrapped by others stays, idle, until they are removed
            while hasattr(kind.__init__, "handed_to") and not kind.__init__.handed_to._active:
                kind.__init__ = kind.__init__.__wrapped__
        patched, self._patched = self._patched, []
        covered: list[PatcherError] = []
        for reference in patched:
            point = reference()
            if point is not None:
                try:
                    point.remove()
                except PatcherError as error:
                    covered.append(error)
        self.find()
        if covered:
            raise covered[0]

    def _patch(self, body: Any) -> None:
        """Patch a new model; one that does not match is left unpatched."""
        if not self._active:
            return
        point = self._point(body)
        try:
            point.install(self._kernel)
        except PatcherError as error:
            if self._kernel.strict:
                raise
            log.error("a model is not patched, the engine's own kernel runs: %s", error)
            self._kernel.book.reasons["a model that is not what the patch replaces"] += 1
            return
        self._patched.append(weakref.ref(point))
