"""Parts of answers as OpenAI, vLLM and llama.cpp spell them: usage, log-probabilities, counters, trees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from slipstream.text import Tokenizer
from slipstream.text.pieces import Style
from slipstream.tree import TokenTree
from slipstream.types import Completion, Decision, Logprob, Logprobs, Stats, best_tokens

_LOWEST = -9999.0  # JSON has no minus infinity


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, **details: int) -> dict[str, Any]:
    """Tokens that were read and written; `details` of those that were written."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    return {**counts, "completion_tokens_details": details} if details else counts


def total(completions: Iterable[Completion]) -> Stats:
    """The counters of all choices."""
    stats = Stats()
    for completion in completions:
        stats.add(replace(completion.stats, origins=[], decisions=[]))
    return stats


def speculation(stats: Stats) -> dict[str, Any]:
    """What speculation did for a request, under vLLM's names. A tree counts with its depth, as a chain would."""
    offered, reached = sum(stats.offered_by_depth), [stats.drafting_steps, *stats.accepted_by_depth, 0]
    return {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.accepted / offered if offered else 0.0,
        "acceptance_histogram": [more - less for more, less in pairwise(reached)],
        "num_spec_steps": stats.drafting_steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": offered,
        "num_spec_tokens": len(stats.offered_by_depth),
        "num_draft_nodes": stats.drafted,
        "num_steps": stats.steps,
        "num_draft_faults": stats.draft_faults,
        "tokens_per_step": stats.tokens_per_step,
        "lossy": stats.lossy,
    }


def timings(stats: Stats, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """How long a request took, under llama.cpp's names; prompts count until the first token."""
    read, predicted = prompt_tokens - cached_tokens, stats.decoded or stats.emitted
    decode_ms = stats.decode_ms if stats.decoded else stats.prefill_ms
    return {
        "cache_n": cached_tokens,
        "prompt_n": read,
        "prompt_ms": stats.prefill_ms,
        "prompt_per_token_ms": stats.prefill_ms / read if read else 0.0,
        "prompt_per_second": 1000 * read / stats.prefill_ms if stats.prefill_ms else 0.0,
        "predicted_n": stats.emitted,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": decode_ms / predicted if predicted else 0.0,
        "predicted_per_second": stats.tokens_per_second,
        "draft_n": sum(stats.offered_by_depth),
        "draft_n_accepted": stats.accepted,
    }


def counters(completions: Sequence[Completion], prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """`metrics` and `timings` of an answer."""
    stats = total(completions)
    return {
        "metrics": {"speculative_decoding": speculation(stats)},
        "timings": timings(stats, prompt_tokens, cached_tokens),
    }


# -- log-probabilities ------------------------------------------------------------------------------------------------


def chat_logprobs(entries: Sequence[Logprobs], tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    return {"content": [_chat_entry(entry, tokenizer, top) for entry in entries]}


def _chat_entry(entry: Logprobs, tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    chosen, *_ = (_spelled(id, entry, tokenizer) for id in entry)
    return {**chosen, "top_logprobs": [_spelled(id, entry, tokenizer) for id in best_tokens(entry, top)]}


def _spelled(id: int, entry: Logprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    text = entry[id].decoded_token or ""
    piece = text.encode() if tokenizer.decoding.style is Style.OTHER else tokenizer.piece(id)
    return {"token": text, "logprob": max(entry[id].logprob, _LOWEST), "bytes": list(piece)}


def completion_logprobs(
    tokens: Sequence[int], entries: Sequence[Logprobs | None], tokenizer: Tokenizer, top: int, offset: int
) -> dict[str, Any]:
    """`logprobs` of a completion's choice; `offset`: where its text starts."""
    texts, offsets = [tokenizer.token_text(token) for token in tokens], []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [e and max(e[t].logprob, _LOWEST) for t, e in zip(tokens, entries, strict=True)],
        "top_logprobs": [
            e and {e[id].decoded_token or "": max(e[id].logprob, _LOWEST) for id in best_tokens(e, top)}
            for e in entries
        ]
        if top
        else None,
        "text_offset": offsets,
    }


def prompt_logprobs(entries: Sequence[Logprobs | None]) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt, as vLLM has them: by token id; none for the first token."""
    return [None if entry is None else {str(id): _scored(one) for id, one in entry.items()} for entry in entries]


def _scored(one: Logprob) -> dict[str, Any]:
    return {"logprob": max(one.logprob, _LOWEST), "rank": one.rank, "decoded_token": one.decoded_token}


# -- trees ------------------------------------------------------------------------------------------------------------


Traced = tuple[TokenTree, Decision | None]  # a step


def drawn_trees(steps: Sequence[Traced], tokens: Sequence[int], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """The trees of some steps, with the nodes on the way that these tokens took, and the policy's reasons."""
    drawn = []
    for tree, decision in steps:
        accepted = tree.walk(tokens)
        tokens = tokens[len(accepted) + 1 :]
        drawn.append(
            {
                "tokens": list(tree.tokens),
                "texts": [tokenizer.token_text(token) for token in tree.tokens] if tokenizer is not None else [],
                "parents": list(tree.parents),
                "origins": list(tree.origins),
                "confidence": [round(float(value), 6) for value in tree.confidence],
                "accepted": accepted,
                **({} if decision is None else {"decision": decision.reason}),
            }
        )
    return drawn
