"""Double: --custom_module_dirs, which imports a folder as a package."""

import importlib
import sys
from pathlib import Path
from types import ModuleType


def import_custom_module_from_dir(custom_module_path: str | Path) -> ModuleType:
    folder = Path(custom_module_path)
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))
    try:
        return importlib.import_module(folder.name)
    except ImportError as error:
        raise ImportError(
            f"Failed to import package {folder.name} from {folder}: {error}"
        ) from error
