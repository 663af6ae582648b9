"""The op folder of a traced problem: contract, reference, inputs, baselines, and its record."""

from __future__ import annotations

import re
import tomllib

import tomlkit

from patcher.bench import Contract, VerificationError
from patcher.integrate.kernelbench.columns import PrecisionColumn
from patcher.integrate.kernelbench.contract import NamedTensor, TracedOp
from patcher.integrate.kernelbench.problem import Problem, ProblemTrace
from patcher.integrate.kernelbench.records import RECORD, ProblemRecord
from patcher.integrate.kernelbench.results import form_of, packed
from patcher.integrate.kernelbench.written import Body

OWN = ("normal", "signed")
PLANTED = ("nan", "inf")
"""Regimes of a module with one of `LOOSE`, besides `OWN`."""
LOOSE = ("conv", "group_norm", "batch_norm", "instance_norm")
"""Operators for which libraries differ in what a weight that is no number gives: padding may be
multiplied by it, and a norm may fold mean and gain into one factor and one shift."""


def op_files(
    problem: Problem, trace: ProblemTrace, op: TracedOp, precision: PrecisionColumn
) -> dict[str, bytes]:
    """Every file of the op folder, by path.

    Raises:
        Refused: its graph does more than compute.
    """
    contract = op.contract
    body = Body(trace, op.nodes, "number" if precision.kept else "none")
    as_run = Body(trace, op.nodes, "own") if precision.kept else body
    names = [each.name for each in contract.tensors]
    read = [each.name for each in op.tensors]
    written = tuple(each.name for each in contract.written)
    values = {
        "title": contract.name,
        "file": problem.file,
        "origin": problem.origin,
        "names": ", ".join(names),
        "read": ", ".join(read),
        "body": "\n    ".join([*body.lines, f"return ({', '.join(body.results)},)"]),
        "as_run": "\n    ".join([*as_run.lines, f"return ({', '.join(as_run.results)},)"]),
        "outputs": written,
        "bits": precision.bits,
        "said": precision.said,
        "called": (_KEPT if precision.kept else _CAST).format(read=", ".join(read)),
        "number": "float32" if precision.kept else precision.number,
        "tf32": precision.tf32,
        "tensors": _rows(op.tensors),
        "triangles": _triangles(op.tensors),
        "written": _writes(contract),
        "regimes": (
            *OWN,
            *(PLANTED if any(word in each for each in body.lines for word in LOOSE) else ()),
        ),
    }
    attends = any("scaled_dot_product_attention" in line for line in body.lines)
    values["attention"], values["returned"] = ATTENTION if attends else ("", RETURNED)
    packed(form_of(trace.result, len(written)), written)
    record = ProblemRecord(
        op=contract.name,
        file=problem.file,
        changed=problem.changed,
        init=trace.init,
        keywords=trace.keywords,
        arguments=tuple(op.arguments),
        state={
            each.name: each.target for each in op.tensors if each.kind in ("parameter", "buffer")
        },
        constants={each.name: each.table for each in op.tensors if each.kind == "constant"},
        parameters=tuple(each.name for each in op.tensors if each.kind == "parameter"),
        result=trace.result,
        scalars=tuple(
            name for name, each in zip(written, trace.outputs, strict=True) if not each.shape
        ),
    )
    document = contract.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    toml = tomlkit.dumps(document)
    if Contract.model_validate(tomllib.loads(toml)) != contract:
        raise VerificationError(f"the contract of {contract.name} cannot be written as TOML", "")
    files = {
        "op.toml": toml,
        "reference.py": REFERENCE.format(**values),
        "inputs.py": INPUTS.format(**values),
        "baselines.py": BASELINES.format(**values) + (TRUNCATED if precision.tf32 else ""),
        RECORD: record.model_dump_json(indent=1) + "\n",
    }
    return {f"{contract.name}/{name}": text.encode() for name, text in files.items()}


