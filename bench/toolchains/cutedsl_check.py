"""Compile a CuTe DSL candidate without a GPU; the build runs this file by itself, sandboxed.

The entry is called on tensors without data. `cute.compile` runs completely, down to machine code,
and its result is replaced by a function that launches nothing. Exit code 1: a kernel does not
compile, or the file cannot be imported. If host code needs a GPU before it compiles, that case is
reported as unchecked.

    python cutedsl_check.py CANDIDATE ENTRY    (cases.json is beside it)
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import traceback
from pathlib import Path
from typing import Any

compiled: list[str] = []
failed: list[str] = []


def main(file: str, entry: str) -> int:
    try:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        kind = type(importlib.import_module("cutlass.cute").compile)
        kind.__call__ = checked(kind.__call__)
    except Exception as error:  # not the candidate's fault; the runner decides
        print(f"not checked: this CuTe DSL cannot be watched: {type(error).__name__}: {error}")
        return 0
    try:
        spec = importlib.util.spec_from_file_location("candidate", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = getattr(module, entry)
    except Exception:
        print(traceback.format_exc(limit=-3))
        return 1
    for case in json.loads(Path("cases.json").read_text(encoding="utf-8")):
        try:
            with FakeTensorMode():
                tensors = [
                    torch.empty(each["shape"], dtype=getattr(torch, each["dtype"]), device="cuda")
                    for each in case["tensors"]
                ]
                function(*tensors, *case["scalars"])
        except Exception as error:
            if not failed:
                said = f"{type(error).__name__}: {error}"
                print(f"not checked without a GPU: {case['label']}: {said[:500]}")
        if failed:
            print(f"at {case['label']}:\n{failed[0]}")
            return 1
    print(f"compiled {len(compiled)} kernel functions: {', '.join(dict.fromkeys(compiled))}")
    return 0


def checked(compile_: Any) -> Any:
    """`cute.compile` with a record of its compilations; its results launch nothing."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            compile_(self, *args, **options)
        except Exception:
            failed.append(traceback.format_exc(limit=-3))
            raise
        compiled.append(getattr(args[0], "__name__", "kernel") if args else "kernel")
        return lambda *_args, **_options: None

    return call


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
