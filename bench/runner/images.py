"""Images of device code, as the driver loaded them into this process, and their symbols.

CUPTI tells of each module that is loaded, with its image: an ELF file of machine code, whether it
came from a compiler, from a library or from PTX. It must be asked before the modules are loaded.
"""

from __future__ import annotations

import ctypes
import glob
import itertools
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_DRIVER, _RESOURCE, _MODULE_LOADED = 1, 3, 6
"""CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_MODULE_LOADED."""
_LOADS = (19, 20, 21)
"""CUPTI's numbers of cuModuleLoadData, cuModuleLoadDataEx and cuModuleLoadFatBinary."""
_AFTER = 1
"""CUPTI_API_EXIT."""
_SYMBOLS, _NO_BITS = 2, 8
_OBJECT, _FUNCTION, _ENTRY = 1, 2, 0x10
_FATBIN = 0xBA55ED50


class _Resource(ctypes.Structure):
    """CUpti_ResourceData."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("handle", ctypes.c_void_p),
        ("descriptor", ctypes.c_void_p),
    )


class _Module(ctypes.Structure):
    """CUpti_ModuleResourceData."""

    _fields_ = (
        ("number", ctypes.c_uint32),
        ("size", ctypes.c_size_t),
        ("image", ctypes.c_void_p),
    )


class _Call(ctypes.Structure):
    """The first members of CUpti_CallbackData."""

    _fields_ = (
        ("site", ctypes.c_int),
        ("name", ctypes.c_char_p),
        ("arguments", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
    )


class _Load(ctypes.Structure):
    """The first arguments of the driver's functions that load a module."""

    _fields_ = (("module", ctypes.POINTER(ctypes.c_void_p)), ("image", ctypes.c_void_p))


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


@dataclass(frozen=True)
class Variable:
    """A variable in device memory that a module declares."""

    name: str
    size: int


@dataclass(frozen=True)
class Elf:
    """What is read from an image."""

    kernels: dict[str, bytes]
    """Machine code by the kernel's name."""
    variables: tuple[Variable, ...]


class LoadedImages:
    """Collects the images of all modules that are loaded from now on."""

    def __init__(self) -> None:
        self.problem = ""
        """Why CUPTI does not tell of them."""
        self.images: list[bytes] = []
        self.modules: list[int] = []
        """For each image the handle of its module, or 0 if CUPTI did not tell."""
        self.paused = False
        self._elves: dict[int, Elf] = {}
        self._callback = _Callback(self._seen)
        self._subscriber = ctypes.c_void_p()
        try:
            self._library = cupti()
            self._call("cuptiSubscribe", ctypes.byref(self._subscriber), self._callback, None)
            for domain, number in ((_RESOURCE, _MODULE_LOADED), *((_DRIVER, n) for n in _LOADS)):
                self._call(
                    "cuptiEnableCallback",
                    ctypes.c_uint32(1),
                    self._subscriber,
                    ctypes.c_int(domain),
                    ctypes.c_uint32(number),
                )
        except OSError as error:
            self.problem = f"CUPTI does not tell of device code: {error}"
            self.close()

    def close(self) -> None:
        """Stop collecting, so that another tool may use CUPTI."""
        if self._subscriber:
            self._call("cuptiUnsubscribe", self._subscriber)
            self._subscriber = ctypes.c_void_p()

    def holding(self, kernel: str) -> list[int]:
        """Indices of the images with a kernel of this name, the last loaded first."""
        return [
            index
            for index in reversed(range(len(self.images)))
            if kernel in self.elf(index).kernels
        ]

    def elf(self, index: int) -> Elf:
        """What an image holds."""
        if index not in self._elves:
            self._elves[index] = read_elf(self.images[index])
        return self._elves[index]

    def _seen(self, _user: Any, domain: int, _number: int, data: int) -> None:
        if self.paused:
            return
        if domain == _RESOURCE:
            module = _Module.from_address(_Resource.from_address(data).descriptor)
            self.add(ctypes.string_at(module.image, module.size), 0)
            return
        call = _Call.from_address(data)
        if call.site == _AFTER and not ctypes.c_int.from_address(call.status).value:
            load = _Load.from_address(call.arguments)
            if size := elf_bytes(load.image):
                self.add(ctypes.string_at(load.image, size), load.module[0] or 0)

    def add(self, image: bytes, module: int) -> None:
        """Take an image, with the handle of its module or 0."""
        self.images.append(image)
        self.modules.append(module)

    def drop_last(self) -> None:
        """Forget the image that was taken last."""
        self.images.pop()
        self.modules.pop()
        self._elves.pop(len(self.images), None)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise OSError(f"{name}: CUPTI returned {status}")


