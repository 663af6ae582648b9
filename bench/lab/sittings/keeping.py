"""Unfinished loops as one file, to be gone on with elsewhere: what they asked, were answered and
were told, and the commit of their code; no code, packages or caches."""

from __future__ import annotations

import tempfile
from pathlib import Path

from patcher.bench import UsageError, VerificationError
from patcher.bench.lab.sittings.frozen import (
    CHANGED,
    COMMITS,
    commit_here,
    commit_of,
    freeze,
    full_commit,
)
from patcher.bench.lab.sittings.loops import LoopFolder
from patcher.bench.lab.sittings.travel import compress, extract

KEPT = (COMMITS, "patcher.toml", "imported", "runs", "prompts", "exchange", "sittings")
LEFT_OUT = ("exchange/claims", "*.owner", "*.pyc")


def keep(loops: LoopFolder, file: Path) -> int:
    """Pack the state of the loops; returns the file's bytes.

    Raises:
        UsageError: there are no loops, or nobody wrote down of which commit their code is.
    """
    if not loops.names():
        raise UsageError(f"no loops in {loops.root}", "start some, or give another folder")
    commit_of(loops.root)
    names = [name for name in KEPT if (loops.root / name).exists()]
    file.parent.mkdir(parents=True, exist_ok=True)
    left_out = (f"--exclude={each}" for each in LEFT_OUT)
    files = ("--dereference", "--hard-dereference")  # `restore` takes no links
    compress(file.absolute(), loops.root, names, *files, *left_out, level="-9e")
    return file.stat().st_size


def restore(file: Path, loops: LoopFolder, same_code: bool = False) -> str | None:
    """Unpack kept loops into a new folder, with code to go on with.

    Args:
        same_code: take that of the commit that they were kept with; else this checkout's.

    Returns:
        What is to be known where the code is another one; None: it is the same.

    Raises:
        UsageError: the folder is not empty, or the commit is not in this checkout.
        VerificationError: the file is damaged, or no kept loops.
    """
    root = loops.root
    if root.exists() and not (root.is_dir() and not any(root.iterdir())):
        raise UsageError(f"{root} is not empty", "name a new folder")
    here = commit_here()
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}-") as scratch:
        made = Path(scratch, root.name)
        made.mkdir()
        extract(file, made)
        if not (made / COMMITS).is_file():
            raise VerificationError(f"{file} holds no kept loops", "give what `keep` made")
        # such as code, which would run in place of this checkout's
        if strange := sorted(path.name for path in made.iterdir() if path.name not in KEPT):
            raise VerificationError(
                f"{file} holds {', '.join(strange)}, which are not kept", "give what `keep` made"
            )
        kept = commit_of(made)
        freeze(made, loops.say, full_commit(kept.removesuffix(CHANGED)) if same_code else None)
        made.replace(root)
    if kept.endswith(CHANGED) and same_code:
        return f"the code that they were kept with had changes that no commit has: {kept}"
    if same_code or (kept == here and not kept.endswith(CHANGED)):
        return None
    return (
        f"these loops were kept with the code of commit {kept}, and go on with that of {here}: "
        "prompts, checks and baselines may differ from those before. For the same code, restore "
        "them into a new folder with --same-code"
    )
