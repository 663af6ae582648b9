"""`patcher.patched`: a patch in a transformers model for as long as a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from patcher.api.display import data_frame, html_table
from patcher.bench import FilePath, UsageError, check_arguments
from patcher.integrate import Receipt, open_bundle

if TYPE_CHECKING:
    from pandas import DataFrame

    from patcher.integrate import CallCounters


class PatchReceipt:
    """What ran while a patch is in, counted live; it keeps the counts after the block."""

    def __init__(self, counters: CallCounters, point: str) -> None:
        self._counters, self.point = counters, point
        """Engine and patch point."""

    @property
    def patch_id(self) -> str:
        """The patch's id."""
        return self._counters.patch_id

    @property
    def calls(self) -> dict[str, int]:
        """Calls of the patched kernel, by kernel and shape."""
        return dict(self._counters.calls)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls that ran the engine's own code, by reason."""
        return dict(self._counters.fallbacks)

    @property
    def total_calls(self) -> int:
        """Calls of the patched kernel."""
        return sum(self.calls.values())

    def record(self) -> Receipt:
        """The counts so far as a record, as `patcher receipts` reads them."""
        return Receipt.of(self._counters, self.point)

    def to_pandas(self) -> DataFrame:
        """The counts so far as a data frame.

        Returns:
            Columns `what` (`call` or `fallback`), `name` (kernel and shape, or the reason) and
            `count`.

        Raises:
            MissingError: pandas is not installed.
        """
        return data_frame(self._rows(), ("what", "name", "count"))

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"what": what, "name": name, "count": count}
            for what, counts in (("call", self.calls), ("fallback", self.fallbacks))
            for name, count in counts.items()
        ]

    def __repr__(self) -> str:
        fallbacks = sum(self.fallbacks.values())
        return (
            f"<PatchReceipt {self.patch_id}: {self.total_calls:,} calls, {fallbacks:,} fallbacks>"
        )

    def _repr_html_(self) -> str:
        rows = [tuple(row.values()) for row in self._rows()]
        caption = f"{self.patch_id} at {self.point}"
        return html_table(caption, ("what", "kernel and shape, or reason", "count"), rows)


@check_arguments
@contextmanager
def patched(model: Any, patch: FilePath, *, strict: bool = True) -> Iterator[PatchReceipt]:
    """Run a transformers model with a patch in it, and take the patch out again.

    The model is as it was when the block ends, also after an exception. Blocks may be nested, for
    patches at different patch points, and the same patch may go in again later.

    Args:
        model: a built transformers model.
        patch: a bundle's folder or `.zip` file, or the id of an applied patch.
        strict: whether a patched kernel that raises is an error. If not, it is logged and counted
            and the model's own code runs from then on, as in serving.

    Yields:
        The receipt: calls of the patched kernel and calls that fell back, while they happen.

    Raises:
        UsageError: no model, no such bundle, a patch for another engine, or one that is in
            already.
        MissingError: transformers or the patch's compiler is not here.
        VerificationError: the bundle is damaged, or the installed transformers or the model is not
            what the patch replaces.

    Examples:
        >>> with patcher.patched(model, "norm.zip") as receipt:
        ...     output = model.generate(**inputs)
        >>> receipt.calls, receipt.fallbacks
    """
    if model is None:
        raise UsageError("no model to patch", "give a built transformers model")
    with ExitStack() as stack:
        bundle = stack.enter_context(open_bundle(patch))
        target = bundle.manifest.target
        if target.engine != "transformers":
            raise UsageError(
                f"{bundle.manifest.id} is for {target.engine}, which is patched when its processes "
                "start",
                "use `patcher apply` and set PATCHER_PATCHES=on",
            )
        import torch

        from patcher.integrate import CallCounters, GraphWatch, prepare
        from patcher.integrate.verify import verify_device

        verify_device(bundle.manifest)
        counters = CallCounters(bundle.manifest.id, bundle.digest)
        watch = GraphWatch([])
        installed = prepare(model, bundle, book=counters, strict=strict, watch=watch)
        stack.callback(installed.dispatcher.close)
        if torch.cuda.is_available():
            stack.enter_context(watch)
        stack.callback(installed.remove)
        installed.install()
        yield PatchReceipt(counters, f"{target.engine}:{target.point}")
