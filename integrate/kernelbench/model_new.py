"""A `ModelNew` file as a candidate of an imported op, and a candidate as a `ModelNew` file.

Nothing is run here: both directions write text around a text. The judge runs a candidate in its
sandbox; a `ModelNew` file is for KernelBench's own check.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import ValidationError

from patcher.bench import (
    Candidate,
    Contract,
    Language,
    TensorSpec,
    UsageError,
    load_op,
    read_source,
)
from patcher.bench.toolchains.native import binds_with_torch
from patcher.integrate.formats.foreign_contract import Refused
from patcher.integrate.kernelbench.problem import (
    defined_names,
    is_model_new,
    is_problem,
    literal,
    shown,
)
from patcher.integrate.kernelbench.records import RECORD, ProblemRecord
from patcher.integrate.kernelbench.results import form_of, is_flat, packed, unpacked
from patcher.integrate.kernelbench.sol_execbench import SOL
from patcher.integrate.kernelbench.texts import AnswerFile, joined, written_file

ENTRY = '''

def _patcher_places(made=[]):
    """The module, built once, and where it keeps what each call brings: by name, else in order."""
    if made:
        return made
    module = ModelNew({init})
    own = {{
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }}
    places = {state!r}
    if any(place not in own for place in places.values()):
        learned = [(name, tuple(each.shape) or (1,)) for name, each in module.named_parameters()]
        given = {parameters!r}
        if [shape for _, shape in learned] != list(given.values()):
            raise RuntimeError("ModelNew has other parameters than Model")
        places |= dict(zip(given, (name for name, _ in learned)))
    found = []
    for name, place in places.items():
        owner, _, leaf = place.rpartition(".")
        owner = module.get_submodule(owner)
        table = owner._parameters if leaf in owner._parameters else owner._buffers
        if leaf not in table:
            raise RuntimeError(f"ModelNew has no {{place}}")
        value, shape = table[leaf], tuple(table[leaf].shape)
        for each in module.modules():  # some share it
            for table in (each._parameters, each._buffers):
                found += [(table, key, name, shape) for key in table if table[key] is value]
    made += [module, found]
    return made


def {op}({names}):
    _module, _places = _patcher_places()
    _state = {{{bound}}}
    for _table, _leaf, _name, _shape in _places:
        _table[_leaf] = _state[_name] if _shape else _state[_name].reshape(())
    _values = _module({given})
    _values = {values}
    for _out, _value in zip(({written},), _values, strict=True):
        if _value.numel() != _out.numel():
            raise RuntimeError(
                f"ModelNew gives {{list(_value.shape)}}, not {{list(_out.shape)}}"
            )
        _out.copy_(_value.reshape(_out.shape))
'''

MODEL_NEW = '''"""{op} of patcher as a ModelNew of KernelBench's {file}."""
{text}


class ModelNew(_problem()):
    """The parameters of `Model`, and a kernel for its forward."""

    def forward(self, {arguments}):
        _state = {{
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }}
        _sizes = {{{sizes}}}
        {outputs} = ({made},)
        with torch.no_grad():
            {call}({names})
        return {returned}
