"""Convert a Solution of flashinfer-bench to one source: its text, and the op's function."""

from __future__ import annotations

import ast
import re

from patcher.bench import Candidate, Contract, Language
from patcher.integrate.formats.foreign_contract import Refused
from patcher.integrate.formats.foreign_schema import Definition, Solution

LANGUAGES = {
    "python": Language.TORCH,
    "triton": Language.TRITON,
    "cpp": Language.CPP,
    "cuda": Language.CUDA,
}
EXPORTED = r"^[ \t]*TVM_FFI_DLL_EXPORT_TYPED_FUNC\(\s*{symbol}\s*,\s*([\w:]+)\s*\)\s*;?[ \t]*$"

PYTHON = '''

_solution = {symbol}


def {op}({parameters}):
    """The Solution's {symbol} in the order of the contract."""
{body}
'''


def candidate_from(
    solution: Solution, definition: Definition, contract: Contract
) -> tuple[Candidate, list[str]]:
    """The candidate, and notes about it.

    Raises:
        Refused: the Solution cannot become one source that writes to its arguments.
    """
    spec = solution.spec
    if spec.language not in LANGUAGES:
        raise Refused(f"patcher has no toolchain for {spec.language}")
    if len(solution.sources) != 1:
        raise Refused(f"it has {len(solution.sources)} sources; a candidate has one")
    notes = []
    if spec.dependencies:
        notes.append(f"it depends on {', '.join(spec.dependencies)}, which must be installed")
    language = LANGUAGES[spec.language]
    [source] = solution.sources
    path, _, symbol = spec.entry_point.partition("::")
    if path != source.path or not symbol.isidentifier():
        raise Refused(f"its entry point {spec.entry_point} is not in its source")
    if language.in_python:
        text = source.content.rstrip("\n") + "\n" + _python(solution, definition, contract, symbol)
        try:
            ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise Refused(f"its source is not valid Python: {error}") from error
    else:
        text = _native(solution, definition, contract, symbol)
        notes.append("its export macro was removed, since patcher binds the entry itself")
    return Candidate(op=contract.name, language=language, source=text), notes


def _python(solution: Solution, definition: Definition, contract: Contract, symbol: str) -> str:
    given, results = ", ".join(definition.inputs), list(definition.outputs)
    if solution.spec.destination_passing_style:
        body = f"    _solution({given}, {', '.join(results)})"
    elif len(results) == 1:
        body = (
            f"    returned = _solution({given})\n"
            "    returned = returned[0] if isinstance(returned, (tuple, list)) else returned\n"
            f"    {results[0]}.copy_(returned)"
        )
    else:
        body = f"    returned = _solution({given})\n"
        body += "\n".join(f"    {name}.copy_(returned[{i}])" for i, name in enumerate(results))
    return PYTHON.format(
        symbol=symbol, op=contract.name, parameters=", ".join(_order(contract)), body=body
    )


def _order(contract: Contract) -> list[str]:
    return [each.name for each in contract.tensors] + [each.name for each in contract.scalars]


def _native(solution: Solution, definition: Definition, contract: Contract, symbol: str) -> str:
    [source] = solution.sources
    if solution.spec.binding == "torch":
        raise Refused("it binds itself with pybind11; patcher must bind the entry")
    if not solution.spec.destination_passing_style:
        raise Refused("its C++ returns its outputs; patcher's kernels write to their arguments")
    macro = re.compile(EXPORTED.format(symbol=re.escape(symbol)), re.MULTILINE)
    match = macro.search(source.content)
    if match is None:
        raise Refused(f"its source has no TVM_FFI_DLL_EXPORT_TYPED_FUNC of {symbol}")
    text, function = macro.sub("", source.content).rstrip("\n") + "\n", match[1]
    theirs = [*definition.inputs, *definition.outputs]
    if function == contract.name:
        if theirs != _order(contract):
            raise Refused(f"its function {function} has the op's name but another argument order")
        return text
    types = {"float": "double", "int": "int64_t"}
    parameters = [f"tvm::ffi::TensorView {each.name}" for each in contract.tensors]
    parameters += [f"{types[each.type]} {each.name}" for each in contract.scalars]
    return (
        f"{text}\nvoid {contract.name}({', '.join(parameters)}) "
        f"{{ {function}({', '.join(theirs)}); }}\n"
    )
