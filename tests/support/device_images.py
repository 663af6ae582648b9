"""Small images of device code: ELF files with the sections and symbols that are read."""

from __future__ import annotations

import struct
from collections.abc import Mapping

_FUNCTION, _OBJECT, _ENTRY = 0x12, 0x11, 0x10


def image(kernels: Mapping[str, bytes], variables: Mapping[str, int]) -> bytes:
    """An image with kernels (their code) and variables (their sizes)."""
    sections = [("", 0, b""), *((f".text.{name}", 1, code) for name, code in kernels.items())]
    sections.append((".nv.global.init", 1, b"\0" * sum(variables.values())))
    names, symbols = b"\0", b"\0" * 24
    for index, name in enumerate(kernels):
        symbols += struct.pack("<IBBHQQ", len(names), _FUNCTION, _ENTRY, index + 1, 0, 8)
        names += name.encode() + b"\0"
    for name, size in variables.items():
        symbols += struct.pack("<IBBHQQ", len(names), _OBJECT, 0, len(kernels) + 1, 0, size)
        names += name.encode() + b"\0"
    sections += [(".symtab", 2, symbols), (".strtab", 3, names)]
    titles = b"\0".join(name.encode() for name, _, _ in sections) + b"\0.shstrtab\0"
    sections.append((".shstrtab", 3, titles))
    body, table, at = b"", b"", 64
    for name, kind, data in sections:
        link = len(sections) - 2 if kind == 2 else 0
        title = titles.index(name.encode() + b"\0") if name else len(titles) - 1
        table += struct.pack("<IIQQQQIIQQ", title, kind, 0, 0, at, len(data), link, 0, 1, 0)
        body += data
        at += len(data)
    header = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    header += struct.pack("<HHIQQQ", 2, 190, 1, 0, 0, at)
    header += struct.pack("<IHHHHHH", 0, 64, 0, 0, 64, len(sections), len(sections) - 1)
    return header + body + table