'''

CONSTANT = (
    "torch.frombuffer(bytearray(__import__('zlib').decompress(__import__('base64')"
    ".b64decode({table!r}))), dtype=torch.{dtype}).reshape({shape}).to({first}.device)"
)
_NUMBER = ".reshape(1)"
"""A contract's tensors have an axis, a parameter of one number may have none."""
INLINE = """from torch.utils.cpp_extension import load_inline as _load_inline

_patcher_kernel = _load_inline(
    name="patcher_{op}",
    cpp_sources={cpp!r},
    cuda_sources={cuda!r},
    functions=["{op}"],
    extra_cflags=["-O3", "-fopenmp", "-std=c++17"],
    extra_cuda_cflags=["-O3"],
)
"""
LOADED = {
    "tvm-ffi": 'import tvm_ffi\n\n_patcher_kernel = tvm_ffi.load_module("./kernel.so")',
    "torch": """import importlib.machinery, importlib.util
import torch

_loader = importlib.machinery.ExtensionFileLoader("candidate", "./kernel.so")
_spec = importlib.util.spec_from_file_location("candidate", "./kernel.so", loader=_loader)
_patcher_kernel = importlib.util.module_from_spec(_spec)
_loader.exec_module(_patcher_kernel)""",
}


class ModelNewFile(AnswerFile):
    """The result of an export to KernelBench."""

    file: str
    """The problem that it answers."""


def write_model_new(op: str, source: Path, problem: Path, out: Path) -> ModelNewFile:
    """Write a candidate as a `ModelNew` file; see `model_new`.

    Raises:
        UsageError: see `model_new`; or a file exists where one would be written.
    """
    candidate = Candidate.from_file(op, source)
    text = model_new(candidate, problem)
    written_file(out, text)
    return ModelNewFile(path=str(out), op=op, file=shown(problem), digest=candidate.digest)


def source_text(path: Path) -> str:
    """The text of a Python file.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return read_source(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}", "give the path of a Python file") from error


def record_of(op: str) -> tuple[Contract, ProblemRecord]:
    """The contract and the problem's record of an imported op.

    Raises:
        UsageError: the op comes from no KernelBench problem.
    """
    found = load_op(op)
    path = found.folder / RECORD
    try:
        return found.contract, ProblemRecord.model_validate_json(path.read_bytes())
    except OSError:
        raise UsageError(
            f"{op} was imported from no KernelBench problem",
            "name an op that `patcher import` made",
        ) from None
    except ValidationError as error:
        raise UsageError(f"{path} is damaged", "import the problem again") from error


def candidate_of(op: str, text: str) -> Candidate:
    """A `ModelNew` file as a candidate: its own text, and the op's entry around the module.

    Raises:
        UsageError: it defines no `ModelNew`, or the op comes from no problem.
    """
    contract, record = record_of(op)
    if not is_model_new(text):
        raise UsageError("the file defines no class ModelNew", "give a candidate of KernelBench")
    try:
        init = [literal(each) for each in record.init]
        init += [f"{name}={literal(each)}" for name, each in record.keywords.items()]
        given = [
            str(each["tensor"]) if "tensor" in each else literal(each["value"])
            for each in record.arguments
        ]
        form = form_of(record.result, len(contract.written))
        packed(form, [each.name for each in contract.written])
        # who gives a list for a tuple, or a tensor for a tuple of one, is understood
        values = "_values if isinstance(_values, (tuple, list)) else (_values,)"
        if not is_flat(form):
            values = f"({', '.join(unpacked(form, '_values'))},)"
    except Refused as reason:
        raise UsageError(f"{RECORD} of {op} is damaged: {reason}", "import it again") from reason
    shapes = {each.name: tuple(map(int, each.shape)) for each in contract.tensors if each.constant}
    parameters = {each: shapes[each] for each in record.parameters}
    entry = ENTRY.format(
        op=op,
        init=", ".join(init),
        state=record.state,
        parameters=parameters,
        names=", ".join(each.name for each in contract.tensors),
        bound=", ".join(f"{name!r}: {name}" for name in record.state),
        given=", ".join(given),
        values=values,
        written=", ".join(each.name for each in contract.written),
    )
    if op in defined_names(text):  # a file that `model_new` wrote: its kernel has the entry's name
        text = re.sub(rf"\b{op}\b", f"_{op}", text)
    triton = re.search(r"^\s*(?:import|from) triton\b", text, re.MULTILINE)
    language = Language.TRITON if triton else Language.TORCH
    return Candidate(op=op, language=language, source=text.rstrip("\n") + "\n" + entry)


def model_new(candidate: Candidate, problem: Path, binding: str | None = None) -> str:
    """A candidate of an imported op as a `ModelNew` file.

    It holds the problem's own text, so that its parameters are drawn as `Model` draws them.

    Args:
        candidate: in PyTorch, Triton, or C++ or CUDA C++ that includes PyTorch's headers.
        problem: the file that the op was imported from.
        binding: of a build of the candidate (`Built.binding`), which the text loads from
            `./kernel.so` in place of its source: for a check on this machine.

    Raises:
        UsageError: the language has no form there, or the problem is another file.
    """
    contract, record = record_of(candidate.op)
    text = source_text(problem)
    if contract.source.startswith(SOL):
        raise UsageError(f"{SOL} has no ModelNew", "export it --to sol-execbench")
    if shown(problem) != record.file or not is_problem(text):
        raise UsageError(
            f"{candidate.op} was imported from {record.file}, not from {problem.name}",
            "give that file with --problem",
        )
    call, source = candidate.op, candidate.source
    if binding in LOADED:
        source, call = LOADED[binding], f"_patcher_kernel.{candidate.op}"
    elif candidate.language in (Language.CPP, Language.CUDA):
        if not binds_with_torch(candidate.source):
            raise UsageError(
                "KernelBench builds C++ and CUDA with PyTorch's headers, and this source has none",
                "export a kernel that includes <torch/extension.h>",
            )
        cuda = candidate.language is Language.CUDA
        head = _declaration(candidate) if cuda else candidate.source
        source = INLINE.format(op=candidate.op, cpp=head, cuda=candidate.source if cuda else "")
        call = f"_patcher_kernel.{candidate.op}"
    elif not candidate.language.in_python:
        raise UsageError(
            f"KernelBench has no form for a {candidate.language} kernel",
            "export one in Python, Triton, C++ or CUDA C++",
        )
    arguments = [
        str(each["tensor"]) if "tensor" in each else f"constant_{index}"
        for index, each in enumerate(record.arguments)
    ]
    first = next(each.name for each in contract.tensors if each.name in arguments)

    def constant(tensor: TensorSpec) -> str:
        shape = f"({', '.join(tensor.shape)},)"
        table = record.constants[tensor.name]
        return CONSTANT.format(table=table, dtype=tensor.dtype, shape=shape, first=first)

    names = [
        f"_state[{record.state[each.name]!r}].detach(){_NUMBER if each.shape == ('1',) else ''}"
        if each.name in record.state
        else constant(each)
        if each.name in record.constants
        else f"{each.name}.contiguous(){_NUMBER if each.shape == ('1',) else ''}"
        if each.access == "read"
        else each.name
        for each in contract.tensors
    ]
    axes = {
        size: f"{each.name}.shape[{index}]"
        for each in reversed(contract.tensors)
        if each.name in arguments
        for index, size in enumerate(each.shape)
        if size.isidentifier()
    }
    made = [
        f"torch.empty({_shape(each.shape)}, dtype=torch.{each.dtype}, device={first}.device)"
        for each in contract.written
    ]
    outputs = [each.name for each in contract.written]
    shaped = [f"{each}.reshape(())" if each in record.scalars else each for each in outputs]
    try:
        returned = packed(form_of(record.result, len(outputs)), shaped)
    except Refused as reason:
        said = f"{RECORD} of {candidate.op} is damaged: {reason}"
        raise UsageError(said, "import it again") from reason
    return MODEL_NEW.format(
        op=candidate.op,
        file=record.file,
        text=joined(source, text),
        arguments=", ".join(arguments),
        sizes=", ".join(f"{name!r}: {value}" for name, value in axes.items()),
        outputs=f"({', '.join(outputs)},)",
        made=", ".join(made),
        call=call,
        names=", ".join(names),
        returned=returned,
    )


def _declaration(candidate: Candidate) -> str:
    """The entry's declaration, as `load_inline` wants it beside a CUDA source."""
    match = re.search(rf"\bvoid\s+{candidate.op}\s*\([^)]*\)", candidate.source)
    if match is None:
        raise UsageError(f"the source has no plain `void {candidate.op}(...)`", "rewrite its entry")
    return f"#include <torch/extension.h>\n{match[0]};\n"


def _shape(shape: tuple[str, ...]) -> str:
    sizes = [re.sub(r"[A-Za-z_]\w*", lambda match: f"_sizes[{match[0]!r}]", each) for each in shape]
    return f"({', '.join(sizes)},)" if sizes else "()"
