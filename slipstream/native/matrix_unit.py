"""Whether the CPU's matrix unit (AMX) may be used.

The CPU announces it, the operating system must grant its registers, and some virtual machines announce what they then
forbid. A forbidden instruction ends the process, so a child process tries first.
"""

from __future__ import annotations

import platform
import subprocess
import sys

from slipstream.native import matrix_unit_trial as trial

_PATIENCE = 10  # seconds; the child process takes a thirtieth of one


def matrix_unit_works() -> bool:
    """Request its registers, and try it in a child process."""
    if platform.system() != "Linux" or platform.machine() != "x86_64" or not trial.granted():
        return False
    try:
        command = [sys.executable, "-I", "-S", trial.__file__]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE).returncode == 0
    except (OSError, subprocess.SubprocessError):  # no interpreter, or a timeout
        return False
