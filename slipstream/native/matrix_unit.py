"""Whether the processor's matrix unit may be used.

The processor announces it, the kernel must be asked for its registers, and some virtual machines announce what they
then forbid. A forbidden instruction ends the process, so another one tries first.
"""

from __future__ import annotations

import platform
import subprocess
import sys

from slipstream.native import matrix_unit_trial as trial

_PATIENCE = 10  # seconds; it takes a thirtieth of one


def matrix_unit_works() -> bool:
    """Ask for its registers, and have it tried."""
    if platform.system() != "Linux" or platform.machine() != "x86_64" or not trial.granted():
        return False
    try:
        command = [sys.executable, "-I", "-S", trial.__file__]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE).returncode == 0
    except (OSError, subprocess.SubprocessError):  # no interpreter to be found, or one that does not come back
        return False
