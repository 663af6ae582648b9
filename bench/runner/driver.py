"""CUDA's driver through ctypes: the structures of `cuda.h`, and checked calls.

It is bound before a candidate is loaded. Handles, addresses and sizes are integers.
"""

from __future__ import annotations

import ctypes
from typing import Any

Pointer, Size, Long = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
_int, _uint, _text = ctypes.c_int, ctypes.c_uint, ctypes.c_char_p

INVALID_VALUE = 1
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
HOST, DEVICE, ARRAY, UNIFIED = 1, 2, 3, 4
"""CUmemorytype."""
MEMORY_TYPE, RANGE_START, RANGE_SIZE = 2, 11, 12
"""CUpointer_attribute."""
_PINNED, _FILE_DESCRIPTOR, _ON_DEVICE, _READ_WRITE, _GRANULARITY = 1, 1, 1, 3, 0


class CudaError(RuntimeError):
    """A call of CUDA failed, or an earlier kernel did."""


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", Pointer),
        ("grid", _uint * 3),
        ("block", _uint * 3),
        ("shared_bytes", _uint),
        ("parameters", Pointer),
        ("extra", Pointer),
        ("kernel", Pointer),
        ("context", Pointer),
    )


class MemsetNode(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS_v1."""

    _fields_ = (
        ("target", Long),
        ("pitch", Size),
        ("value", _uint),
        ("element_bytes", _uint),
        ("width", Size),
        ("height", Size),
    )


class MemcpyNode(ctypes.Structure):
    """CUDA_MEMCPY3D_v2."""

    _fields_ = (
        ("source_x", Size),
        ("source_y", Size),
        ("source_z", Size),
        ("source_lod", Size),
        ("source_type", _uint),
        ("source_host", Pointer),
        ("source", Long),
        ("source_array", Pointer),
        ("source_reserved", Pointer),
        ("source_pitch", Size),
        ("source_height", Size),
        ("target_x", Size),
        ("target_y", Size),
        ("target_z", Size),
        ("target_lod", Size),
        ("target_type", _uint),
        ("target_host", Pointer),
        ("target", Long),
        ("target_array", Pointer),
        ("target_reserved", Pointer),
        ("target_pitch", Size),
        ("target_height", Size),
        ("width", Size),
        ("height", Size),
        ("depth", Size),
    )


class Edge(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


class Attribute(ctypes.Structure):
    """CUlaunchAttributeValue, as words."""

    _fields_ = (("words", Long * 8),)


class _Location(ctypes.Structure):
    _fields_ = (("type", _int), ("id", _int))


class Allocation(ctypes.Structure):
    """CUmemAllocationProp_v1."""

    _fields_ = (
        ("type", _int),
        ("handle_types", _int),
        ("location", _Location),
        ("windows", Pointer),
        ("flags", Long),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc_v1."""

    _fields_ = (("location", _Location), ("flags", _int))


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (Pointer,),
    "cuCtxSynchronize": (),
    "cuThreadExchangeStreamCaptureMode": (Pointer,),
    "cuPointerGetAttribute": (Pointer, _int, Long),
    "cuMemcpyDtoH_v2": (Pointer, Long, Size),
    "cuMemcpyHtoD_v2": (Long, Pointer, Size),
    "cuMemGetAllocationGranularity": (Pointer, Pointer, _int),
    "cuMemAddressReserve": (Pointer, Size, Size, Long, Long),
    "cuMemAddressFree": (Long, Size),
    "cuMemCreate": (Pointer, Size, Pointer, Long),
    "cuMemMap": (Long, Size, Size, Long, Long),
    "cuMemSetAccess": (Long, Size, Pointer, Size),
    "cuMemUnmap": (Long, Size),
    "cuMemRelease": (Long,),
    "cuMemExportToShareableHandle": (Pointer, Long, _int, Long),
    "cuMemImportFromShareableHandle": (Pointer, Pointer, _int),
    "cuModuleLoadData": (Pointer, Pointer),
    "cuModuleUnload": (Pointer,),
    "cuModuleGetFunction": (Pointer, Pointer, _text),
    "cuModuleGetGlobal_v2": (Pointer, Pointer, Pointer, _text),
    "cuFuncGetModule": (Pointer, Pointer),
    "cuFuncGetName": (Pointer, Pointer),
    "cuFuncGetAttribute": (Pointer, _int, Pointer),
    "cuFuncSetAttribute": (Pointer, _int, _int),
    "cuFuncGetParamInfo": (Pointer, Size, Pointer, Pointer),
    "cuKernelGetFunction": (Pointer, Pointer),
    "cuGraphCreate": (Pointer, _uint),
    "cuGraphDestroy": (Pointer,),
    "cuGraphGetNodes": (Pointer, Pointer, Pointer),
    "cuGraphGetEdges_v2": (Pointer, Pointer, Pointer, Pointer, Pointer),
    "cuGraphNodeGetType": (Pointer, Pointer),
    "cuGraphChildGraphNodeGetGraph": (Pointer, Pointer),
    "cuGraphKernelNodeGetParams_v2": (Pointer, Pointer),
    "cuGraphKernelNodeGetAttribute": (Pointer, _int, Pointer),
    "cuGraphKernelNodeSetAttribute": (Pointer, _int, Pointer),
    "cuGraphMemcpyNodeGetParams": (Pointer, Pointer),
    "cuGraphMemsetNodeGetParams": (Pointer, Pointer),
    "cuGraphAddKernelNode_v2": (Pointer, Pointer, Pointer, Size, Pointer),
    "cuGraphAddMemcpyNode": (Pointer, Pointer, Pointer, Size, Pointer, Pointer),
    "cuGraphAddMemsetNode": (Pointer, Pointer, Pointer, Size, Pointer, Pointer),
    "cuGraphAddEmptyNode": (Pointer, Pointer, Pointer, Size),
    "cuGraphAddChildGraphNode": (Pointer, Pointer, Pointer, Size, Pointer),
    "cuGraphAddDependencies_v2": (Pointer, Pointer, Pointer, Pointer, Size),
}