def _rows(tensors: list[NamedTensor]) -> str:
    rows = [
        f'"{each.name}": ({each.dtype!r}, {_sizes(each.shape)}, {each.kind!r}, {each.drawn!r}, '
        f"{each.low!r}, {each.high!r}, {each.table!r}),"
        for each in tensors
    ]
    return "\n        ".join(rows)


_TRIANGLES = {"triu": "triu()", "tril": "tril()", "triu1": "triu(1)", "tril1": "tril(-1)"}


def _triangles(tensors: list[NamedTensor]) -> str:
    rows = [
        f'    tensors["{each.name}"] = tensors["{each.name}"].{_TRIANGLES[each.triangle]}\n'
        for each in tensors
        if each.triangle
    ]
    return "".join(rows)


def _writes(contract: Contract) -> str:
    rows = [f'"{each.name}": ({each.dtype!r}, {_sizes(each.shape)}),' for each in contract.written]
    return "\n        ".join(rows)


def _sizes(shape: tuple[str, ...]) -> str:
    """A shape as Python over the axes `a`."""
    sizes = [re.sub(r"[A-Za-z_]\w*", lambda match: f'a["{match[0]}"]', each) for each in shape]
    return f"({', '.join(sizes)},)" if sizes else "()"


RETURNED = "return module(*given, number)"
ATTENTION = (
    "from torch.nn.attention import SDPBackend, sdpa_kernel\n",
    "with sdpa_kernel(SDPBackend.MATH):  # by its formula: the CPU's fused kernel makes NaN zeros\n"
    f"            {RETURNED}",
)
"""What a reference with attention has."""

REFERENCE = '''"""{title}: its graph in float64, and the control that must fail.

Written from a trace of {origin}'s {file}, of whose text nothing is here.
"""

import torch
{attention}
aten = torch.ops.aten
OUTPUTS = {outputs!r}


def module({read}, number):
    """The module's results; its numbers are of the dtype `number`."""
    {body}


def in_numbers(tensors, number):
    """The results with every floating-point tensor in another dtype."""
    given = [each.to(number) if each.is_floating_point() else each for each in tensors]
    before = torch.get_default_dtype()
    torch.set_default_dtype(number)  # of numbers that the graph makes, alone or of integers
    try:
        {returned}
    finally:
        torch.set_default_dtype(before)


def reference({names}):
    """The module in float64; whole numbers come as float64, too."""
    values = [each.double() for each in in_numbers(({read},), torch.float64)]
    return dict(zip(OUTPUTS, values, strict=True))


def control({names}):
    """The module on numbers of {bits} bits, with results of as few: less than {said}."""
    given = [_coarser(each) if each.is_floating_point() else each for each in ({read},)]
    values = [_planted(each) for each in in_numbers(given, torch.float32)]
    return dict(zip(OUTPUTS, values, strict=True))


def _planted(value):
    return _coarser(value) if value.is_floating_point() else value + 1


def _coarser(value):
    mantissa, exponent = torch.frexp(value.double())
    return torch.ldexp(torch.round(mantissa * 2**{bits}) / 2**{bits}, exponent).to(value.dtype)
'''

