"""Values as JSON: literals, and how a file fills its tensors."""

from __future__ import annotations

import base64
import math
import zlib
from typing import Any

TABLE_BYTES = 1 << 16
EXACT = ("int64", "int32", "bool", "uint8", "int8", "int16")


DROPPED = {1: "p", 2: "train"}
RECURRENT = {5: "dropout", 6: "train"}
QUIET = {
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout"), DROPPED),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), RECURRENT),
    "scaled_dot_product_attention": {4: "dropout_p"},
    "rrelu": {3: "training"},
}
"""Operators that draw no random number where one of these arguments is 0 or False: its position and
name. What is left out is so by default."""


class Unfit(Exception):
    """The problem cannot be traced; the message is the reason."""


def quiet(name: str, arguments: Any, words: Any) -> bool:
    """Whether an operator, with arguments of a graph or of its JSON, draws no random number."""
    for position, word in QUIET.get(name, {}).items():
        value = arguments[position] if len(arguments) > position else words.get(word, 0)
        if isinstance(value, dict):
            value = value.get("float")
        if value in (0, "0.0"):
            return True
    return False


def literal(value: Any) -> Any:
    """A value of `get_init_inputs` as JSON; tuples are marked."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [literal(each) for each in value]}
    raise Unfit(f"get_init_inputs gives a {type(value).__name__}, not a number, text or list")


def drawn(sample: Any, kind: str) -> dict[str, Any]:
    """How the file draws a tensor: constant, uniform, normal or integers; a table's own bytes."""
    dtype = str(sample.dtype).removeprefix("torch.")
    if sample.numel() == 0:
        raise Unfit("one of its tensors is empty")
    flat = sample.detach().flatten()
    low, high = float(flat.min()), float(flat.max())
    if not math.isfinite(low) or not math.isfinite(high):
        return table(sample)
    if kind == "constant":  # a module of another's has its own
        return table(sample)
    if kind == "input" and (triangle := _triangle(sample)):
        return {**drawn(flat[flat != 0], "triangle"), "triangle": triangle}
    if dtype in EXACT:
        if kind != "input":
            return table(sample)
        return {"drawn": "integers", "low": low, "high": high}
    if low == high:
        return {"drawn": "constant", "low": low, "high": high}
    if kind == "buffer":
        return table(sample)
    part = flat[: 1 << 22].double()
    mean, std = float(part.mean()), float(part.std()) if part.numel() > 1 else 0.0
    # a uniform number's standard deviation is its range / sqrt(12)
    if high - low < 1.25 * math.sqrt(12) * std or part.numel() < 8:
        return {"drawn": "uniform", "low": low, "high": high}
    return {"drawn": "normal", "low": mean, "high": std}


def _triangle(sample: Any) -> str:
    """The function that leaves each matrix as it is, where the others are zero: triu or tril, and
    1 if the diagonal is zero, too, as that of a causal mask."""
    if sample.dim() < 2 or min(sample.shape[-2:]) < 4 or not sample.is_floating_point():
        return ""
    found = [name for name in ("triu", "tril") if sample.equal(getattr(sample, name)())]
    if len(found) != 1:
        return ""
    return found[0] + ("" if bool(sample.diagonal(dim1=-2, dim2=-1).any()) else "1")


def table(sample: Any) -> dict[str, Any]:
    data = sample.detach().contiguous().numpy().tobytes()
    packed = zlib.compress(data, 9)
    if len(packed) > TABLE_BYTES:
        raise Unfit(f"it holds a table of {len(data):,} bytes")
    return {"drawn": "table", "low": 0.0, "high": 0.0, "table": base64.b64encode(packed).decode()}
