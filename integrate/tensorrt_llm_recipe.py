"""Write a recipe for building, installing and reverting TensorRT-LLM with a diff.

Its commands verify checksums. They are based on scripts/build_wheel.py (01003c9) of
NVIDIA/TensorRT-LLM and have not been run to the end yet.
"""

from __future__ import annotations

from pathlib import Path

from patcher.bench import UsageError
from patcher.integrate.tensorrt_llm_source import SourceDiff


def write_recipe(folder: Path, diff: SourceDiff, architecture: str = "90-real") -> Path:
    """Write `patcher.diff` and RECIPE.md, which explains how to build with it and how to revert.

    Args:
        folder: where the two files are written.
        diff: the change of the source tree.
        architecture: the CUDA architecture in CMake's spelling.

    Returns:
        The path of RECIPE.md.

    Raises:
        UsageError: the files cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "patcher.diff").write_bytes(diff.text.encode())
        recipe = folder / "RECIPE.md"
        recipe.write_text(_recipe(diff, architecture), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {folder}: {error.strerror}", "choose another folder"
        ) from error
    return recipe


def _recipe(diff: SourceDiff, architecture: str) -> str:
    before = "\n".join(f"{digest}  {path}" for path, digest in diff.before.items())
    after = "\n".join(f"{digest}  {path}" for path, digest in diff.after.items())
    return f"""# A kernel in {diff.seam.function}

TensorRT-LLM launches this kernel in C++, so the patch is a change of its source and a rebuild.
Run all of it in NVIDIA's development container, in the checkout that the diff was made for.
`$PATCH` is this folder.

## 1. Is it that checkout?

```bash
sha256sum --check <<'END'
{before}
END
git apply --check "$PATCH/patcher.diff"
```

## 2. Keep what is installed

```bash
SPEC="importlib.util.find_spec('tensorrt_llm').submodule_search_locations[0]"
LIBS=$(cd / && python3 -c "import importlib.util; print($SPEC)")/libs
mkdir -p "$PATCH/original"
cp -a "$LIBS"/lib*.so "$PATCH/original/"
(cd "$PATCH/original" && sha256sum lib*.so > SHA256SUMS)
```

## 3. Apply and build

```bash
git apply "$PATCH/patcher.diff"
sha256sum --check <<'END'
{after}
END
python3 scripts/build_wheel.py --cuda_architectures "{architecture}"
```

Build the version that is installed: a library of another version does not load, or it loads and
gives wrong results.

## 4. Put the rebuilt libraries in

```bash
BUILT=tensorrt_llm/libs
for name in $(cd "$PATCH/original" && ls lib*.so); do
    if test -f "$BUILT/$name"; then cp "$BUILT/$name" "$LIBS/$name"; fi
done
(cd "$LIBS" && sha256sum lib*.so) > "$PATCH/REBUILT_SHA256SUMS"
python3 -c "import tensorrt_llm; print(tensorrt_llm.__version__)"
```

A profile of a run must now show the new kernel's name and not the old one, since a compiled-in
kernel writes no receipts.

## 5. Take it out

```bash
(cd "$PATCH/original" && sha256sum --check SHA256SUMS) && cp -a "$PATCH/original"/lib*.so "$LIBS/"
(cd "$LIBS" && sha256sum --check "$PATCH/original/SHA256SUMS")
git apply -R "$PATCH/patcher.diff"
sha256sum --check <<'END'
{before}
END
```
"""