def cupti() -> Any:
    """CUPTI's library: the one that this process has loaded, or that is installed.

    Raises:
        OSError: there is none.
    """
    loaded = [path for path in mapped_paths() if "/libcupti.so" in path]
    folders = [path for path in sys.path if path.endswith("-packages")]
    patterns = (
        *(f"{folder}/nvidia/*/lib/libcupti.so.1*" for folder in folders),
        *(f"{folder}/triton/backends/nvidia/lib/cupti/libcupti.so.1*" for folder in folders),
        "/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so.1*",
        "/usr/local/cuda*/lib64/libcupti.so.1*",
    )
    installed = itertools.chain.from_iterable(sorted(glob.glob(each)) for each in patterns)
    for path in (*loaded, *installed):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise OSError("no libcupti is installed")


def elf_bytes(address: int) -> int:
    """Size in bytes of an ELF file of 64 bits in memory; 0 if there is another thing."""
    if ctypes.string_at(address, 5) != b"\x7fELF\x02":
        return 0
    header = ctypes.string_at(address, 64)
    sections, programs = (struct.unpack_from("<Q", header, at)[0] for at in (40, 32))
    program_bytes, program_count, section_bytes, section_count = struct.unpack_from(
        "<HHHH", header, 54
    )
    end = max(sections + section_bytes * section_count, programs + program_bytes * program_count)
    for index in range(section_count):
        begin = address + sections + index * section_bytes
        _, kind, _, _, offset, size = struct.unpack("<IIQQQQ", ctypes.string_at(begin, 40))
        if kind != _NO_BITS:
            end = max(end, offset + size)
    return int(end)


def read_elf(image: bytes) -> Elf:
    """The kernels and variables of an image; none if it is no ELF file of 64 bits.

    Raises:
        ValueError: the file is damaged.
    """
    if image[:5] != b"\x7fELF\x02":
        return Elf({}, ())
    try:
        return _read(image)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"a damaged image of device code: {error}") from error


def _read(image: bytes) -> Elf:
    at = struct.unpack_from("<Q", image, 40)[0]
    size, count, names = struct.unpack_from("<HHH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, at + i * size) for i in range(count)]

    def text(section: int, offset: int) -> str:
        begin = sections[section][4] + offset
        return image[begin : image.index(b"\0", begin)].decode()

    kernels: dict[str, bytes] = {}
    variables: dict[str, int] = {}
    for section in sections:
        if section[1] != _SYMBOLS:
            continue
        begin, length, strings = section[4], section[5], section[6]
        for offset in range(begin, begin + length, 24):
            name, info, other, place, _, span = struct.unpack_from("<IBBHQQ", image, offset)
            if not 0 < place < count:
                continue
            where = text(names, sections[place][0])
            if info & 15 == _FUNCTION and other & _ENTRY:
                code = sections[place]
                held = b"" if code[1] == _NO_BITS else image[code[4] : code[4] + code[5]]
                kernels[text(strings, name)] = held
            elif (
                info & 15 == _OBJECT and span and where.startswith((".nv.global", ".nv.constant3"))
            ):
                variables[text(strings, name)] = span
    return Elf(kernels, tuple(Variable(*pair) for pair in variables.items()))


def fat_binaries(path: str) -> Iterator[bytes]:
    """The containers of device code in a file of machine code, as a compiler embedded them.

    The driver loads them as they are. This is for images that CUPTI did not tell of.
    """
    with open(path, "rb") as file:
        image = file.read()
    if image[:5] != b"\x7fELF\x02":
        return
    at = struct.unpack_from("<Q", image, 40)[0]
    size, count, names = struct.unpack_from("<HHH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, at + i * size) for i in range(count)]
    for section in sections:
        begin = sections[names][4] + section[0]
        if image[begin : image.index(b"\0", begin)] not in (b".nv_fatbin", b"__nv_relfatbin"):
            continue
        offset, end = section[4], section[4] + section[5]
        while offset + 16 <= end:
            magic, _, header, length = struct.unpack_from("<IHHQ", image, offset)
            if magic != _FATBIN:
                offset += 8  # between containers there may be padding
                continue
            yield image[offset : offset + header + length]
            offset += header + length


def mapped_paths() -> list[str]:
    """What this process has mapped by a path, which may have spaces, in order."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sorted({line.rstrip("\n").split(maxsplit=5)[-1] for line in file if "/" in line})


def mapped_files(most_bytes: int) -> list[str]:
    """Files that this process has mapped, the smallest first, without those that are larger."""
    sizes = {path: os.path.getsize(path) for path in mapped_paths() if os.path.isfile(path)}
    return sorted(
        (path for path in sizes if sizes[path] <= most_bytes), key=lambda path: sizes[path]
    )
