"""`prediction`: predicted outputs. The request brings a text that the answer will repeat in large parts.

The draft is what follows in the prediction. After an edit the drafter finds its place again: where the tokens just
emitted occur in the prediction, the longest match first, then the nearest place after the last one. Right after a token
that differs, two more places are likely: the token replaced the predicted one, or was inserted before it. Several
places become a small tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from slipstream.drafters.base import Drafter, DraftOptions, DraftRequest
from slipstream.policy.trust import Signal
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree

_LONGEST_MATCH = 16  # tokens: longer matches are all the same
_SURE = 4  # tokens that agree leave no doubt
_MOST_PLACES = 256  # occurrences of a token that are looked at
_LEAST_REACH, _REACH = 16, 2  # tokens drafted from a place: so many, and so many more for each that agreed up to it
_KEPT = 0.97  # probability that the next token follows the prediction too, well inside an unchanged part
_RESUMED = (0.6, 0.45)  # confidence after one token that differs: it replaced the predicted one, it was inserted


@dataclass(frozen=True)
class PredictionOptions(DraftOptions):
    """`branch`: places in the prediction that are drafted from at once, where there is doubt. `min_match`: tokens that
    must be equal before a place counts as found. `depth`: reached where many tokens agreed, less in doubt.
    """

    depth: int = 48
    nodes: int = 48
    branch: int = 2
    min_match: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.min_match >= 1, "min_match", "1 or more")


@dataclass(frozen=True)
class _Place:
    """Where an answer is in its prediction. `next`: the token expected next; `run`: tokens that agreed up to there."""

    next: int = 0
    run: int = 1  # an answer is expected to begin like its prediction
    lost: int = 0  # tokens emitted since the last one that agreed


@dataclass
class _State:
    """The state of one sequence."""

    ids: tuple[int, ...]
    places: dict[int, list[int]] = field(default_factory=dict)  # token -> where it is in the prediction
    here: _Place = field(default_factory=_Place)
    seen: int = 0  # tokens of the output that were followed

    @classmethod
    def of(cls, ids: tuple[int, ...]) -> _State:
        """The state at the beginning of an answer."""
        state = cls(ids)
        for place, token in enumerate(ids):
            state.places.setdefault(token, []).append(place)
        return state

    def followed(self, here: _Place, output: Seq[int], start: int) -> _Place:
        """The place after the tokens of `output` from `start` on."""
        for end in range(start + 1, len(output) + 1):
            here = self._after(here, output, end)
        return here

    def _after(self, here: _Place, output: Seq[int], end: int) -> _Place:
        token = output[end - 1]
        if here.lost == 0 and here.next < len(self.ids) and self.ids[here.next] == token:
            return _Place(here.next + 1, here.run + 1)
        found = self.matches(output[max(0, end - _LONGEST_MATCH) : end], here.next)
        if found and found[0][0] >= 2:  # one token alone may be anywhere
            return _Place(found[0][1], found[0][0])
        return replace(here, run=0, lost=here.lost + 1)

    def matches(self, last: Seq[int], near: int) -> list[tuple[int, int]]:
        """(length, place after it) of the matches of the last tokens: the longest first, then the nearest after."""
        places = self.places.get(last[-1], []) if last else []
        if len(places) > _MOST_PLACES:
            places = sorted(places, key=lambda place: abs(place - near))[:_MOST_PLACES]
        found = [(self._length(last, place), place + 1) for place in places]
        return sorted(found, key=lambda match: (-match[0], match[1] <= near, abs(match[1] - near)))

    def _length(self, last: Seq[int], place: int) -> int:
        most = min(place + 1, len(last))
        return next((n for n in range(1, most) if self.ids[place - n] != last[-1 - n]), most)


class PredictionDrafter(Drafter[PredictionOptions]):
    """Draft the text that follows in the prediction."""

    name = "prediction"
    summary = "predicted outputs: a text that the request brings, found again after each edit"
    helps = "rewriting a file or a document with few changes; without a prediction it drafts nothing"
    cost = "a few dictionary look-ups"
    needs = "requests with a prediction"
    options_type = PredictionOptions
    by_request = True

    def host_only(self, sequence: Sequence) -> bool:
        return bool(sequence.request.prediction)

    def signal(self, sequence: Sequence) -> Signal:
        """Tokens that agree with the prediction up to here; 1 where its place is only guessed."""
        if not sequence.request.prediction:
            return Signal(matched=0, least=1)
        state = self._state(sequence)
        places = self._places(state, state.here, sequence.output_ids[-_LONGEST_MATCH:])
        return Signal(max(1, state.here.run) if places else 0, least=1)

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        return [self._one(request) for request in requests]

    def _one(self, request: DraftRequest) -> TokenTree:
        sequence, plan = request.sequence, request.plan
        tree = TokenTree(sequence.tokens[-1])
        if not sequence.request.prediction:
            return tree
        state = self._state(sequence)
        here = state.followed(state.here, sequence.output_ids, state.seen)  # guesses may follow what is settled
        last = sequence.output_ids[-_LONGEST_MATCH:]
        reach = min(plan.depth, _LEAST_REACH + _REACH * here.run)
        for place, confidence in self._places(state, here, last)[: plan.branch]:
            node, joint = 0, confidence
            for token in state.ids[place : place + reach]:
                node = tree.add(node, token, origin=self.name, confidence=joint)
                joint *= _KEPT
        return tree.pruned(plan.nodes)

    def _state(self, sequence: Sequence) -> _State:
        """The state after the settled tokens."""
        state: _State | None = sequence.drafting.get(self.key)
        if state is None:
            state = sequence.drafting[self.key] = _State.of(sequence.request.prediction)
        settled = sequence.settled - len(sequence.request.prompt_ids)
        if settled > state.seen:
            output = sequence.output_ids if settled == len(sequence.output_ids) else sequence.output_ids[:settled]
            state.here, state.seen = state.followed(state.here, output, state.seen), settled
        return state

    def _places(self, state: _State, here: _Place, last: Seq[int]) -> list[tuple[int, float]]:
        """Places that may come next and their probabilities, the likeliest first."""
        places = {here.next: 1.0 - 0.5 ** min(2 + here.run, _LONGEST_MATCH)} if here.lost == 0 else {}
        if here.lost or here.run < _SURE:
            found = [match for match in state.matches(last, here.next) if match[0] >= self.options.min_match]
            for length, place in found[: self.options.branch]:
                places.setdefault(place, 1.0 - 0.5 ** min(length, _SURE))
        if here.lost == 1:
            for resumed, confidence in zip((here.next + 1, here.next), _RESUMED, strict=True):
                places.setdefault(resumed, confidence)
        inside = [(place, confidence) for place, confidence in places.items() if place < len(state.ids)]
        return sorted(inside, key=lambda item: -item[1])
