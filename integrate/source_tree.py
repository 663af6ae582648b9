"""An engine's Python files, installed or in a wheel: their parts by name, not imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import ClassVar, Self

from packaging.version import Version

from patcher.bench import MissingError
from patcher.integrate.engine import installed_version
from patcher.integrate.source_parts import ABSENT, Part, read_part


class SourceTree:
    """A folder that holds an engine's package: site-packages, or an unpacked wheel."""

    package: ClassVar[str]
    """The name by which the engine is imported and installed."""
    title: ClassVar[str]
    """The engine's name in sentences."""
    ships: ClassVar[str] = ""
    """The folder in the tree of packages that the engine brings along."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def installed(cls) -> Self:
        """The engine of this environment, which is found but not imported.

        Raises:
            MissingError: the engine is not installed.
        """
        spec = importlib.util.find_spec(cls.package)
        if spec is None or not spec.submodule_search_locations:
            raise cls.missing(cls.package)
        return cls(Path(next(iter(spec.submodule_search_locations))).parent)

    @classmethod
    def missing(cls, package: str) -> MissingError:
        """The error for an engine, or a package that it needs, that is not installed."""
        hint = f"pip install {cls.package}, in an environment of its own"
        return MissingError(f"{package} is not installed", hint)

    def version(self) -> str:
        """The version without a local label, such as `0.33.0`.

        Raises:
            MissingError: the folder does not hold the engine's metadata.
        """
        for found in importlib.metadata.distributions(name=self.package, path=[str(self.folder)]):
            return Version(found.version).public
        if self._is_installed():  # a checkout's metadata lies elsewhere
            return Version(installed_version(self.package)).public
        raise MissingError(
            f"{self.folder} holds no {self.package}-*.dist-info",
            f"unpack the whole wheel of {self.title} there",
        )

    def part(self, name: str) -> Part:
        """The part `module:attribute.attribute`; its digest is `ABSENT` if there is none.

        See `read_part`.
        """
        module, _, path = name.partition(":")
        file = self._file(module)
        return Part(ABSENT) if file is None else read_part(file, path)

    def _file(self, module: str) -> Path | None:
        inside = Path(*module.split("."))
        folder = self.folder
        if inside.parts[0] != self.package:
            # the engine prefers an installed package to its own copy
            own = importlib.util.find_spec(inside.parts[0]) if self._is_installed() else None
            ships = folder / self.ships
            folder = Path(own.origin).parents[1] if own is not None and own.origin else ships
        files = folder / inside.with_suffix(".py"), folder / inside / "__init__.py"
        return next((file for file in files if file.is_file()), None)

    def _is_installed(self) -> bool:
        spec = importlib.util.find_spec(self.package)
        where = spec.submodule_search_locations if spec is not None else None
        return bool(where) and Path(next(iter(where or ()))).parent == self.folder
