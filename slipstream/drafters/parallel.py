"""`parallel`: one pass drafts a whole block.

The rows after the root have no token yet. Their inputs are trained: an embedding per position, and one vector in place
of the unknown hidden state. The row d positions after the root guesses the token that follows it, without knowing the
tokens between. A low-rank link from the previous token to the row corrects that where a path is chosen: it gives the
change of the logits once the previous token is known, without another pass of the layers.

A row without a token attends to the text, the root and the rows before it, so a block can be cut at any depth. What it
attends to of the text is rows of the head, or with `inject` K/V projected from the target's hidden states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from slipstream import noise
from slipstream.attention import Segment, chain_segment
from slipstream.drafters.device.device_draft import DeviceDraft
from slipstream.drafters.device.parallel_loop import InjectedLoop, ParallelLoop
from slipstream.drafters.device.tree_loop import TreeDraft
from slipstream.drafters.growing.catch_up import Text, catch_up, wanted
from slipstream.drafters.growing.lattice import Lattice, linked_candidates
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.drafters.heads.features import within_range
from slipstream.drafters.heads.head import Head
from slipstream.drafters.heads.head_drafter import HeadOptions
from slipstream.drafters.heads.head_layer import PagedHeadLayer
from slipstream.drafters.heads.head_rows import HeadRows, PagedRows
from slipstream.drafters.heads.injection import Injection
from slipstream.drafters.heads.parallel_head import ParallelHead, ParallelSettings, sharpness
from slipstream.drafters.heads.sequential import SequentialDrafter
from slipstream.errors import DraftFault
from slipstream.gumbel_max import perturbed
from slipstream.models.layers.linear import make_draft_linear
from slipstream.models.layers.norm import RowNorms
from slipstream.models.rows import PlacedRows, Rows
from slipstream.policy.sizes import DEPTH_OF_BLOCK
from slipstream.sampling import Sampler
from slipstream.sequence import Sequence
from slipstream.types import Plan

_USUAL = 8  # block size of most heads


@dataclass(frozen=True)
class ParallelOptions(HeadOptions):
    """The options of every trained drafter. `depth` is at most the block size of the head (0: that, 12 at most)."""


Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # logits, gates and sharpness of a block's rows


@dataclass
class BlockGrowth(Growth):
    """A tree of a block's paths."""

    gates: torch.Tensor = field(init=False, repr=False)  # [levels, rank]: factors of each row on the links to it
    sharpness: torch.Tensor | None = field(init=False, repr=False)  # [levels, 1]: how sure each row is

    def unseen(self, store: str) -> Segment:
        """As for every head, then after the root the rows without a token: the tokens named there are never read."""
        blanks = self.plan.depth - 1
        return Text(self.sequence.table, self.sequence.tokens, blanks=blanks).unseen(store)


