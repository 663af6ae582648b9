"""`patcher apply`, `revert`, `patches`, `verify`, `receipts`: patches in an environment."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from patcher.bench import SCHEMA_VERSION, UsageError, VerificationError, presets
from patcher.commands.console import Json, Output, app, examples
from patcher.integrate import (
    FitReport,
    Patch,
    Receipt,
    Switches,
    home_store,
    idle_patches,
    open_bundle,
    read_receipts,
    unpacked,
    verify,
)
from patcher.visible import visible

if TYPE_CHECKING:
    from patcher.reconciling.proof import Proof

HOW_TO_RUN = {
    "transformers": 'call integrate.activate("transformers", model) once the model is built',
    "vllm": "run `vllm serve` or `vllm bench` as ever: every process loads the plugin",
    "sglang": "run `python -m sglang.launch_server` as ever: every process loads the plugin",
    "tensorrt_llm": (
        "spell them TLLM_PATCHER_*, since only such names reach the workers, and run "
        "`trtllm-bench` or `trtllm-serve` with --custom_module_dirs"
    ),
}


@app.command()
@examples("patcher patches", "PATCHER_PATCHES=on patcher patches --json")
def patches(as_json: Json = False) -> int:
    """List the applied patches: enabled or not, whether they fit, and their speedup."""
    from patcher.patch_findings import vllm_plugin
    from patcher.show.listing import listed
    from patcher.show.patches import patches_table

    found, plugin = listed(home_store(), Switches.read()), vllm_plugin()
    warnings = [plugin.detail] if plugin.status != "ok" else []
    document = {
        "schema_version": SCHEMA_VERSION,
        "patches": [one.model_dump(mode="json") for one in found],
        "warnings": warnings,
    }
    shown: list[object] = [patches_table(found)]
    if found and not any(one.on for one in found):
        shown.append(Text("none is on here: set PATCHER_PATCHES=on", style="dim"))
    shown += [Text(f"{line}: {plugin.fix}", style="red") for line in warnings]
    Output(as_json).emit(document, *shown)
    return 0


@app.command()
@examples(
    "patcher apply patcher-runs/RUN/patch --dry-run",
    "patcher apply norm-patch.zip --yes",
)
def apply(
    patch: Annotated[Path, typer.Argument(help="A patch bundle: a folder or a .zip file.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Verify only.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> int:
    """Verify a patch against this environment and install it for its engine.

    Processes run it when their environment sets PATCHER_PATCHES=on, or to the id of the patch.
    """
    with unpacked(patch) as folder:
        bundle = Patch.load(folder)
        bundle.verify_target()
        manifest, digest = bundle.manifest, bundle.digest
        lower = {one.lower_grade: one.grade_reason for one in bundle.evaluations}
        if not dry_run:
            if not yes:
                if not sys.stdin.isatty():
                    raise UsageError(
                        "there is no terminal to ask on", "say --yes, or --dry-run to look only"
                    )
                typer.confirm(f"apply {manifest.id}?", abort=True)
            home_store().apply(folder)
    engine = manifest.target.engine
    how = f"PATCHER_PATCHES=on switches it on; {HOW_TO_RUN.get(engine, f'run {engine}')}"
    document = {"id": manifest.id, "digest": digest, "applied": not dry_run, "enable": how}
    graded = []
    for grade, reason in lower.items():
        if grade:
            document["grade"] = f"{grade}: {reason}"
            graded.append(Text(visible(f"{manifest.id} was {grade}: {reason}")))
    if dry_run:
        Output(as_json).emit(document, Text(f"{manifest.id} fits this environment"), *graded)
        return 0
    Output(as_json).emit(
        document,
        Text(f"{manifest.id} is applied for {engine}"),
        *graded,
        Text(how),
        Text(f"PATCHER_RECEIPTS=DIR keeps count; patcher revert {manifest.id} takes it out"),
    )
    return 0


@app.command()
@examples("patcher revert PATCH-ID")
def revert(
    patch: Annotated[str, typer.Argument(help="A patch's id (see `patcher patches`).")],
    as_json: Json = False,
) -> int:
    """Remove an applied patch. Running it twice does no harm.

    Processes that are running keep the patch until they end.
    """
    was_on = home_store().revert(patch)
    word = "was taken out: processes that start now run without it" if was_on else "was not applied"
    Output(as_json).emit({"id": patch, "reverted": was_on}, Text(f"{patch} {word}"))
    return 0


@app.command("verify")
@examples(
    "patcher verify norm-patch",
    "patcher verify norm-patch.zip --json",
    "patcher verify ID --model gpt-oss-20b",
)
def verify_command(
    patch: Annotated[
        str, typer.Argument(metavar="PATCH", help="A bundle, or the id of an applied patch.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Also check a model: preset, Hugging Face id, folder or config.json.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Check, item by item, whether a patch fits this environment.

    Checks digests, evidence, the version range, the code that it replaces, the device and the
    kernel; with `--model`, which layers of that model the patch takes, and where the engine's code
    tells it, how often a step of decode calls them. Exit code 5: it does not fit, and what differs;
    3: something that it needs is missing.
    """
    from patcher.bench.engines.architecture import full_config, published_config
    from patcher.show.patches import verified_lines

    # of a preset no more is asked: transformers takes a second
    read = published_config if model in presets() else full_config
    with open_bundle(patch) as bundle:
        found = verify(bundle, read(model) if model is not None else None)
    failure = found.failure
    Output(as_json).emit(_document(found), *verified_lines(found))
    return failure.exit_code if failure else 0