INPUTS = '''"""Seeded inputs of {title}, and weights that no kernel can guess.

`normal` has the distributions that the problem's file draws from; a weight that is one number in
the file (a norm's gain of 1) varies around it. `signed` has standard normal inputs, since many
files draw from 0 to 1 only. The judge's own regimes come on top. A module with a convolution or a
norm over groups or a batch has `nan` and `inf` in its inputs alone: libraries differ in whether
padding is multiplied by a weight, and in whether a norm's gain multiplies the mean by itself.
"""

import base64
import math
import zlib

import torch

REGIMES = {regimes}
_PLANTED = {{"nan": math.nan, "inf": math.inf}}


def make(point, generator, regime):
    """Every tensor on the generator's device; outputs hold NaN or -1.

    Raises:
        ValueError: unknown regime.
    """
    if regime not in REGIMES:
        raise ValueError(f"unknown regime {{regime!r}}")
    a = point.axes
    read = {{
        {tensors}
    }}
    written = {{
        {written}
    }}
    tensors = {{
        name: _drawn(row, generator, regime).to(getattr(torch, row[0]))
        for name, row in read.items()
    }}
{triangles}    for name, (dtype, shape) in written.items():
        kind = getattr(torch, dtype)
        fill = math.nan if kind.is_floating_point else -1
        tensors[name] = torch.full(shape, fill, dtype=kind, device=generator.device)
    return tensors


def _drawn(row, generator, regime):
    dtype, shape, kind, drawn, low, high, table = row
    given = {{"generator": generator, "device": generator.device}}
    if drawn == "table":
        data = bytearray(zlib.decompress(base64.b64decode(table)))
        value = torch.frombuffer(data, dtype=getattr(torch, dtype)).clone().reshape(shape)
        return value.to(generator.device)
    if drawn == "integers":
        value = torch.randint(int(low), int(high) + 1, shape, **given)
        return value.to(getattr(torch, dtype))
    if regime == "signed" and kind == "input":
        return torch.randn(shape, **given)
    if regime in _PLANTED and kind == "input":
        value = torch.randn(shape, **given)
        where = torch.randint(0, value.numel(), (2,), **given)
        value.view(-1)[where] = _PLANTED[regime]
        return value
    if drawn == "uniform":
        return low + (high - low) * torch.rand(shape, **given)
    mean, std = (low, high) if drawn == "normal" else (low, 0.1 * (abs(low) or 1.0))
    return mean + std * torch.randn(shape, **given)
'''

_CAST = """given = [each.to(NUMBER) if each.is_floating_point() else each for each in ({read},)]
    values = module(*given, NUMBER)
    return tuple(each.float() if each.is_floating_point() else each for each in values)"""
_KEPT = "return module({read}, NUMBER)"

BASELINES = '''"""The module of {title}, eager and compiled: {said}."""

import torch

aten = torch.ops.aten
NUMBER = torch.{number}


def module({read}, number):
    {as_run}


def _module({names}):
    {called}


def _with_setting(function):
    """TF32 and the dtype of new numbers are settings of the process, so each call makes its own
    and puts them back."""

    def run(*arguments):
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before, number = (matmul.allow_tf32, cudnn.allow_tf32), torch.get_default_dtype()
        matmul.allow_tf32 = cudnn.allow_tf32 = {tf32}
        torch.set_default_dtype(NUMBER)
        try:
            return function(*arguments)
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before
            torch.set_default_dtype(number)

    return run


def eager(device):
    return _with_setting(_module)


def compiled(device):
    # the judge captures CUDA graphs itself
    mode = "max-autotune-no-cudagraphs"
    return _with_setting(torch.compile(_module, mode=mode, dynamic=False))


BASELINES = {{"eager": eager, "torch.compile": compiled}}
ACCURACY_BASELINE = "eager"
'''

TRUNCATED = '''

PRODUCTS = {"mm": 0, "bmm": 0, "linear": 0, "matmul": 0, "addmm": 1, "baddbmm": 1, "convolution": 0}
"""Where a product's first operand is among its arguments; its second one is next to it."""
UNREAD = 0x1FFF
"""Bits of a float32 number that a tensor core does not read."""


class _Truncating(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        at = PRODUCTS.get(function.overloadpacket.__name__)
        if at is not None:
            operands = [_truncated(each) for each in args[at : at + 2]]
            args = (*args[:at], *operands, *args[at + 2 :])
        return function(*args, **(kwargs or {}))


def _truncated(operand):
    if operand.dtype != torch.float32:
        return operand
    return (operand.contiguous().view(torch.int32) & ~UNREAD).view(torch.float32)


def truncated_TF32(device):
    """Eager, but operands of products lose the bits that tensor cores do not read, as in kernels
    that hand them float32 (Triton's, torch.compile's). Libraries round first, and err less."""

    def run(*arguments):
        with _Truncating():
            return eager(device)(*arguments)

    return run


ACCURACY = truncated_TF32
'''
