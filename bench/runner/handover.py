"""Captured calls as plain data: device code, parameters, order and memory.

A graph that was captured from a candidate's call is described so that another process can build it
again: kernels with their images as the driver loaded them, launch attributes, edges, parameters,
copies, fills, the variables of its modules and the memory that its parameters point to. No host
code of the candidate goes along. What cannot be carried is said.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any

from .driver import (
    ARRAY,
    DEVICE,
    HOST,
    MEMORY_TYPE,
    UNIFIED,
    Attribute,
    CudaDriver,
    DriverError,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Pointer,
    Size,
)
from .graph_nodes import edges_of, function_of, module_of, nodes_of, parameters_of, plain, trait
from .images import LoadedImages, fat_binaries, mapped_files
from .placed import merged

KERNEL, MEMCPY, MEMSET, CHILD, EMPTY = 0, 1, 2, 4, 5
REFUSED = {
    3: "a function on the host",
    6: "a wait for an event outside of the graph",
    7: "an event outside of the graph",
    8: "an external semaphore",
    9: "an external semaphore",
    10: "an allocation inside of the graph (cudaMallocAsync)",
    11: "an allocation inside of the graph (cudaMallocAsync)",
    12: "operations on memory words",
    13: "a condition",
}
ATTRIBUTES = (1, 2, 4, 5, 8, 9, 10, 11, 14)
"""CUlaunchAttributeID: access policy window, cooperative, cluster, its scheduling, priority, memory
synchronisation domains, preferred cluster, carveout."""
DEVICE_UPDATABLE = 13
SETTABLE = (8, 9, 14, 15)
"""CUfunction_attribute: largest dynamic shared memory, carveout, large clusters, scheduling."""
_TRAITS = (0, 1, 2, 3, 4)
MOST_PIECES = 4096
LARGEST_FILE = 1 << 28
"""Bytes of the largest file that is searched for images."""


class CannotCarry(Exception):
    """A captured call has a part that only its own process can run."""


class Parcel:
    """Bytes for another process: chunks, then the document that names them.

    Args:
        address: host memory to write to.
        capacity: its size in bytes.
    """

    def __init__(self, address: int, capacity: int) -> None:
        self._address, self._capacity, self._at = address, capacity, 0

    def add(self, data: bytes) -> list[int]:
        """Write bytes; return their place as [offset, bytes]."""
        place = self.room(len(data))
        ctypes.memmove(self._address + place[0], data, len(data))
        return place

    def add_device(self, driver: CudaDriver, address: int, size: int) -> list[int]:
        """Write bytes of device memory."""
        place = self.room(size)
        driver.to_host(self._address + place[0], address, size)
        return place

    def room(self, size: int) -> list[int]:
        if self._at + size > self._capacity:
            raise CannotCarry(f"its memory and code take more than {self._capacity} bytes")
        place = [self._at, size]
        self._at += size
        return place


class HandOver:
    """Describes captured graphs.

    Args:
        driver: the driver.
        images: images of all modules of this process.
        parcel: where bytes go.
        owned: spans [address, bytes] of the buffer sets, whose contents are not carried.
    """

    def __init__(
        self,
        driver: CudaDriver,
        images: LoadedImages,
        parcel: Parcel,
        owned: Sequence[Sequence[int]],
    ) -> None:
        self._driver, self._images, self._parcel = driver, images, parcel
        self._owned = [tuple(span) for span in owned]
        self._memory: dict[int, int] = {}
        self._modules: dict[int, int] = {}
        self._described: list[dict[str, Any]] = []
        self._used: dict[int, int] = {}
        self._places: list[list[int]] = []
        self._problem = ""
        self.notes: list[str] = []

    def write(
        self,
        graphs: Sequence[int],
        segments: Sequence[Sequence[int]],
        rooms: Sequence[Sequence[int]],
    ) -> list[int]:
        """Describe graphs, and the memory that belongs to them besides.

        Args:
            graphs: handles of the graphs.
            segments: spans [address, bytes] of memory that the candidate allocated.
            rooms: ranges [address, bytes] that were reserved as a whole.

        Returns:
            The document's place in the parcel as [offset, bytes].

        Raises:
            CannotCarry: a call has a part that cannot be carried.
        """
        for address, size in segments:
            self._memory[address] = size
        described = [self._graph(graph) for graph in graphs]
        pieces = []
        if len(self._memory) > MOST_PIECES:
            raise CannotCarry(f"its memory has {len(self._memory)} parts")
        for address, size in sorted(self._memory.items()):
            pieces.append([address, size, *self._parcel.add_device(self._driver, address, size)])
        spans = [*self._owned, *self._memory.items()]
        document = {
            "graphs": described,
            "images": self._places,
            "modules": self._described,
            "rooms": [list(room) for room in rooms],
            "spans": merged(spans, self._driver.granularity()),
            "pieces": pieces,
            "notes": self.notes,
        }
        return self._parcel.add(json.dumps(document).encode())

    def _graph(self, graph: int) -> dict[str, Any]:
        nodes = nodes_of(self._driver, graph)
        place = {node: index for index, node in enumerate(nodes)}
        return {
            "nodes": [self._node(node) for node in nodes],
            "edges": [
                [place[begin], place[end], data]
                for begin, end, data in edges_of(self._driver, graph)
            ],
        }

    def _node(self, node: int) -> dict[str, Any]:
        kind = ctypes.c_int()
        self._driver.call("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value == KERNEL:
            return self._kernel(node)
        if kind.value == MEMCPY:
            copied = MemcpyNode()
            self._driver.call("cuGraphMemcpyNodeGetParams", node, ctypes.byref(copied))
            for kind_, address in (
                (copied.source_type, copied.source or copied.source_host),
                (copied.target_type, copied.target or copied.target_host),
            ):
                self._on_device(kind_, address or 0, "a copy")
            return {"kind": "copy", **plain(copied)}
        if kind.value == MEMSET:
            filled = MemsetNode()
            self._driver.call("cuGraphMemsetNodeGetParams", node, ctypes.byref(filled))
            self._on_device(UNIFIED, filled.target, "a fill")
            return {"kind": "fill", **plain(filled)}
        if kind.value == CHILD:
            child = self._driver.handle_of(node)
            return {"kind": "graph", "graph": self._graph(child)}
        if kind.value == EMPTY:
            return {"kind": "empty"}
        what = REFUSED.get(kind.value, f"a node of kind {kind.value}")
        raise CannotCarry(f"a call has {what}")

    def _on_device(self, kind: int, address: int, what: str) -> None:
        if kind in (DEVICE, UNIFIED) and self._reaches(address):
            return
        where = {HOST: "host memory", ARRAY: "an array"}.get(kind, "memory that is not the GPU's")
        raise CannotCarry(f"{what} reads or writes {where}")

    def _kernel(self, node: int) -> dict[str, Any]:
        driver, params = self._driver, KernelNode()
        driver.call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
        function, name = function_of(driver, params)
        module = module_of(driver, function)
        traits = [trait(driver, function, each) for each in _TRAITS]
        place = self._module(module, name, traits)  # its variables must be known below
        values = {}
        for number in (*ATTRIBUTES, DEVICE_UPDATABLE):
            value = Attribute()
            if driver.status("cuGraphKernelNodeGetAttribute", node, number, ctypes.byref(value)):
                continue
            if number == DEVICE_UPDATABLE and value.words[0] & 0xFFFFFFFF:
                raise CannotCarry(f"kernel {name} can be changed by the device")
            if number != DEVICE_UPDATABLE:
                values[number] = bytes(value).hex()
        parameters = parameters_of(driver, function, params)
        for _, data in parameters:
            for at in range(0, len(data) - 7, 8):
                self._reaches(int.from_bytes(data[at : at + 8], "little"))
        return {
            "kind": "kernel",
            "name": name,
            "module": place,
            "grid": list(params.grid),
            "block": list(params.block),
            "shared_bytes": params.shared_bytes,
            "parameters": [[offset, data.hex()] for offset, data in parameters],
            "attributes": values,
            "function": {each: trait(driver, function, each) for each in SETTABLE},
            "traits": traits,
        }

    def _reaches(self, address: int) -> bool:
        """Whether an address is in device memory, which is then carried."""
        if any(begin <= address < begin + size for begin, size in self._owned):
            return True
        if any(begin <= address < begin + size for begin, size in self._memory.items()):
            return True
        for module in self._described:
            if any(0 <= address - each["address"] < each["size"] for each in module["variables"]):
                return True
        if address < 1 << 16 or address >= 1 << 57:
            return False
        kind = self._driver.pointer(MEMORY_TYPE, address)
        if kind is not None and kind & 0xFFFFFFFF == HOST:
            raise CannotCarry("a parameter points to host memory")
        found = self._driver.allocation(address)
        if found is not None:
            self._memory[found[0]] = max(found[1], self._memory.get(found[0], 0))
        return found is not None

    def _module(self, module: int, kernel: str, traits: list[int]) -> int:
        if module not in self._modules:
            index = self._image(module, kernel, traits)
            self._modules[module] = len(self._described)
            self._described.append(
                {"image": self._carried(index), "variables": self._variables(module, index)}
            )
        return self._modules[module]

    def _image(self, module: int, kernel: str, traits: list[int]) -> int:
        """Index of the image that a module was loaded from.

        Several may hold a kernel of one name, as the versions of a Triton kernel do.
        """
        holding = self._images.holding(kernel)
        if told := [index for index in holding if self._images.modules[index] == module]:
            return told[0]
        codes = {self._images.elf(index).kernels[kernel]: index for index in reversed(holding)}
        fitting = [index for index in codes.values() if self._fits(index, kernel, traits)]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            return self._embedded(kernel, traits)
        raise CannotCarry(f"{len(codes)} images hold a kernel {kernel}, and {len(fitting)} fit")

    def _embedded(self, kernel: str, traits: list[int]) -> int:
        """Index of an image from a file of this process, where CUPTI did not tell of it."""
        for path in mapped_files(LARGEST_FILE):
            for container in fat_binaries(path):
                # a compressed one shows no names
                self._images.add(container, 0)
                if self._fits(len(self._images.images) - 1, kernel, traits):
                    self.notes.append(f"{kernel}: its image is from {path}")
                    return len(self._images.images) - 1
                self._images.drop_last()
        why = self._images.problem or self._problem or "no module with it was told of"
        raise CannotCarry(f"the image of kernel {kernel} is not known: {why}")

    def _fits(self, index: int, kernel: str, traits: list[int]) -> bool:
        """Whether a kernel of an image has the same traits, and so may be the one."""
        self._images.paused = True
        try:
            module = self._driver.handle("cuModuleLoadData", self._images.images[index])
            function = self._driver.handle("cuModuleGetFunction", module, kernel.encode())
            same = [trait(self._driver, function, each) for each in _TRAITS] == traits
            self._driver.call("cuModuleUnload", module)
        except DriverError as error:
            self._problem = str(error)
            return False
        finally:
            self._images.paused = False
        return same

    def _carried(self, index: int) -> int:
        if index not in self._used:
            self._used[index] = len(self._places)
            self._places.append(self._parcel.add(self._images.images[index]))
        return self._used[index]

    def _variables(self, module: int, index: int) -> list[dict[str, Any]]:
        """Variables of a module as they are now, with their addresses in this process."""
        variables = []
        for each in self._images.elf(index).variables:
            address, size = Pointer(), Size()
            try:
                self._driver.call(
                    "cuModuleGetGlobal_v2",
                    ctypes.byref(address),
                    ctypes.byref(size),
                    module,
                    each.name.encode(),
                )
            except DriverError as error:
                self.notes.append(f"variable {each.name}: {error}")
                continue
            if not address.value or not size.value:
                continue
            variables.append(
                {
                    "name": each.name,
                    "address": address.value,
                    "size": size.value,
                    "place": self._parcel.add_device(self._driver, address.value, size.value),
                }
            )
        return variables
