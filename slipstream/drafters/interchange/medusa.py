"""Medusa heads in the published layout (`0.0.linear.weight`) and in vLLM's (`blocks.`, `lm_heads.`).

Both are read, the second is written. A published head is a block, h + silu(A h + a), on the target's last normed hidden
state, with output rows of its own. vLLM's layout may leave rows out; `token_map` then holds the tokens of the others.
vLLM 0.32 loads heads only if no row is left out: those of tokens that are never drafted are written as zeros.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from slipstream.drafters.heads.head_checkpoint import Made, Trained
from slipstream.drafters.heads.head_drafter import settings_of
from slipstream.drafters.heads.medusa_head import MedusaSettings
from slipstream.drafters.interchange.foreign import Foreign
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.errors import CorruptFile, DraftMismatch, OptionError

METHOD = MedusaDrafter.name  # the same name as in vLLM's config
_MAP = "token_map"
_VLLM = {r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)": r"\1.\2.linear.\3", r"lm_heads\.(\d+)\.weight": r"\1.1.weight"}


def recognises(foreign: Foreign) -> bool:
    """Whether these are heads of this kind."""
    return "0.0.linear.weight" in map(_published, foreign.weights)


# -- theirs to ours ---------------------------------------------------------------------------------------------------


def imported(foreign: Foreign, made: Made) -> Trained:
    """The heads as a checkpoint: the same numbers, stacked. What cannot be represented is refused."""
    weights = {_published(name): weight for name, weight in foreign.weights.items()}
    dtype, width = foreign.dtype, made.hidden_size
    heads = _count(foreign, weights)
    listed = weights.pop(_MAP, None)
    vocab = torch.arange(made.vocab_size) if listed is None else listed.long()
    if int(vocab.max()) >= made.vocab_size or len(vocab.unique()) != len(vocab):
        raise DraftMismatch(f"{foreign.name}: {_MAP} names tokens twice, or tokens that the target does not have")
    for head in range(heads):
        weights.setdefault(f"{head}.0.linear.bias", weights["0.0.linear.weight"].new_zeros(width))
        rows = weights.get(f"{head}.1.weight")
        if rows is not None and listed is not None and len(rows) == made.vocab_size:
            weights[f"{head}.1.weight"] = rows[vocab]
    replace(foreign, weights=weights).require(_shapes(heads, width, len(vocab)))
    order = vocab.argsort()
    ours = {
        "enter.weight": torch.cat([weights[f"{head}.0.linear.weight"] for head in range(heads)]),
        "enter.bias": torch.cat([weights[f"{head}.0.linear.bias"] for head in range(heads)]),
        "rows": torch.cat([weights[f"{head}.1.weight"][order] for head in range(heads)]),
    }
    settings = MedusaSettings(vocabulary=len(vocab), heads=heads, own_rows=True)
    return Trained(METHOD, settings_of(settings), made, vocab[order], ours, {"imported": foreign.name, "dtype": dtype})


def _published(name: str) -> str:
    """A weight's name in the published layout."""
    name = re.sub(r"^medusa_heads?\.", "", name)
    for theirs, published in _VLLM.items():
        name = re.sub(f"^{theirs}$", published, name)
    return name


def _count(foreign: Foreign, weights: dict[str, torch.Tensor]) -> int:
    blocks = {tuple(map(int, name.split(".")[:2])) for name in weights if re.match(r"\d+\.\d+\.linear\.", name)}
    if any(block for _, block in blocks):
        raise foreign.refuse("has several blocks per head, but ours have one")
    heads = len(blocks)
    if blocks != {(head, 0) for head in range(heads)}:
        raise CorruptFile(f"{foreign.name} lacks some of its heads", hint="is the download complete?")
    return heads


def _shapes(heads: int, width: int, tokens: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        shapes[f"{head}.0.linear.weight"] = (width, width)
        shapes[f"{head}.0.linear.bias"] = (width,)
        shapes[f"{head}.1.weight"] = (tokens, width)
    return shapes


# -- ours to theirs ---------------------------------------------------------------------------------------------------


def exported(trained: Trained, context: int) -> Foreign:
    """The heads in vLLM's layout."""
    settings = MedusaSettings(**trained.settings)
    if not settings.own_rows:
        raise OptionError(
            "these heads have a second matrix and the target's output rows, which vLLM's layout cannot hold",
            hint="heads that were trained with own_rows=true can be exported",
        )
    heads, made, ours = settings.heads, trained.target, trained.weights
    parts = {name: ours[name].chunk(heads) for name in ("enter.weight", "enter.bias", "rows")}
    dtype = trained.provenance.get("dtype", "float32")
    weights: dict[str, torch.Tensor] = {}
    for head in range(heads):
        weights[f"blocks.{head}.layers.0.weight"] = parts["enter.weight"][head]
        weights[f"blocks.{head}.layers.0.bias"] = parts["enter.bias"][head]
        rows = parts["rows"][head]
        whole = rows.new_zeros(made.vocab_size, rows.shape[1])
        weights[f"lm_heads.{head}.weight"] = whole.index_copy_(0, trained.vocab, rows)
    weights = {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}
    if len(trained.vocab) < made.vocab_size:
        weights[_MAP] = trained.vocab  # for an import; vLLM does not read it, since no row is left out
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": METHOD,
        "hidden_size": made.hidden_size,
        "vocab_size": made.vocab_size,
        "truncated_vocab_size": made.vocab_size,
        "num_heads": heads,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "max_seq_len": context,
        "torch_dtype": dtype,
    }
    return Foreign(METHOD, config, weights)
