"""One log line about long work that the user did not ask for: kernels that are compiled, weights that are converted.

The command line prints messages of the level INFO. A Python program has usually configured no logging, and would be
silent for many seconds.
"""

from __future__ import annotations

import logging
import sys


def notice(log: logging.Logger, message: str, *facts: object) -> None:
    """Log at the level INFO; where no logging is configured, print one line on stderr."""
    log.info(message, *facts)
    if not log.hasHandlers() and sys.stderr is not None:
        print(f"slipstream: {message % facts}", file=sys.stderr, flush=True)
