"""The folder that a coding agent works in: laid out once, and held against its digests whenever it
is used.
"""

from __future__ import annotations

import ast
import hashlib
import secrets
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import ValidationError

from patcher.bench import (
    SCHEMA_VERSION,
    Candidate,
    Language,
    Op,
    Record,
    UsageError,
    VerificationError,
    load_op,
)
from patcher.bench.judge import TripwirePolicy
from patcher.bench.toolchains import cache_root, toolchain
from patcher.judges.languages import judge_device_kind, judge_hardware
from patcher.judges.reward import AGAINST
from patcher.prompting.rendering import Prompts
from patcher.workspace.ledger import Ledger, Stage

MANIFEST = "workspace.json"
_MOST_BYTES = 1 << 20


class Workspace(Record):
    """`workspace.json`: what is judged, how, and the digests of all that an agent must not edit."""

    schema_version: int = SCHEMA_VERSION
    id: str
    op: str
    op_digest: str
    language: Language
    file: str
    """Of the candidate."""
    device: Literal["cpu", "cuda"]
    sweep: str
    threads: int | None
    judge: str
    policy: TripwirePolicy
    """What the judge bans, requires and ignores in a source; settings found later do not count."""
    protected: dict[str, str]
    """File to sha256."""


@dataclass(frozen=True)
class OpenWorkspace:
    """A workspace whose files are as they were laid out."""

    folder: Path
    workspace: Workspace
    ledger: Ledger

    def candidate(self) -> Candidate:
        """The candidate as it is now.

        Raises:
            UsageError: it is not a regular file of text, or too long.
        """
        path = self.folder / self.workspace.file
        if path.is_symlink() or (path.is_file() and path.stat().st_size > _MOST_BYTES):
            raise UsageError(
                f"{path.name} is a link, or is longer than {_MOST_BYTES:,} bytes",
                "write the source into a plain file",
            )
        return Candidate.from_file(self.workspace.op, path, self.workspace.language)


def lay_out(
    op: Op,
    folder: Path,
    language: Language,
    *,
    sweep: str | None = None,
    threads: int | None = None,
    judge: str = "local",
    policy: TripwirePolicy | None = None,
) -> OpenWorkspace:
    """Make the workspace.

    Raises:
        UsageError: the folder holds something, the op has no such sweep, or the language is only
            compiled here.
    """
    if language.compile_only:
        raise UsageError(
            f"a {language} kernel is only compiled here: a judge cannot say what it is worth",
            "choose another --language",
        )
    device = judge_device_kind(judge, language)
    timed = op.sweep(device, sweep)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty", "give a new folder")
    missing = {name: "the op has none" for name in AGAINST if name not in op.baselines}
    against = [name for name in AGAINST if name not in missing]
    file = Candidate(op=op.name, language=language, source="").file_name
    right = language is Language.TORCH
    skill = Prompts(op, language, judge_hardware(judge, language, threads), timed).skill(
        file=file,
        against=against,
        missing=missing,
        beginning="right and slow as it is" if right else "an example for another op as it is",
    )
    files = {
        "SKILL.md": skill,
        **{name: (op.folder / name).read_text("utf-8") for name in ("op.toml", "reference.py")},
        **{stage: _script(stage) for stage in get_args(Stage)},
    }
    workspace = Workspace(
        id=secrets.token_hex(8),
        op=op.name,
        op_digest=op.digest,
        language=language,
        file=file,
        device=device,
        sweep=timed.name,
        threads=threads,
        judge=judge,
        policy=policy or TripwirePolicy(),
        protected={name: _sha256(text.encode()) for name, text in files.items()},
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**files, MANIFEST: workspace.model_dump_json(indent=1) + "\n"}.items():
            path = folder / name
            path.write_text(text, encoding="utf-8")
            path.chmod(0o555 if name in get_args(Stage) else 0o444)
        (folder / file).write_text(starting_point(op, language), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {folder}: {error.strerror}", "give another folder"
        ) from None
    ledger, _ = _ledger(folder)
    ledger.begin()
    return OpenWorkspace(folder, workspace, ledger)


def open_workspace(folder: Path) -> OpenWorkspace:
    """A workspace that nothing was done to but what may be.

    Raises:
        UsageError: it is not a workspace.
        VerificationError: a protected file was changed (which one), or this machine's op.
    """
    try:
        ledger, copy = _ledger(folder)
        workspace = Workspace.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(
            f"{folder} is not a workspace", "lay one out: patcher workspace OP DIR"
        ) from error
    again = "lay out a new workspace, and take your kernel with you"
    if not copy.is_file():
        raise VerificationError(
            f"{MANIFEST} was changed, or was laid out on another machine (or PATCHER_CACHE)", again
        )
    changed = [
        name
        for name, digest in workspace.protected.items()
        if not (folder / name).is_file() or _sha256((folder / name).read_bytes()) != digest
    ]
    if changed:
        raise VerificationError(
            f"protected files were changed or are missing: {', '.join(changed)}",
            f"restore {'it' if len(changed) == 1 else 'them'}, or {again}",
        )
    if load_op(workspace.op).digest != workspace.op_digest:
        raise VerificationError(f"the library's op {workspace.op} has changed since", again)
    return OpenWorkspace(folder, workspace, ledger)


def _ledger(folder: Path) -> tuple[Ledger, Path]:
    """Named by the digest of `workspace.json`: one that was edited has none."""
    genesis = _sha256((folder / MANIFEST).read_bytes())
    copy = cache_root() / "workspaces" / f"{genesis}.jsonl"
    return Ledger(copy, folder / "results.jsonl", genesis), copy


def _script(stage: str) -> str:
    python = shlex.quote(sys.executable)
    folder = '"$(dirname -- "$0")"'
    return f'#!/bin/sh\nexec {python} -P -m patcher attempt {folder} {stage} "$@"\n'


def starting_point(op: Op, language: Language) -> str:
    """In PyTorch a right and slow candidate: the reference, and its values copied to where they
    belong. Else the toolchain's example, a whole source for another op.
    """
    if language is not Language.TORCH:
        return toolchain(language).example
    tree = ast.parse((op.folder / "reference.py").read_text(encoding="utf-8"))
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.FunctionDef) and node.name == "control")
    ]
    partly = any(isinstance(node, ast.FunctionDef) and node.name == "kept" for node in tree.body)
    contract = op.contract
    names = [*(each.name for each in contract.tensors), *(each.name for each in contract.scalars)]
    given = ", ".join(f"{name}={name}" for name in names)
    lines = [
        f"def {op.name}({', '.join(names)}):",
        f"    stays = {f'kept({given})' if partly else '{}'}",
        f"    for name, value in reference({given}).items():",
        f"        tensor = {{{', '.join(f'{name!r}: {name}' for name in names)}}}[name]",
        "        value = value.to(tensor.dtype)",
        "        if name in stays:",
        "            value = torch.where(stays[name], tensor, value)",
        "        tensor.copy_(value)",
    ]
    return ast.unparse(tree) + "\n\n\n" + "\n".join(lines) + "\n"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
