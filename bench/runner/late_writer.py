"""A kernel that lets its dependents begin at once, and writes their inputs much later.

Programmatic dependent launch exists since compute capability 9.0. A kernel launched with the
attribute begins before the preceding kernel has ended, and must wait (`griddepcontrol.wait`) before
it accesses memory. Calls that are separate graphs never have such a neighbour, but kernels in
engines do. The kernel is PTX, so that only the driver compiles it.
"""

from __future__ import annotations

import ctypes

from .driver import CudaError

WAIT_NS = 200_000
"""Nanoseconds that the kernel sleeps before it writes; a launch takes a hundredth of that."""
_BLOCKS, _THREADS = 32, 256
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_ulonglong
_PTX = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry late_copy(.param .u64 to, .param .u64 from, .param .u64 words, .param .u64 wait_ns)
{
  .reg .pred %p;
  .reg .b32 %block, %width, %thread, %blocks, %value;
  .reg .b64 %to, %from, %words, %wait, %begin, %now, %index, %step, %offset, %place;
  griddepcontrol.launch_dependents;
  ld.param.u64 %to, [to];
  ld.param.u64 %from, [from];
  ld.param.u64 %words, [words];
  ld.param.u64 %wait, [wait_ns];
  mov.u64 %begin, %globaltimer;
sleep:
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %begin;
  setp.lt.u64 %p, %now, %wait;
  @%p bra sleep;
  mov.u32 %block, %ctaid.x;
  mov.u32 %width, %ntid.x;
  mov.u32 %thread, %tid.x;
  mov.u32 %blocks, %nctaid.x;
  mul.wide.u32 %index, %block, %width;
  cvt.u64.u32 %offset, %thread;
  add.u64 %index, %index, %offset;
  mul.wide.u32 %step, %blocks, %width;
copy:
  setp.ge.u64 %p, %index, %words;
  @%p bra done;
  shl.b64 %offset, %index, 3;
  add.u64 %place, %from, %offset;
  ld.global.u64 %now, [%place];
  add.u64 %place, %to, %offset;
  st.global.u64 [%place], %now;
  add.u64 %index, %index, %step;
  bra copy;
done:
  ret;
}
"""


class LateWriter:
    """The late-writing kernel, loaded into the driver.

    Raises:
        CudaError: there is no driver, or it rejects the kernel.
    """

    def __init__(self) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"no driver: {error}") from error
        self._module, self._function = _POINTER(), _POINTER()
        self._call("cuModuleLoadData", ctypes.byref(self._module), _PTX)
        function = ctypes.byref(self._function)
        self._call("cuModuleGetFunction", function, self._module, b"late_copy")

    def launch(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy `size` bytes late; the size and both addresses are multiples of 8."""
        values = (_LONG(target), _LONG(source), _LONG(size // 8), _LONG(WAIT_NS))
        arguments = (_POINTER * len(values))(*(ctypes.addressof(value) for value in values))
        self._call(
            "cuLaunchKernel",
            self._function,
            _BLOCKS,
            1,
            1,
            _THREADS,
            1,
            1,
            0,
            _POINTER(stream),
            arguments,
            None,
        )

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise CudaError(f"{name}: the driver returned {status}")
