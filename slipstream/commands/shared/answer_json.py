"""An answer in the JSON of `run --json` and `batch`."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slipstream.types import best_tokens

if TYPE_CHECKING:
    from slipstream.types import Completion, Logprob, SamplingParams

_SEED_BITS = 53  # JavaScript rounds longer integers, and a rounded seed is another seed


def seeded(params: SamplingParams) -> SamplingParams:
    """The same parameters with a seed that survives JSON: the user's own, or a fresh one."""
    return params if params.seed is not None else replace(params, seed=secrets.randbits(_SEED_BITS))


def choice_as_dict(completion: Completion, params: SamplingParams) -> dict[str, Any]:
    """One choice as plain numbers and strings."""
    choice: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "stats": completion.stats.as_dict(),
    }
    if completion.logprobs is not None:
        choice["logprobs"] = [
            _entry(token, found[token])
            | {"top": [_entry(best, found[best]) for best in best_tokens(found, params.logprobs or 0)]}
            for token, found in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
    return choice


def _entry(token: int, found: Logprob) -> dict[str, Any]:
    finite = found.logprob if math.isfinite(found.logprob) else None  # JSON has no infinity
    return {"token_id": token, "text": found.decoded_token, "logprob": finite, "rank": found.rank}
