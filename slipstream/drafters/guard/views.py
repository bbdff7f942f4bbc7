"""What a plug-in sees of a sequence and of the target: what it needs to draft, without write access."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

from slipstream.sequence import Sequence
from slipstream.types import SamplingParams

if TYPE_CHECKING:
    import torch

    from slipstream.models.config import ModelConfig
    from slipstream.models.view import TargetView
    from slipstream.text import Tokenizer


class Tokens(Seq[int]):
    """A read-only list, as long as it was at construction even if it grows later. A slice is a list."""

    __slots__ = ("__items", "__length")

    def __init__(self, items: list[int]) -> None:
        self.__items = items
        self.__length = len(items)

    def __len__(self) -> int:
        return self.__length

    def __iter__(self) -> Iterator[int]:
        return islice(self.__items, self.__length)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self.__length)
            # Counting down, a stop of -1 means before the first item and not the last.
            return self.__items[start:stop:step] if step > 0 else [self.__items[i] for i in range(start, stop, step)]
        place = operator.index(index)
        place += self.__length if place < 0 else 0
        if not 0 <= place < self.__length:
            raise IndexError(f"token {index} of {self.__length}")
        return self.__items[place]


@dataclass
class _Own:
    """What a plug-in keeps of one sequence from its first step to its last."""

    params: SamplingParams
    drafting: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceView:
    """A sequence in one step, under the names of `Sequence`. Only `drafting`, the plug-in's own, can change.

    Every step has a new view: state belongs in `drafting`.
    """

    tokens: Tokens
    prompt_ids: Tokens
    output_ids: Tokens
    params: SamplingParams
    settled: int  # how many of the tokens are final
    remaining: int  # how many more tokens the sequence may emit
    drafting: dict[str, Any]

    @classmethod
    def of(cls, sequence: Sequence, key: str) -> SequenceView:
        """The view for the plug-in with the key `key`."""
        own = sequence.drafting.get(key)
        if own is None:
            own = sequence.drafting[key] = _Own(copy.deepcopy(sequence.params))
        return cls(
            tokens=Tokens(sequence.tokens),
            prompt_ids=Tokens(sequence.request.prompt_ids),
            output_ids=Tokens(sequence.output_ids),
            params=own.params,
            settled=sequence.settled,
            remaining=sequence.remaining,
            drafting=own.drafting,
        )


@dataclass(frozen=True)
class TargetFacts:
    """The facts of `TargetView` without computation: a plug-in runs beside the engine and shares nothing."""

    config: ModelConfig
    fingerprint: str
    tokenizer: Tokenizer | None
    longest: int
    reads_draws: bool
    exact: bool
    layered: bool
    device: str
    dtype: torch.dtype

    @classmethod
    def of(cls, target: TargetView) -> TargetFacts:
        """The facts of this target."""
        return cls(**{name: getattr(target, name) for name in cls.__dataclass_fields__})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a plug-in sees of the target {', '.join(self.__dataclass_fields__)}, but not {name}")