@app.command()
@examples(
    "patcher receipts receipts",
    "patcher receipts receipts --profile decode.sqlite --model gpt-oss-20b",
    "patcher receipts receipts --profile patched.sqlite --before stock.sqlite --patch norm.zip",
)
def receipts(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder that PATCHER_RECEIPTS named.")
    ],
    profile: Annotated[
        Path | None,
        typer.Option(help="A profile of the same run, which must agree with the receipts."),
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(help="A profile without the patch, which shows the replaced kernels."),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="The profile covers everything that the receipts count.")
    ] = False,
    patch: Annotated[
        str | None, typer.Option(help="The patch; default: the applied patch of that id.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A preset, for its number of layers.")] = None,
    as_json: Json = False,
) -> int:
    """Show what ran in each process: calls, calls in CUDA graphs, fallbacks, failures.

    Exit code 5: a patch failed to load or never ran, or a profile contradicts the receipts.
    """
    from patcher.show.patches import proof_lines, receipts_table, shapes_table

    if before is not None and profile is None:
        raise UsageError("--before goes with --profile", "name the patched run's profile, too")
    found = _receipts(folder)
    proofs: list[Proof] = []
    if profile is not None:
        from patcher.hotspot import read
        from patcher.hotspot.read import UNNAMED
        from patcher.reconciling.proof import prove

        seen = read(profile, model or UNNAMED)
        stock = read(before, model or UNNAMED) if before else None
        names = dict.fromkeys(patch or one.patch_id for one in found)
        with ExitStack() as stack:
            bundles = [stack.enter_context(open_bundle(name)) for name in names]
            proofs += [
                prove(found, seen, one, before=stock, whole=whole, together=bundles)
                for one in bundles
            ]
    problems = _problems(found)
    document = {
        "schema_version": SCHEMA_VERSION,
        "receipts": [one.model_dump(mode="json") for one in found],
        "problems": problems,
        "proofs": [{**proof.model_dump(mode="json"), "passed": proof.passed} for proof in proofs],
    }
    shown: list[object] = [receipts_table(found), shapes_table(found)]
    for proof in proofs:
        shown += proof_lines(proof)
    Output(as_json).emit(document, *shown, *(Text(line, style="red") for line in problems))
    return 5 if problems or not all(proof.passed for proof in proofs) else 0


def _document(found: FitReport) -> dict[str, object]:
    """With the error that the exit code stands for, as every command gives it."""
    document: dict[str, object] = {**found.model_dump(mode="json"), "fits": found.failure is None}
    if failure := found.failure:
        kind = "missing" if failure.exit_code == 3 else "verification"
        document["error"] = {"kind": kind, "message": failure.detail, "hint": failure.hint}
    return document


def _receipts(folder: Path) -> list[Receipt]:
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder", "give the folder that PATCHER_RECEIPTS named")
    found = read_receipts(folder)
    if not found:
        raise VerificationError(
            f"no process left a receipt in {folder}: the engine ran unpatched",
            "set PATCHER_PATCHES=on and PATCHER_RECEIPTS for the engine; see `patcher patches`",
        )
    return found


def _problems(found: list[Receipt]) -> list[str]:
    """A process without calls is no problem (an engine has some), a patch without any is."""
    problems = [
        f"{one.patch_id} in process {one.pid}: {one.failure}" for one in found if one.failure
    ]
    problems += [
        f"{name} never ran in any process{f': {why}' if why else ''}"
        for name, why in idle_patches(found).items()
    ]
    return problems
