"""The patches that this user has applied: `patcher apply`, `revert`, `patches`."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError, ValidationInfo, field_validator

from patcher.bench import SCHEMA_VERSION, Record, UsageError, VerificationError, obstacle
from patcher.integrate.manifest import PatchId
from patcher.integrate.patch import Patch
from patcher.integrate.points import present_name


class Applied(Record):
    """One applied patch."""

    id: PatchId
    digest: str
    """Digest of its manifest."""
    engine: str
    """The engine that it patches."""
    point: str
    """The patch point in that engine."""
    op: str
    """The op that its kernel implements."""

    @field_validator("point")
    @classmethod
    def _present(cls, point: str, info: ValidationInfo) -> str:
        return present_name(info.data.get("engine", ""), point)


class _Index(Record):
    schema_version: int = SCHEMA_VERSION
    applied: tuple[Applied, ...] = ()
    reverted: tuple[PatchId, ...] = ()
    """Patches that were applied once, so that a mistyped id is told from theirs."""


class Store:
    """A folder with copies of the applied patches and their list."""

    def __init__(self, root: Path | None = None) -> None:
        """Open a store.

        Args:
            root: the folder; by default `$PATCHER_HOME` or `~/.patcher`.

        Raises:
            UsageError: no folder is given, and this user has no home.
        """
        if root is None and (home := os.environ.get("PATCHER_HOME")):
            root = Path(home)
        try:
            self.root = Path(os.path.expanduser(root or Path.home() / ".patcher"))
        except RuntimeError as error:  # an id without a name, as containers have
            raise UsageError(
                "this user has no home folder, in which applied patches are kept",
                "set PATCHER_HOME to a folder",
            ) from error

    def applied(self) -> tuple[Applied, ...]:
        """The applied patches, oldest first.

        Raises:
            UsageError: the store is a file, or this user cannot read it.
            VerificationError: the list is damaged.
        """
        return self._index().applied

    def check(self) -> None:
        """Check that the store is a folder, or can become one.

        Raises:
            UsageError: a file is in its place.
        """
        if file := obstacle(self.root):
            raise UsageError(
                f"{file} is a file, where patches and memory need a folder",
                "set PATCHER_HOME to a folder",
            )

    def _index(self) -> _Index:
        self.check()
        path = self.root / "applied.json"
        try:
            return _Index.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return _Index()
        except OSError as error:
            raise UsageError(
                f"cannot read the applied patches in {self.root}: {error.strerror}",
                "let this user read that folder, or set PATCHER_HOME to another",
            ) from error
        except (ValidationError, UnicodeDecodeError) as error:
            raise VerificationError(
                f"the list of applied patches in {self.root} is damaged",
                f"remove {path} and apply the patches again",
            ) from error

    def apply(self, folder: Path) -> Applied:
        """Verify a bundle against this environment and copy it to the store.

        Args:
            folder: the bundle's folder.

        Returns:
            Its entry in the list of applied patches.

        Raises:
            UsageError: another patch is applied to the same patch point, or the store cannot be
                written.
            VerificationError: the bundle is damaged, or the installed engine does not match.
        """
        patch = Patch.load(folder)
        patch.verify_target()
        target = patch.manifest.target
        entry = Applied(
            id=patch.manifest.id,
            digest=patch.digest,
            engine=target.engine,
            point=target.point,
            op=patch.manifest.op,
        )
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with self._alone():
                self._keep(folder, entry)
        except OSError as error:
            raise self._unwritable(error) from error
        return entry

    def revert(self, patch_id: str) -> bool:
        """Remove an applied patch from the store.

        Returns:
            Whether the patch was applied until now.

        Raises:
            UsageError: no patch of that id was ever applied, or the store cannot be written.
        """
        try:
            with self._alone():
                return self._drop(patch_id)
        except OSError as error:
            raise self._unwritable(error) from error

    def load(self, entry: Applied) -> Patch:
        """Load an applied patch.

        Raises:
            VerificationError: the patch has changed since it was applied.
        """
        patch = Patch.load(self.root / "patches" / entry.id)
        if patch.digest != entry.digest:
            raise VerificationError(
                f"{entry.id} in {self.root} is not what was applied", "apply it again"
            )
        return patch

    def _keep(self, folder: Path, entry: Applied) -> None:
        index = self._index()
        others = [known for known in index.applied if known.id != entry.id]
        for known in others:
            if (known.engine, known.point) == (entry.engine, entry.point):
                raise UsageError(
                    f"{known.id} is already applied to {entry.point}",
                    f"patcher revert {known.id}",
                )
        with tempfile.TemporaryDirectory(dir=self.root) as scratch:
            staged = Path(scratch) / "patch"
            shutil.copytree(folder, staged, symlinks=True)
            Patch.load(staged)  # verify the copy, too
            # all that needs room is written before what is there goes
            written = _written(
                index.model_copy(update={"applied": (*others, entry)}), Path(scratch)
            )
            target_folder = self.root / "patches" / entry.id
            target_folder.parent.mkdir(exist_ok=True)
            shutil.rmtree(target_folder, ignore_errors=True)
            staged.rename(target_folder)
            written.replace(self.root / "applied.json")

    def _drop(self, patch_id: str) -> bool:
        index = self._index()
        left = tuple(entry for entry in index.applied if entry.id != patch_id)
        if len(left) == len(index.applied):
            if patch_id in index.reverted:
                return False
            names = ", ".join(entry.id for entry in left) or "none"
            raise UsageError(
                f"no patch {patch_id!r} was ever applied here", f"applied patches: {names}"
            )
        reverted = tuple(dict.fromkeys((*index.reverted, patch_id)))
        self._write(index.model_copy(update={"applied": left, "reverted": reverted}))
        shutil.rmtree(self.root / "patches" / patch_id, ignore_errors=True)
        return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other process or thread changes the store, and keep them waiting.

        Readers need no lock, since the list is replaced whole. Where the file system has no locks,
        there is none. A folder that is not there yet has nothing to change.
        """
        self.check()
        if not self.root.exists():
            yield
            return
        descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            yield
        finally:
            os.close(descriptor)

    def _unwritable(self, error: OSError) -> UsageError:
        why = error.strerror
        if isinstance(error, shutil.Error):  # it holds one (source, target, reason) a file
            why = str(error.args[0][0][2]).partition(": '")[0]
        return UsageError(f"cannot write {self.root}: {why}", "set PATCHER_HOME to another folder")

    def _write(self, index: _Index) -> None:
        """Replace the list; where that fails, the old one stays and nothing else."""
        with tempfile.TemporaryDirectory(dir=self.root) as scratch:
            _written(index, Path(scratch)).replace(self.root / "applied.json")


def _written(index: _Index, folder: Path) -> Path:
    path = folder / "applied.json"
    path.write_text(json.dumps(index.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    return path


_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""What file systems without locks say."""
