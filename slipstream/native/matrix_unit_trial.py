"""A child process that uses the CPU's matrix unit and exits with 0, or is killed."""

from __future__ import annotations

import ctypes
import mmap

ARCH_PRCTL, ASK_FOR, TILE_DATA = 158, 0x1023, 18  # the Linux call that requests the unit's registers
_CODE = bytes.fromhex(
    "c4e2784907"  # ldtilecfg [rdi]
    "c4e27b49c0"  # tilezero tmm0
    "c4e27b49c8"  # tilezero tmm1
    "c4e27b49d0"  # tilezero tmm2
    "c4e26a5ec1"  # tdpbsud tmm0, tmm1, tmm2
    "c4e27849c0"  # tilerelease
    "c3"
)
_REGISTERS = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])  # sixteen rows of 64 bytes each


def granted() -> bool:
    """Request the registers for this process."""
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ASK_FOR, TILE_DATA) == 0)


def _try() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(_CODE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CFUNCTYPE(None, ctypes.c_char_p)(start)(_REGISTERS)


if __name__ == "__main__":
    if not granted():
        raise SystemExit(1)
    _try()
