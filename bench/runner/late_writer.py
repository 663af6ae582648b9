"""A kernel that lets its dependents begin at once, and writes what they read much later.

Programmatic dependent launch, since compute capability 9.0: a kernel that is launched with the
attribute begins before the one in front of it has ended, and has to wait (`griddepcontrol.wait`)
before it touches memory. Calls that are graphs of their own never meet such a neighbour; engines
have them. PTX, so that nothing is compiled before a candidate is loaded but by the driver.
"""

from __future__ import annotations

import ctypes

from .cudart import CudaError

WAIT_NS = 200_000
"""How long it sleeps before it writes: a launch takes a hundredth of that."""
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
    """Raises:
    CudaError: the driver does not take it.
    """

    def __init__(self) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"no driver to ask: {error}") from error
        self._module, self._function = _POINTER(), _POINTER()
        self._call("cuModuleLoadData", ctypes.byref(self._module), _PTX)
        found = ctypes.byref(self._function)
        self._call("cuModuleGetFunction", found, self._module, b"late_copy")

    def launch(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy so many bytes, a multiple of 8, late; addresses are multiples of 8 too."""
        values = (_LONG(target), _LONG(source), _LONG(size // 8), _LONG(WAIT_NS))
        given = (_POINTER * len(values))(*(ctypes.addressof(value) for value in values))
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
            given,
            None,
        )

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise CudaError(f"{name}: the driver says {status}")