class DriverError(CudaError):
    """A call of the driver failed."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class CudaDriver:
    """Calls of CUDA's driver in the current context.

    Args:
        path: the driver's library.

    Raises:
        CudaError: there is no driver, or it is too old.
    """

    def __init__(self, path: str = "libcuda.so.1") -> None:
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise CudaError(f"no driver: {error}") from error
        self._calls: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise CudaError(f"the driver has no {name}: version 12.3 is needed") from error
            function.argtypes, function.restype = arguments, _int
            self._calls[name] = function
        self._error_name = library.cuGetErrorName
        self._error_name.argtypes = (_int, Pointer)

    def status(self, name: str, *arguments: Any) -> int:
        """Call, and return what the driver returns: 0 if it succeeded."""
        return int(self._calls[name](*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Call, and raise `DriverError` if it fails."""
        if status := self.status(name, *arguments):
            text = ctypes.c_char_p()
            self._error_name(status, ctypes.byref(text))
            said = (text.value or b"unknown error").decode()
            raise DriverError(f"{name}: {said} ({status})", status)

    def handle(self, name: str, *arguments: Any) -> int:
        """Call, and return the handle that the driver writes to the first argument."""
        handle = Pointer()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle.value or 0

    def handle_of(self, node: int) -> int:
        """The graph inside of a node."""
        graph = Pointer()
        self.call("cuGraphChildGraphNodeGetGraph", node, ctypes.byref(graph))
        return graph.value or 0

    def pointer(self, kind: int, address: int) -> int | None:
        """An attribute of an address, or None if it is no address that CUDA knows."""
        value = Long()
        if self.status("cuPointerGetAttribute", ctypes.byref(value), kind, address):
            return None
        return value.value

    def allocation(self, address: int) -> tuple[int, int] | None:
        """Begin and size of the device allocation around an address; None if there is none."""
        kind = self.pointer(MEMORY_TYPE, address)
        if kind is None or kind & 0xFFFFFFFF != DEVICE:
            return None
        begin, size = self.pointer(RANGE_START, address), self.pointer(RANGE_SIZE, address)
        return None if not begin or not size else (begin, size)

    def to_host(self, target: int, source: int, size: int) -> None:
        self.call("cuMemcpyDtoH_v2", target, source, size)

    def to_device(self, target: int, source: int, size: int) -> None:
        self.call("cuMemcpyHtoD_v2", target, source, size)

    def granularity(self) -> int:
        """Bytes in whose multiples memory is mapped."""
        size, wanted = Size(), _allocation()
        self.call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(size),
            ctypes.byref(wanted),
            _GRANULARITY,
        )
        return size.value

    def reserve(self, address: int, size: int) -> int:
        """Reserve addresses: these if they are free, or others. Returns the first one."""
        got = Long()
        self.call("cuMemAddressReserve", ctypes.byref(got), size, 0, address, 0)
        return got.value

    def unreserve(self, address: int, size: int) -> None:
        """Give reserved addresses back."""
        self.call("cuMemAddressFree", address, size)

    def back(self, address: int, size: int) -> None:
        """Put new memory behind reserved addresses; both are multiples of the granularity."""
        memory = self.create(size)
        try:
            self.map(address, size, memory)
        finally:
            self.release(memory)  # the mapping keeps it

    def create(self, size: int) -> int:
        """A handle of new memory, a multiple of the granularity."""
        memory, wanted = Long(), _allocation()
        self.call("cuMemCreate", ctypes.byref(memory), size, ctypes.byref(wanted), 0)
        return memory.value

    def map(self, address: int, size: int, memory: int) -> None:
        """Put a whole memory behind reserved addresses, to be read and written."""
        self.call("cuMemMap", address, size, 0, memory, 0)
        access = Access(location=_Location(_ON_DEVICE, 0), flags=_READ_WRITE)
        try:
            self.call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
        except CudaError:
            self.unback(address, size)  # mapped addresses cannot be given back
            raise

    def release(self, memory: int) -> None:
        """Give a handle back."""
        self.call("cuMemRelease", memory)

    def descriptor(self, memory: int) -> int:
        """A new file descriptor by which another process opens the memory."""
        found = _int()
        self.call("cuMemExportToShareableHandle", ctypes.byref(found), memory, _FILE_DESCRIPTOR, 0)
        return found.value

    def opened(self, descriptor: int) -> int:
        """A handle of the memory behind another process's descriptor."""
        memory = Long()
        self.call(
            "cuMemImportFromShareableHandle", ctypes.byref(memory), descriptor, _FILE_DESCRIPTOR
        )
        return memory.value

    def unback(self, address: int, size: int) -> None:
        """Give the memory behind addresses back; they stay reserved."""
        self.call("cuMemUnmap", address, size)


def _allocation() -> Allocation:
    return Allocation(
        type=_PINNED, handle_types=_FILE_DESCRIPTOR, location=_Location(_ON_DEVICE, 0)
    )