class ParallelDrafter(SequentialDrafter[ParallelOptions]):
    """Draft a block in one pass. Rows of known tokens are those of `sequential.py`."""

    name = "parallel"
    summary = "one pass of a small trained head drafts a whole block, as a tree of its likeliest paths"
    helps = "any text, if drafting level by level is too slow; deep guesses are less consistent than eagle3's"
    cost = "one pass of a few layers over the block and of a reduced LM head, whatever the depth"
    options_type = ParallelOptions
    settings_type = ParallelSettings
    head_type = ParallelHead
    growth_type = BlockGrowth

    def _build(self, head: Head) -> None:
        super()._build(head)
        assert isinstance(head, ParallelHead)
        dtype, device = self.target.dtype, self.target.device

        def ready(weight: torch.Tensor) -> torch.Tensor:
            return weight.detach().to(device, dtype)

        eps = head.frame.config.norm_eps
        self._block, self._reach = head.settings.block, head.settings.reach
        self.options = replace(self.options, depth=self.options.depth or min(self._block, DEPTH_OF_BLOCK))
        self.layers = head.settings.layers
        self._stack = [PagedHeadLayer(layer, dtype, device) for layer in head.parts()]
        self._stack_norms = [RowNorms(ready(norm), eps=eps) for norm in head.stack_norms]
        self._enter = RowNorms(ready(head.embed_norm), ready(head.hidden_norm), eps=eps)
        self._leave = RowNorms(ready(head.norm), eps=eps)
        self._fuse = make_draft_linear(ready(head.fuse.weight))
        self._output = make_draft_linear(ready(head.frame.rows))
        self._masks = ready(head.masks)  # [block - 1, width]
        self._blanks = ready(head.blank).expand_as(self._masks)
        self._gate = make_draft_linear(ready(head.gate.weight))
        self._pull = ready(head.pull.weight)  # [draft tokens, rank]
        self._sure = ready(head.sure) if head.settings.confidence else None
        self.injection: Injection | None = None
        if head.settings.inject:
            self.injection = Injection(ready(head.injection), ready(head.inject_norm), head.frame.config)
        head.link.to(device, dtype)
        self._links = head.links(self.target.embed(self.vocab))  # [draft tokens, rank]
        self._ids: list[int] = self.vocab.tolist()

    @classmethod
    def usual(cls, options: ParallelOptions, *, on_cpu: bool) -> Plan:
        return super().usual(replace(options, depth=options.depth or _USUAL), on_cpu=on_cpu)

    def room(self, sequence: Sequence) -> int:
        return min(self._block, super().room(sequence))

    def scratch_rows(self, plan: Plan) -> int:
        return min(self._block, plan.depth) - 1 if plan.drafts else 0

    # -- the pass -----------------------------------------------------------------------------------------------------

    def hidden(self, features: torch.Tensor) -> torch.Tensor:
        return within_range(self._fuse(features))

    def _entered(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._enter(embedded, hidden), hidden

    def judged(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._output(self._leave(hidden))

    def gates(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layers' output [rows, width] -> factors of each row on the links to it, [rows, rank]."""
        return 1.0 + self._gate(self._leave(hidden))

    def sharpness(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The layers' output [rows, width] -> how sure each row is of the target's first choice, [rows, 1].

        None: the head has not learnt that.
        """
        return None if self._sure is None else sharpness(self._leave(hidden), self._sure)

    def _feed_roots(self, growths: list[Growth]) -> list[torch.Tensor]:
        rows = []
        for growth, output in zip(growths, self._fed(growths), strict=True):
            assert isinstance(growth, BlockGrowth)
            growth.logits, growth.gates, growth.sharpness = output
            rows.append(growth.logits[:1])
        return rows

    def _fed(self, growths: list[Growth]) -> Iterable[Output]:
        """Bring the head up to the roots and run the blocks after them."""
        if self.injection is None:
            return catch_up(self.key, growths, self._blocks)
        self._inject(growths)
        blocks = [
            chain_segment(growth.sequence.table, growth.root_slot, [growth.tree.tokens[0]] * growth.plan.depth, 0)
            for growth in growths
        ]
        return self._blocks(growths, blocks)

    def _inject(self, growths: list[Growth]) -> None:
        """Write K/V of the tokens before the roots that have none. The roots' own are those of rows of the head."""
        sequences = [growth.sequence for growth in growths]
        behind = [s for s in sequences if s.table.lengths[self.key] < len(s.tokens) - 1]
        catch_up(self.key, [Text(s.table, s.tokens[:-1]) for s in behind], self._injected)

    def _injected(self, _: list[Text], segments: list[Segment]) -> list[None]:
        features = [self._features.read(s.table, s.committed, s.committed + s.rows) for s in segments]
        self.inject(self.hidden(torch.cat(features)), Rows(segments, self.target.device))
        return [None] * len(segments)

    def inject(self, fused: torch.Tensor, rows: PlacedRows) -> None:
        """Write K/V of tokens with these hidden states, fused [rows, width], to all layers."""
        assert self.injection is not None
        self.injection.write(fused, rows, self._rope, self._cache.layers(self.key))

    def _blocks(self, _: list[Growth], segments: list[Segment]) -> Iterator[Output]:
        """A pass over known tokens and the blocks after them; what it says of the rows that request logits."""
        hidden, counts = self._read(segments), wanted(segments)
        parts = self.judged(hidden).split(counts), self.gates(hidden).split(counts)
        sure = self.sharpness(hidden)
        return zip(*parts, [None] * len(counts) if sure is None else sure.split(counts), strict=True)

    def _read(self, segments: list[Segment]) -> torch.Tensor:
        """The layers over all rows; their output [rows that request logits, width]."""
        known = [min(segment.rows, segment.logits_from + 1) for segment in segments]
        counts = zip(segments, known, strict=True)
        features = [self._features.read(s.table, s.committed - 1, s.committed - 1 + count) for s, count in counts]
        rows = PagedRows(segments, self.shape, self._rope, self.target.device, self.target.dtype)
        embedded, hidden, start = self.target.embed(rows.tokens), [], 0
        for segment, fused in zip(segments, self.hidden(torch.cat(features)).split(known), strict=True):
            blanks, start = segment.rows - len(fused), start + segment.rows
            embedded[start - blanks : start] = self._masks[:blanks]
            hidden += [fused, self._blanks[:blanks]]
        return rows.wanted(self.stacked(embedded, torch.cat(hidden), rows))

    def stacked(self, embedded: torch.Tensor, hidden: torch.Tensor, rows: HeadRows) -> torch.Tensor:
        """The layers' output for rows of embeddings and hidden states, [rows, width] each."""
        inputs, x = self._entered(embedded, hidden)
        for number, (layer, store) in enumerate(zip(self._stack, self._cache.layers(self.key), strict=True)):
            x = layer(self._stack_norms[number - 1](x) if number else inputs, x, rows, store)
        return x

    def mask(self, places: torch.Tensor) -> torch.Tensor:
        """Embeddings of the rows without a token; place 0 is the first after the root."""
        return self._masks[places]

    @property
    def blank(self) -> torch.Tensor:
        """Replaces an unknown hidden state, [width]."""
        return self._blanks[0]

    def linked(self, before: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Logit changes by previous tokens: ids [...] and gates [..., rank] -> [..., draft tokens]."""
        return (self._links[torch.searchsorted(self.vocab, before)] * gates) @ self._pull.T

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        plan = self.plan_for(lanes)
        trees = plan.drafts and plan.depth > 1 and plan.min_confidence == 0.0 and not self.samples
        loop = ParallelLoop if self.injection is None else InjectedLoop
        return TreeDraft(self, replace(plan, depth=min(plan.depth, self._block)), loop) if trees else None

    # -- trees from a block -------------------------------------------------------------------------------------------

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        """The next level of sampled trees: q is over all draft tokens, and only the links are new."""
        levels = []
        for growth in growths:
            assert isinstance(growth, BlockGrowth) and growth.logits is not None
            depth = growth.tree.depths[growth.fed]
            before = torch.tensor(growth.tree.tokens[growth.fed :], device=self.target.device)
            levels.append(growth.logits[depth] + self.linked(before, growth.gates[depth]))
        return torch.cat(levels)

    def _choose_level(self, growth: Growth, logits: torch.Tensor, parents: range, last: bool) -> None:
        """All levels at once: their rows exist already."""
        assert isinstance(growth, BlockGrowth)
        tree, plan, gates = growth.tree, growth.plan, growth.gates
        greedy = growth.sequence.params.greedy
        temperature = 1.0 if greedy else growth.sequence.params.temperature
        if greedy and growth.sharpness is not None:
            gates = gates * growth.sharpness

        def link(before: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            links = self._links[before] * gates[1:, None]  # [levels - 1, before, rank]
            return torch.bmm(links, self._pull[tokens].transpose(1, 2)).float() / temperature

        scores = self._scores(growth)
        if bool(scores.isnan().any()):
            raise DraftFault(f"{self.name}: the draft's probabilities are not finite")
        candidates = None
        if self._reach:
            links = gates[1:, None] / temperature
            candidates = linked_candidates(
                scores, lambda b: ((self._links[b] * links) @ self._pull.T).float(), self._reach
            )
        lattice = Lattice(scores, link, plan.branch, candidates)
        for parent, token, joint in lattice.best(plan.nodes, plan.min_confidence):
            tree.add(parent, self._ids[token], origin=self.name, confidence=joint)
        growth.fed = len(tree)

    def _scores(self, growth: BlockGrowth) -> torch.Tensor:
        """The scores by which the target will choose at each level, as far as known, [levels, draft tokens]."""
        assert growth.logits is not None
        sampler, params, scores = growth.sequence.sampler, growth.sequence.params, growth.logits.float()
        if params.adjusts:
            scores = self._adjusted(sampler, scores)
        if params.greedy:
            return scores if growth.sharpness is None else scores * growth.sharpness
        scores = scores / params.temperature
        if params.cuts:  # only tokens within top-k, top-p and min-p can be chosen
            scores = torch.stack([self._supported(sampler, row) for row in scores])
        if self.target.reads_draws:
            return scores  # this verifier does not choose by noise: the likeliest guess is best
        positions = range(sampler.position, sampler.position + len(scores))
        keys = [noise.key(sampler.seed, sampler.choice, position, noise.MATCH) for position in positions]
        drawn = perturbed(scores, 1.0, keys, self.vocab)
        if drawn is not None:
            return drawn
        return scores + torch.stack([noise.gumbel(key, self.vocab, self.target.device) for key in keys]).float()

    @staticmethod
    def _supported(sampler: Sampler, row: torch.Tensor) -> torch.Tensor:
        """A row of scaled logits without the tokens that the request's settings exclude."""
        kept = sampler.cut(row)
        if kept is None:
            return row
        return torch.full_like(row, float("-inf")).index_copy_(0, kept, row[kept])

    def _adjusted(self, sampler: Sampler, logits: torch.Tensor) -> torch.Tensor:
        """Logits after bias and penalties. These depend on the path, which is approximated by the likeliest tokens."""
        path: list[int] = []
        rows = []
        for row in self._widened(logits):
            rows.append(sampler.adjusted(row, path)[self.vocab])
            path.append(self._ids[int(rows[-1].argmax())])
        return torch.stack(rows)
