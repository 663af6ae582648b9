"""Graphs built again from what another process handed over; see `handover`.

Nothing of it is code of the host. Device memory is put at the same addresses, modules are loaded
from their images, variables and memory get their contents, and parameters that point to a variable
are moved to where it lies here.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any

from .driver import (
    UNIFIED,
    Attribute,
    CudaDriver,
    Edge,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Pointer,
    Size,
)
from .graph_nodes import layout
from .handover import ATTRIBUTES, SETTABLE
from .placed import CopiedMemory


class Rebuilt:
    """Graphs, modules and memory of a parcel.

    Args:
        driver: the driver.
        address: where the parcel lies in host memory.
        size: its size in bytes.
        document: the document's place in it, as [offset, bytes].

    Raises:
        CudaError: this process cannot have them.
        KeyError, ValueError: the parcel is damaged.
    """

    def __init__(
        self, driver: CudaDriver, address: int, size: int, document: Sequence[int]
    ) -> None:
        self._driver, self._address, self._size = driver, address, size
        self.document: dict[str, Any] = json.loads(self._bytes(document))
        self.graphs: list[int] = []
        self._modules: list[int] = []
        self._images: list[bytes] = []
        """The driver may read them as late as at the first launch."""
        self._functions: dict[tuple[int, str], int] = {}
        self._moved: list[tuple[int, int, int]] = []
        """Variables: address there, size, address here."""
        self._context = driver.handle("cuCtxGetCurrent")
        self._memory = CopiedMemory(driver, self.document["rooms"], self.document["spans"])
        try:
            for place, length, *chunk in self.document["pieces"]:
                self._copy(place, length, chunk)
            for each in self.document["modules"]:
                self._load(each)
            self.graphs = [self._graph(each) for each in self.document["graphs"]]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free graphs, modules and memory."""
        for graph in self.graphs:
            self._driver.call("cuGraphDestroy", graph)
        for module in self._modules:
            self._driver.call("cuModuleUnload", module)
        self.graphs, self._modules = [], []
        self._memory.close()

    def refresh(self) -> None:
        """Give memory and variables the contents again that they had when they were handed over."""
        for place, length, *chunk in self.document["pieces"]:
            self._copy(place, length, chunk)
        for module, each in zip(self._modules, self.document["modules"], strict=True):
            for variable in each["variables"]:
                self._set(module, variable)

    def _bytes(self, place: Sequence[int]) -> bytes:
        offset, size = place
        self._check(offset, size)
        return ctypes.string_at(self._address + offset, size)

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self._size:
            raise ValueError("the parcel is cut off")

    def _copy(self, address: int, size: int, chunk: Sequence[int]) -> None:
        self._check(*chunk)
        if size != chunk[1]:
            raise ValueError("a piece of memory has another size than its bytes")
        self._driver.to_device(address, self._address + chunk[0], size)

    def _load(self, described: dict[str, Any]) -> None:
        image = self._bytes(self.document["images"][described["image"]])
        module = self._driver.handle("cuModuleLoadData", image)
        self._modules.append(module)
        self._images.append(image)
        for variable in described["variables"]:
            here = self._set(module, variable)
            self._moved.append((variable["address"], variable["size"], here))

    def _set(self, module: int, variable: dict[str, Any]) -> int:
        address, size = Pointer(), Size()
        self._driver.call(
            "cuModuleGetGlobal_v2",
            ctypes.byref(address),
            ctypes.byref(size),
            module,
            variable["name"].encode(),
        )
        if size.value != variable["size"]:
            raise ValueError(f"variable {variable['name']} has another size here")
        self._copy(address.value or 0, size.value, variable["place"])
        return address.value or 0

    def _graph(self, described: dict[str, Any]) -> int:
        driver = self._driver
        graph = driver.handle("cuGraphCreate", 0)
        nodes = [self._node(graph, each) for each in described["nodes"]]
        pairs = described["edges"]
        count = len(pairs)
        begin, end, data = ((kind * count)() for kind in (Pointer, Pointer, Edge))
        for index, (source, target, digits) in enumerate(pairs):
            begin[index], end[index] = nodes[source], nodes[target]
            data[index] = Edge.from_buffer_copy(bytes.fromhex(digits))
        if count:
            driver.call("cuGraphAddDependencies_v2", graph, begin, end, data, count)
        return graph

    def _node(self, graph: int, described: dict[str, Any]) -> int:
        driver, kind = self._driver, described["kind"]
        if kind == "kernel":
            return self._kernel(graph, described)
        if kind == "copy":
            copied = MemcpyNode(**_integers(MemcpyNode, described))
            copied.source, copied.target = self._here(copied.source), self._here(copied.target)
            copied.source_type = copied.target_type = UNIFIED
            for name in ("source_host", "target_host", "source_array", "target_array"):
                setattr(copied, name, None)
            return driver.handle(
                "cuGraphAddMemcpyNode", graph, None, 0, ctypes.byref(copied), self._context
            )
        if kind == "fill":
            filled = MemsetNode(**_integers(MemsetNode, described))
            filled.target = self._here(filled.target)
            return driver.handle(
                "cuGraphAddMemsetNode", graph, None, 0, ctypes.byref(filled), self._context
            )
        if kind == "graph":
            child = self._graph(described["graph"])
            node = driver.handle("cuGraphAddChildGraphNode", graph, None, 0, child)
            driver.call("cuGraphDestroy", child)  # the node has a copy
            return node
        if kind == "empty":
            return driver.handle("cuGraphAddEmptyNode", graph, None, 0)
        raise ValueError(f"no node is a {kind}")

    def _here(self, address: int) -> int:
        """An address of the other process in this one: variables lie elsewhere."""
        for there, size, here in self._moved:
            if 0 <= address - there < size:
                return here + address - there
        return address

    def _kernel(self, graph: int, described: dict[str, Any]) -> int:
        driver, name = self._driver, described["name"]
        key = (described["module"], name)
        if key not in self._functions:
            module = self._modules[described["module"]]
            function = driver.handle("cuModuleGetFunction", module, name.encode())
            for number in SETTABLE:
                if value := int(described["function"].get(str(number), 0)):
                    driver.call("cuFuncSetAttribute", function, number, value)
            self._functions[key] = function
        function = self._functions[key]
        values = [bytes.fromhex(digits) for _, digits in described["parameters"]]
        offsets = [offset for offset, _ in described["parameters"]]
        if list(zip(offsets, map(len, values), strict=True)) != layout(driver, function):
            raise ValueError(f"kernel {name} has other parameters here")
        buffers = [ctypes.create_string_buffer(self._moved_in(each), len(each)) for each in values]
        pointers = (Pointer * len(buffers))(*(ctypes.addressof(each) for each in buffers))
        params = KernelNode(
            function=function,
            grid=tuple(described["grid"]),
            block=tuple(described["block"]),
            shared_bytes=described["shared_bytes"],
            parameters=ctypes.addressof(pointers) if buffers else None,
        )
        node = driver.handle("cuGraphAddKernelNode_v2", graph, None, 0, ctypes.byref(params))
        for number in ATTRIBUTES:
            self._attribute(node, number, described["attributes"].get(str(number)))
        return node

    def _moved_in(self, value: bytes) -> bytes:
        words = bytearray(value)
        for at in range(0, len(words) - 7, 8):
            address = int.from_bytes(words[at : at + 8], "little")
            words[at : at + 8] = self._here(address).to_bytes(8, "little")
        return bytes(words)

    def _attribute(self, node: int, number: int, digits: str | None) -> None:
        if digits is None:
            return
        wanted, default = Attribute.from_buffer_copy(bytes.fromhex(digits)), Attribute()
        status = self._driver.status(
            "cuGraphKernelNodeGetAttribute", node, number, ctypes.byref(default)
        )
        if status or bytes(default) != bytes(wanted):
            self._driver.call("cuGraphKernelNodeSetAttribute", node, number, ctypes.byref(wanted))


def _integers(kind: type[ctypes.Structure], described: dict[str, Any]) -> dict[str, int]:
    return {field[0]: int(described[field[0]]) for field in kind._fields_}
