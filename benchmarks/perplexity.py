"""The quality cost of quantised weights: the perplexity of one text, in each mode, on a CPU.

    python -m benchmarks.perplexity                         # the default model
    python -m benchmarks.perplexity -m MODEL [--modes none,int8,int4] [--tokens 2048] [--json FILE]

The text is fixed (`perplexity.txt`, English and code, some 2,100 tokens) and read in one prefill. Perplexity is exp of
the mean of -log p(token | all tokens before it); what counts is its ratio to that of `none`.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional

from slipstream.attention import tree_segment
from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.models.load import load_model, weight_bytes
from slipstream.models.model import Model

TEXT = Path(__file__).with_name("perplexity.txt")
_CHUNK = 256  # tokens in one pass
_STORE = "text"


@torch.inference_mode()
def perplexity(model: Model, ids: list[int]) -> float:
    """The perplexity of all tokens but the first."""
    cache = PagedCache(-(-len(ids) // PAGE_SIZE) + 1)
    model.add_store(cache, _STORE)
    table = cache.open([])
    cache.reserve(table, len(ids))
    total, asked = 0.0, ids[:-1]
    for start in range(0, len(asked), _CHUNK):
        chunk = asked[start : start + _CHUNK]
        segment = replace(tree_segment(table, start, chunk, None), logits_from=0)
        logits = model.forward(cache, _STORE, [segment]).logits
        follow = torch.tensor(ids[start + 1 : start + 1 + len(chunk)])
        total += float(functional.cross_entropy(logits.double(), follow, reduction="sum"))
    return math.exp(total / len(asked))


def measure(name: str, mode: str, tokens: int) -> dict[str, float]:
    """Perplexity, tokens of the text, and MiB of the weights in one mode."""
    model, tokenizer = load_model(name, dtype="float32", device="cpu", quantize=mode)
    assert tokenizer is not None, f"{name} has no tokenizer"
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: min(tokens, model.config.context)]
    weights = weight_bytes(model.config, model.dtype, mode) / 2**20
    return {"perplexity": perplexity(model, ids), "tokens": len(ids), "weights_mib": round(weights, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=DEFAULT_MODEL)
    parser.add_argument("--modes", default="none,int8,int4")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    print(f"{arguments.model}, torch {torch.__version__}, threads: {torch.get_num_threads()}")
    for mode in arguments.modes.split(","):
        found[mode] = measure(arguments.model, mode, arguments.tokens)
        result, first = found[mode], next(iter(found.values()))
        change = result["perplexity"] / first["perplexity"] - 1
        print(
            f"{mode:5} perplexity {result['perplexity']:8.4f} ({change:+.2%}) over {result['tokens']:,} tokens, "
            f"weights {result['weights_mib']:,.1f} MiB",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"model": arguments.model, "modes": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
