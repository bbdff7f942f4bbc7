"""Weights for native multi-token prediction (MTP), which some checkpoints have beside their own layers.

They are whole layers after the last one, recognised by the matrix that joins a hidden state with an embedding
(DeepSeek-V3, GLM, GGUF), or have a prefix of their own (Qwen, MiMo). The decoder ignores them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

APART = ("mtp.", "model.mtp.", "model.mtp_layers.")


def mtp_tensors(tensors: Iterable[str], prefix: str, joint: str, layers: int) -> tuple[str, ...]:
    """Which of a file's `tensors` are for MTP, sorted.

    Layer i's names begin with `prefix` and i; a layer after the first `layers` is an MTP layer if it has `joint`.
    """
    names = sorted(tensors)
    held = set(names)
    number = re.compile(rf"{re.escape(prefix)}(\d+)\.")

    def is_mtp(name: str) -> bool:
        if name.startswith(APART):
            return True
        found = number.match(name)
        return found is not None and int(found[1]) >= layers and f"{found[0]}{joint}" in held

    return tuple(filter(is_mtp, names))
