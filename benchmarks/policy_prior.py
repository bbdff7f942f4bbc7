"""Makes the policy's prior that ships for the built-in model: how often drafts were accepted, without costs.

    python -m benchmarks.policy_prior [--model smollm2-135m] [--each 4] [--tokens 64]

Answers the prompts of the workload that are of none of the kinds of `benchmarks.never_slower`, with each drafter alone
and with all, at three temperatures, one and eight at a time. Writes `slipstream/policy/shipped/FINGERPRINT.json`.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from benchmarks.never_slower import KINDS
from slipstream import LLM, SamplingParams
from slipstream.bench.encoding import Encoder
from slipstream.bench.prompts import workload
from slipstream.policy.saved import SHIPPED, write

_TEMPERATURES = (0.0, 0.7, 1.0)  # one of each class
_BATCHES = (8, 1)
_SETTINGS: tuple[str | dict[str, object], ...] = (
    {"method": "auto", "drafters": ["suffix"]},
    {"method": "auto", "drafters": ["eagle3"]},
    "auto",
)
_MOST = 128.0  # counts of a class that ship: a user's own texts soon outweigh them


def learnt(model: str, each: int, tokens: int) -> tuple[str, dict[str, Any]]:
    """The fingerprint of the model, and what its policy has learnt from the prompts."""
    llm = LLM(model, quantize="int8", speculate="auto", cache_tokens=32_768)
    llm.engine.set_runners()  # with a policy without a prior
    policy = llm.engine.policy
    encoder = Encoder(llm.get_tokenizer())
    others = dict.fromkeys(prompt.category for prompt in workload() if prompt.category not in KINDS)
    prompts = [prompt for kind in others for prompt in [p for p in workload() if p.category == kind][:each]]
    for batch, temperature, setting in product(_BATCHES, _TEMPERATURES, _SETTINGS):
        how = SamplingParams(temperature=temperature, seed=0, max_tokens=tokens, speculate=setting)
        dict(llm.answers([(encoder.encode(prompt), how) for prompt in prompts], batch, text=True))
    state = {"worth": policy.known.worth.state(), "record": policy.known.record.state()}
    fingerprint = llm.model.fingerprint
    llm.close()
    return fingerprint, {**state, "worth": {key: _lighter(counts) for key, counts in state["worth"].items()}}


def _lighter(counts: list[list[list[float]]]) -> list[list[list[float]]]:
    """The same acceptance rates with smaller counts."""
    return [
        [[round(number * min(1.0, _MOST / max(offered, 1.0)), 1) for number in (offered, accepted)]
         for offered, accepted in bins]
        for bins in counts
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--each", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    fingerprint, state = learnt(given.model, given.each, given.tokens)
    SHIPPED.mkdir(exist_ok=True)
    write(SHIPPED / f"{fingerprint}.json", state)
    print(f"{SHIPPED / fingerprint}.json")


if __name__ == "__main__":
    main()
