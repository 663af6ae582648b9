"""`patcher trtllm`: what a user of TensorRT-LLM needs beside `apply`: module, benchmark, diff."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import SCHEMA_VERSION, UsageError, problem, read_source
from patcher.commands.console import Json, Output, app, examples

trtllm = typer.Typer(
    help="TensorRT-LLM: patches into its workers, its benchmark, source diffs.",
    no_args_is_help=True,
)
app.add_typer(trtllm, name="trtllm")


@trtllm.command()
@examples(
    "patcher trtllm module patched",
)
def module(
    folder: Annotated[Path, typer.Argument(help="Folder for the package.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel size (`--tp`).", min=1)] = 1,
    as_json: Json = False,
) -> int:
    """Write the package that loads applied patches in every worker.

    Pass its folder to trtllm-bench or trtllm-serve as --custom_module_dirs.
    """
    from patcher.integrate import write_module

    package = write_module(folder, tensor_parallel=tp)
    Output(as_json).emit(
        {"schema_version": SCHEMA_VERSION, "package": str(package)},
        Text(f"{package}: pass --custom_module_dirs {package}"),
        Text("TLLM_PATCHER_PATCHES=on switches patches on, TLLM_PATCHER_RECEIPTS=DIR counts"),
    )
    return 0


@trtllm.command()
@examples("patcher trtllm check receipts --tp 2")
def check(
    folder: Annotated[
        Path, typer.Argument(help="The folder that TLLM_PATCHER_RECEIPTS named in one run.")
    ],
    tp: Annotated[int, typer.Option(help="Tensor-parallel size of that run.", min=1)] = 1,
    as_json: Json = False,
) -> int:
    """Check that every worker ran every applied patch.

    Exit code 5 names the rank that did not.
    """
    from patcher.integrate import check_workers, home_store

    applied = [one for one in home_store().applied() if one.engine == "tensorrt_llm"]
    if not applied:
        raise UsageError("no patch is applied for TensorRT-LLM", "see `patcher patches`")
    calls = check_workers(folder, [one.digest for one in applied], tp)
    lines = [Text(f"rank {rank}: {count:,} calls") for rank, count in sorted(calls.items())]
    Output(as_json).emit({"schema_version": SCHEMA_VERSION, "calls_by_rank": calls}, *lines)
    return 0


@trtllm.command()
@examples("patcher trtllm diff moe_finalize TensorRT-LLM finalize.h --out finalize-patch")
def diff(
    kernel: Annotated[str, typer.Argument(help="moe_finalize or bias_rope_kv.")],
    tree: Annotated[Path, typer.Argument(help="A checkout of TensorRT-LLM.")],
    source: Annotated[Path, typer.Argument(help="C++ that defines `bool patcher_kernel::...`.")],
    out: Annotated[Path, typer.Option(help="Folder for the diff and its recipe.")],
    architecture: Annotated[
        str, typer.Option(help="CUDA architecture, as CMake spells it.")
    ] = "90-real",
    as_json: Json = False,
) -> int:
    """Make a source diff for a kernel that is launched in C++, with build and revert steps.

    The diff is for `git apply`; the checkout itself is not changed.
    """
    from patcher.integrate import SEAMS, make_diff, write_recipe

    if kernel not in SEAMS:
        raise UsageError(f"no patchable kernel {kernel!r}", f"there are: {', '.join(SEAMS)}")
    try:
        text = read_source(source)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {source}: {error}", "give a C++ source file") from error
    recipe = write_recipe(out, make_diff(tree, SEAMS[kernel], text), architecture)
    document = {"schema_version": SCHEMA_VERSION, "diff": str(out / "patcher.diff")}
    Output(as_json).emit({**document, "recipe": str(recipe)}, Text(f"{recipe} says what to do"))
    return 0


@trtllm.command()
@examples(
    "patcher trtllm bench openai/gpt-oss-20b run --vocab-size 201088 --requests 512 --dry-run",
    "patcher trtllm bench MODEL run --vocab-size 201088 --module patched/patcher_tensorrt_llm",
)
def bench(
    model: Annotated[str, typer.Argument(help="Hugging Face id.")],
    folder: Annotated[Path, typer.Argument(help="Folder for inputs, log and report.")],
    vocab_size: Annotated[
        int, typer.Option(help="Size of the vocabulary; prompts are random ids below it.")
    ],
    model_path: Annotated[Path | None, typer.Option(help="The model's folder.")] = None,
    requests: Annotated[int, typer.Option(help="Number of prompts.", min=1)] = 512,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 8,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.", min=1)] = 1024,
    output_len: Annotated[int, typer.Option(help="Output tokens per prompt.", min=2)] = 8192,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.", min=1)] = 1,
    module_folder: Annotated[
        list[Path] | None, typer.Option("--module", help="From `patcher trtllm module`.")
    ] = None,
    moe_backend: Annotated[str, typer.Option(help="AUTO, CUTLASS, TRTLLM or TRITON.")] = "AUTO",
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the inputs only.")] = False,
    as_json: Json = False,
) -> int:
    """Run `trtllm-bench throughput` with fixed lengths and unique prompts.

    Autotuning and reuse of the KV cache are off.
    """
    from pydantic import ValidationError

    from patcher.bench.engines.tensorrt_llm import Benchmark, command, run_benchmark, write_inputs

    try:
        run = Benchmark(
            model=model,
            model_path=model_path,
            vocab_size=vocab_size,
            requests=requests,
            concurrency=concurrency,
            input_len=input_len,
            output_tokens=output_len,
            tensor_parallel=tp,
            module_folders=tuple(module_folder or ()),
            moe_backend=moe_backend,  # type: ignore[arg-type]  # pydantic says what it may be
            seed=seed,
        )
    except ValidationError as error:
        raise UsageError(problem(error), "see: patcher trtllm --help") from error
    output = Output(as_json)
    if dry_run:
        write_inputs(run, folder)
        line = command(run, folder)
        document = {"schema_version": SCHEMA_VERSION, "command": line}
        output.emit(document, Text(" ".join(line)))
        return 0
    report = run_benchmark(run, folder)
    told = f"{report.output_tokens_per_s:,.1f} output tokens/s over {report.requests} requests"
    output.emit(report, Text(told))
    return 0
