"""What CUDA's driver tells of the nodes of a graph."""

from __future__ import annotations

import ctypes

from .driver import INVALID_VALUE, CudaDriver, DriverError, Edge, KernelNode, Pointer, Size


def edges_of(driver: CudaDriver, graph: int) -> list[tuple[int, int, str]]:
    """Edges of a graph: from, to, and CUgraphEdgeData in hexadecimal digits."""
    room = 64
    while True:
        begin, end, data = (Pointer * room)(), (Pointer * room)(), (Edge * room)()
        count = Size(room)
        driver.call("cuGraphGetEdges_v2", graph, begin, end, data, ctypes.byref(count))
        if count.value < room:
            break
        room *= 4
    return [(begin[i] or 0, end[i] or 0, bytes(data[i]).hex()) for i in range(count.value)]


def layout(driver: CudaDriver, function: int) -> list[tuple[int, int]]:
    """Offset and size in bytes of each parameter of a kernel."""
    found: list[tuple[int, int]] = []
    while True:
        offset, size = Size(), Size()
        status = driver.status(
            "cuFuncGetParamInfo", function, len(found), ctypes.byref(offset), ctypes.byref(size)
        )
        if status == INVALID_VALUE:
            return found
        if status:
            raise DriverError(f"cuFuncGetParamInfo: {status}", status)
        found.append((offset.value, size.value))


def nodes_of(driver: CudaDriver, graph: int) -> list[int]:
    """Handles of a graph's nodes."""
    count = Size()
    driver.call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    found = (Pointer * count.value)()
    if count.value:
        driver.call("cuGraphGetNodes", graph, found, ctypes.byref(count))
    return [each or 0 for each in found]


def function_of(driver: CudaDriver, params: KernelNode) -> tuple[int, str]:
    """The function of a kernel node, which may hold a kernel of a library, and its name."""
    function, name = params.function, ctypes.c_char_p()
    if not function or driver.status("cuFuncGetName", ctypes.byref(name), function):
        function = driver.handle("cuKernelGetFunction", params.kernel or function)
        driver.call("cuFuncGetName", ctypes.byref(name), function)
    return int(function), (name.value or b"").decode()


def module_of(driver: CudaDriver, function: int) -> int:
    """The module of a function, which may be a kernel of a library."""
    module = Pointer()
    if driver.status("cuFuncGetModule", ctypes.byref(module), function):
        function = driver.handle("cuKernelGetFunction", function)
        return driver.handle("cuFuncGetModule", function)
    return module.value or 0


def parameters_of(driver: CudaDriver, function: int, params: KernelNode) -> list[tuple[int, bytes]]:
    """Offset and bytes of each parameter."""
    if params.parameters:
        found = []
        for index, (offset, size) in enumerate(layout(driver, function)):
            where = Pointer.from_address(params.parameters + index * ctypes.sizeof(Pointer))
            found.append((offset, ctypes.string_at(where.value or 0, size)))
        return found
    if not params.extra:
        return []
    data = packed(params.extra)
    return [(offset, data[offset : offset + size]) for offset, size in layout(driver, function)]


def packed(extra: int) -> bytes:
    """Parameters in one buffer, as `extra` of cuLaunchKernel names it."""
    begin, size, index = 0, 0, 0
    while True:
        key, value = (Pointer.from_address(extra + 8 * (index + i)).value or 0 for i in (0, 1))
        if key == 0:
            return ctypes.string_at(begin, size)
        if key == 1:
            begin = value
        elif key == 2:
            size = Size.from_address(value).value
        index += 2


def trait(driver: CudaDriver, function: int, number: int) -> int:
    """An attribute of a function; 0 if this driver does not know it."""
    value = ctypes.c_int()
    if driver.status("cuFuncGetAttribute", ctypes.byref(value), number, function):
        return 0
    return value.value


def plain(structure: ctypes.Structure) -> dict[str, int]:
    """The members of a structure; no handle is 0."""
    return {field[0]: getattr(structure, field[0]) or 0 for field in structure._fields_}
