"""Captured calls as data and built again, against a stand-in for CUDA's driver."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from device_images import image

from patcher.bench.runner import driver as cuda
from patcher.bench.runner import images as images_
from patcher.bench.runner.driver import (
    CudaDriver,
    CudaError,
    Edge,
    KernelNode,
    MemcpyNode,
    MemsetNode,
)
from patcher.bench.runner.graph_nodes import edges_of, packed
from patcher.bench.runner.handover import CannotCarry, HandOver, Parcel
from patcher.bench.runner.images import Elf, Variable, fat_binaries, read_elf
from patcher.bench.runner.placed import PlacedMemory, merged
from patcher.bench.runner.rebuilt import Rebuilt

IMAGE = image({"norm": b"12345678", "sum": b"abcdefgh"}, {"table": 64})
ROOM = 32 << 20
CLUSTER, HOST = 4, 1


class Loaded(images_.LoadedImages):
    """Images as CUPTI would have told them."""

    def __init__(self, *told: tuple[bytes, int]) -> None:
        self.problem, self.paused = "", False
        self.images = [each for each, _ in told]
        self.modules = [module for _, module in told]
        self._elves: dict[int, Elf] = {}


@dataclass
class There:
    """A process with captured calls."""

    driver: CudaDriver
    library: Any
    memory: PlacedMemory = field(init=False)
    parcel: Any = field(init=False)

    def __post_init__(self) -> None:
        self.memory = PlacedMemory(self.driver, room=ROOM)
        self.sets, self.scratch = self.memory.take(5 << 20), self.memory.take(100)
        ctypes.memset(self.scratch, 7, 100)
        self.module = self.driver.handle("cuModuleLoadData", IMAGE)
        self.table = self._variable()
        ctypes.memset(self.table, 9, 64)
        self.graph = self.driver.handle("cuGraphCreate", 0)
        self.parcel = ctypes.create_string_buffer(16 << 20)

    def _variable(self) -> int:
        address, size = cuda.Pointer(), cuda.Size()
        where = ctypes.byref(address), ctypes.byref(size)
        self.driver.call("cuModuleGetGlobal_v2", *where, self.module, b"table")
        return address.value or 0

    def kernel(self, name: str, first: int, second: int, of_library: bool = False) -> int:
        function = self.driver.handle("cuModuleGetFunction", self.module, name.encode())
        self.driver.call("cuFuncSetAttribute", function, 8, 100_000)
        values = (cuda.Long(first), cuda.Long(second), ctypes.c_int(-3))
        pointers = (cuda.Pointer * 3)(*(ctypes.addressof(each) for each in values))
        node = KernelNode(
            function=None if of_library else function,
            kernel=function if of_library else None,
            grid=(3, 2, 1),
            block=(128, 1, 1),
            shared_bytes=5,
            parameters=ctypes.addressof(pointers),
        )
        wanted = ctypes.byref(node)
        return self.driver.handle("cuGraphAddKernelNode_v2", self.graph, None, 0, wanted)

    def over(self, loaded: Loaded | None = None, graphs: int = 1) -> list[int]:
        where = Parcel(ctypes.addressof(self.parcel), len(self.parcel))
        owned = [(self.sets, self.memory.spans[self.sets])]
        images = loaded or Loaded((IMAGE, 0))
        over = HandOver(self.driver, images, where, owned)
        segments = [(self.scratch, self.memory.spans[self.scratch])]
        return over.write([self.graph] * graphs, segments, [(self.memory.base, ROOM)])

    def document(self, place: list[int]) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.parcel.raw[place[0] : sum(place)])
        return loaded

    def leave(self) -> None:
        """Make its addresses free, as they are in another process."""
        for address in list(self.memory.spans):
            self.memory.give_back(address)
        self.driver.unreserve(self.memory.base, ROOM)

    def rebuilt(self, place: list[int], size: int | None = None) -> Rebuilt:
        address = ctypes.addressof(self.parcel)
        return Rebuilt(self.driver, address, size or len(self.parcel), place)


@pytest.fixture
def there(double: str) -> There:
    return There(CudaDriver(double), ctypes.CDLL(double))


def test_a_graph_is_the_same_elsewhere(there: There) -> None:
    driver = there.driver
    first = there.kernel("norm", there.sets + 256, there.scratch + 8)
    second = there.kernel("sum", there.scratch, there.table + 16, of_library=True)
    cluster = cuda.Attribute()
    cluster.words[0], cluster.words[1] = 2 | 1 << 32, 1
    driver.call("cuGraphKernelNodeSetAttribute", second, CLUSTER, ctypes.byref(cluster))
    fill = MemsetNode(target=there.scratch, value=1, element_bytes=4, width=10, height=1)
    third = driver.handle("cuGraphAddMemsetNode", there.graph, None, 0, ctypes.byref(fill), 1)
    copy = MemcpyNode(
        source_type=cuda.DEVICE, source=there.table + 4, target_type=cuda.DEVICE,
        target=there.scratch, width=8, height=1, depth=1,
    )  # fmt: skip
    driver.handle("cuGraphAddMemcpyNode", there.graph, None, 0, ctypes.byref(copy), 1)
    early = Edge(from_port=1, type=1)
    ends = (cuda.Pointer * 2)(first, second), (cuda.Pointer * 2)(second, third)
    driver.call("cuGraphAddDependencies_v2", there.graph, *ends, (Edge * 2)(early, Edge()), 2)
    place = there.over(graphs=2)
    told = there.document(place)["graphs"][0]
    there.leave()

    here = there.rebuilt(place)
    assert len(here.graphs) == 2
    assert ctypes.string_at(there.scratch, 100) == b"\7" * 100
    again = HandOver(
        driver, Loaded((IMAGE, 0)), Parcel(ctypes.addressof(there.parcel), 16 << 20),
        [(there.sets, 8 << 20)],
    )._graph(here.graphs[0])  # fmt: skip
    moved = again["nodes"][1]["parameters"][1][1]
    assert moved != told["nodes"][1]["parameters"][1][1]  # the variable lies elsewhere here
    address = int.from_bytes(bytes.fromhex(moved), "little") - 16
    assert ctypes.string_at(address, 64) == b"\11" * 64
    assert again["nodes"][3]["source"] == address + 4
    told["nodes"][1]["parameters"][1][1] = moved
    told["nodes"][3] |= {"source": address + 4, "source_type": 4, "target_type": 4}
    assert json.loads(json.dumps(again)) == told
    assert [data for _, _, data in edges_of(driver, here.graphs[0])] == [
        "010001" + "0" * 10,
        "0" * 16,
    ]
    here.close()
    driver.unreserve(*_reserved(driver, there))  # its addresses are free again


def _reserved(driver: CudaDriver, there: There) -> tuple[int, int]:
    got = driver.reserve(there.memory.base, ROOM)
    assert got == there.memory.base
    return got, ROOM


def test_what_cannot_be_carried_is_said(there: There) -> None:
    node = cuda.Pointer()
    there.library.double_host_node(ctypes.byref(node), cuda.Pointer(there.graph))
    with pytest.raises(CannotCarry, match="a function on the host"):
        there.over()
    there.leave()


def test_host_memory_is_not_carried(there: There) -> None:
    held = ctypes.create_string_buffer(1 << 16)
    there.library.double_know(cuda.Long(ctypes.addressof(held)), cuda.Long(1 << 16), HOST)
    there.kernel("norm", there.sets, ctypes.addressof(held))
    with pytest.raises(CannotCarry, match="host memory"):
        there.over()
    there.leave()


def test_memory_that_a_parameter_points_to_goes_along(there: There) -> None:
    other = there.memory.take(1000)
    ctypes.memset(other, 3, 1000)
    there.kernel("norm", other + 40, 12345)
    place = there.over()
    pieces = [address for address, *_ in there.document(place)["pieces"]]
    assert sorted(pieces) == sorted([there.scratch, other])
    there.leave()
    here = there.rebuilt(place)
    assert ctypes.string_at(other, 1000) == b"\3" * 1000
    here.close()


def test_the_image_of_a_module_is_found(there: There) -> None:
    there.kernel("norm", there.sets, 0)
    other = image({"norm": b"other678"}, {})
    with pytest.raises(CannotCarry, match="2 images hold a kernel norm, and 2 fit"):
        there.over(Loaded((IMAGE, 0), (other, 0)))
    place = there.over(Loaded((other, 0), (IMAGE, there.module), (other, 0)))
    begin, size = there.document(place)["images"][0]
    assert there.parcel.raw[begin : begin + size] == IMAGE
    assert there.document(there.over(Loaded((IMAGE, 0), (IMAGE, 0))))["images"]
    with pytest.raises(CannotCarry, match="the image of kernel norm is not known"):
        there.over(Loaded())
    there.leave()


def test_a_damaged_parcel_is_refused(there: There) -> None:
    there.kernel("norm", there.sets, there.scratch)
    place = there.over()
    with pytest.raises(CudaError, match="are taken in this process"):
        there.rebuilt(place)
    there.leave()
    with pytest.raises(ValueError, match="cut off"):
        there.rebuilt(place, size=sum(place) - 1)
    whole = there.parcel.raw[place[0] : sum(place)]
    fewer = whole.replace(b'[16, "', b'[12, "')
    assert fewer != whole
    ctypes.memmove(ctypes.addressof(there.parcel) + place[0], fewer, len(fewer))
    with pytest.raises(ValueError, match="other parameters here"):
        there.rebuilt(place)
    driver = there.driver
    driver.unreserve(*_reserved(driver, there))  # nothing is left behind


def test_an_old_driver_is_said(tmp_path: Path) -> None:
    with pytest.raises(CudaError, match="no driver"):
        CudaDriver(str(tmp_path / "libcuda.so"))


def test_what_an_image_holds_is_read() -> None:
    assert read_elf(IMAGE) == Elf(
        {"norm": b"12345678", "sum": b"abcdefgh"}, (Variable("table", 64),)
    )
    held = ctypes.create_string_buffer(IMAGE + b"more")
    assert images_.elf_bytes(ctypes.addressof(held)) == len(IMAGE)
    assert read_elf(b".version 8.0") == Elf({}, ())
    with pytest.raises(ValueError, match="damaged"):
        read_elf(IMAGE[:-30])


def test_fat_binaries_of_a_file_are_found(tmp_path: Path) -> None:
    header = b"\x50\xed\x55\xba\x01\x00\x10\x00"
    containers = [header + len(data).to_bytes(8, "little") + data for data in (b"x" * 24, b"y" * 8)]
    built = image({"x": b"".join(containers)}, {})
    path = tmp_path / "library.so"
    path.write_bytes(built.replace(b".text.x\0", b".nv_fatbin\0"[:8]))
    assert not list(fat_binaries(str(path)))
    named = image({"_fatbin_of": b"\0" * 8 + b"\0" * 8 + b"".join(containers)}, {})
    path.write_bytes(named.replace(b".text._fatbin_of\0", b".nv_fatbin\0......"))
    assert list(fat_binaries(str(path))) == containers


def test_parameters_in_one_buffer_are_read() -> None:
    data = ctypes.create_string_buffer(b"12345678abcd", 12)
    size = cuda.Size(12)
    extra = (cuda.Pointer * 5)(1, ctypes.addressof(data), 2, ctypes.addressof(size), 0)
    assert packed(ctypes.addressof(extra)) == b"12345678abcd"


def test_spans_are_covered_once() -> None:
    assert merged([(100, 10), (4000, 200), (9000, 1)], 4096) == [(0, 12288)]
    assert merged([(0, 1), (8192, 1)], 4096) == [(0, 4096), (8192, 4096)]


def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    compiler, header = shutil.which("cc"), Path("/usr/local/cuda/include/cuda.h")
    if compiler is None or not header.is_file():
        pytest.skip("no compiler, or no cuda.h here")
    pairs = {
        "CUDA_KERNEL_NODE_PARAMS_v2": KernelNode,
        "CUDA_MEMSET_NODE_PARAMS_v1": MemsetNode,
        "CUDA_MEMCPY3D_v2": MemcpyNode,
        "CUgraphEdgeData": Edge,
        "CUlaunchAttributeValue": cuda.Attribute,
        "CUmemAllocationProp_v1": cuda.Allocation,
        "CUmemAccessDesc_v1": cuda.Access,
    }
    sizes = " ".join(f'printf("%zu ", sizeof({name}));' for name in pairs)
    offsets = " ".join(
        f'printf("%zu ", offsetof({name}));'
        for name in (
            "CUDA_KERNEL_NODE_PARAMS_v2, kernelParams",
            "CUDA_KERNEL_NODE_PARAMS_v2, kern",
            "CUDA_MEMCPY3D_v2, srcDevice",
            "CUDA_MEMCPY3D_v2, dstDevice",
            "CUDA_MEMCPY3D_v2, WidthInBytes",
        )
    )
    source = tmp_path / "sizes.c"
    source.write_text(
        f"#include <cuda.h>\n#include <stddef.h>\n#include <stdio.h>\n"
        f"int main(void) {{ {sizes} {offsets} return 0; }}\n"
    )
    program = tmp_path / "sizes"
    subprocess.run([compiler, f"-I{header.parent}", "-o", program, source], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    mine = [ctypes.sizeof(kind) for kind in pairs.values()]
    mine += [KernelNode.parameters.offset, KernelNode.kernel.offset]
    mine += [MemcpyNode.source.offset, MemcpyNode.target.offset, MemcpyNode.width.offset]
    assert [int(each) for each in said] == mine
