"""`parallel`: one pass drafts a whole block.

The rows after the root have no token yet. Their inputs are trained: an embedding per position, and one vector in place
of the unknown hidden state. The row d positions after the root guesses the token that follows it, without knowing the
tokens between. A low-rank link from the previous token to the row corrects that where a path is chosen: it gives the
change of the logits once the previous token is known, without another pass of the layers.

A row without a token attends to the text, the root and the rows before it, so a block can be cut at any depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn import functional

from slipstream import noise
from slipstream.attention import Segment
from slipstream.drafters.device.device_draft import DeviceDraft
from slipstream.drafters.device.parallel_loop import ParallelLoop
from slipstream.drafters.device.tree_loop import TreeDraft
from slipstream.drafters.growing.catch_up import Text, catch_up, wanted
from slipstream.drafters.growing.lattice import Lattice
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.drafters.heads.head import Frame, Head, HeadSettings, Lesson, Losses, distance, hits, mean, whole
from slipstream.drafters.heads.head_drafter import LearnedOptions
from slipstream.drafters.heads.head_layer import HeadLayer, PagedHeadLayer, begin_as, begin_with
from slipstream.drafters.heads.head_rows import HeadRows, PagedRows
from slipstream.drafters.heads.sequential import SequentialDrafter
from slipstream.drafters.heads.unroll import shifted
from slipstream.errors import DraftFault
from slipstream.gumbel_max import perturbed
from slipstream.models.layers.linear import make_draft_linear
from slipstream.models.layers.norm import RowNorms
from slipstream.sampling import Sampler
from slipstream.sequence import Sequence
from slipstream.types import Plan

_UNLINKED = 0.3  # loss weight of the logits without the link: they select the candidates


@dataclass(frozen=True)
class ParallelSettings(HeadSettings):
    """`block`: tokens drafted per pass. `layers`: of the head. `rank`: of the link between a token and the next.
    `anchors`: share of a lesson's rows after which a block is trained. `decay`: weight of a depth's loss relative to
    the depth before. `mlp`: MLP width of a layer (0: the target's).
    """

    block: int = 8
    layers: int = 2
    rank: int = 64
    anchors: float = 0.25
    decay: float = 0.9
    mlp: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("block", "layers", "rank"):
            self.require(getattr(self, name) >= 1, name, "1 or more")
        for name in ("anchors", "decay"):
            self.require(0.0 < getattr(self, name) <= 1.0, name, "above 0, 1 at most")
        self.require(self.mlp >= 0, "mlp", "0 or more")


class ParallelHead(Head):
    """Taps are fused into one hidden state; it and the token's embedding, each normed, enter the first layer."""

    tables = ("masks", "pull.weight")
    by_token = ("pull.weight",)

    def __init__(self, settings: ParallelSettings, frame: Frame) -> None:
        super().__init__(frame)
        config = frame.config
        width, layers = config.hidden_size, config.layers
        self.settings = settings
        self.taps = tuple(sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)}))
        self.fuse = nn.Linear(len(self.taps) * width, width, bias=False)
        self.embed_norm = nn.Parameter(torch.ones(width))
        self.hidden_norm = nn.Parameter(torch.ones(width))
        sizes = [2 * width] + [width] * (settings.layers - 1)
        self.stack = nn.ModuleList(HeadLayer(config, size, settings.mlp or None) for size in sizes)
        self.stack_norms = nn.ParameterList(torch.ones(width) for _ in sizes[1:])  # before all layers but the first
        self.norm = nn.Parameter(frame.norm.detach().clone().float().cpu())
        self.masks = nn.Parameter(
            nn.init.normal_(torch.empty(settings.block - 1, width), std=0.02)
        )  # in place of embeddings
        self.blank = nn.Parameter(nn.init.normal_(torch.empty(width), std=0.02))  # in place of hidden states
        self.link = nn.Linear(width, settings.rank, bias=False)
        self.gate = nn.Linear(width, settings.rank, bias=False)
        self.pull = nn.Linear(settings.rank, len(frame.vocab), bias=False)
        nn.init.zeros_(self.gate.weight)
        nn.init.normal_(self.pull.weight, std=0.02)  # the links start weak: the rows are trained first

    def begin(self) -> None:
        """Start as the target's last layers on the highest tap."""
        begin_with(self.fuse, len(self.taps) - 1)
        last = self.frame.config.layers
        for layer, index in zip(self.parts(), range(max(0, last - len(self.stack)), last), strict=False):
            begin_as(layer, self.frame.layer(index))

    def parts(self) -> list[HeadLayer]:
        """The layers, in order."""
        return [layer for layer in self.stack if isinstance(layer, HeadLayer)]

    def linked(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The change of a row's logits, [..., draft tokens], by the embedding of the previous token, [..., width]."""
        added: torch.Tensor = self.pull(self.links(before) * (1.0 + self.gate(hidden)))
        return added

    def links(self, before: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., width] projected for the link, [..., rank]."""
        read: torch.Tensor = self.link(functional.rms_norm(before, before.shape[-1:], eps=self.frame.config.norm_eps))
        return read

    def blocks(self, lesson: Lesson, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the output rows read at every token, [batch, length, width], and at the rows without a token after each
        anchor, [batch, anchors, block - 1, width].

        All are rows of one pass: the text, followed by the blocks, which attend to the text up to their anchor.
        """
        (batch, length), count, size = lesson.tokens.shape, len(anchors), self.settings.block - 1
        embedded = self.frame.embed(lesson.tokens)
        hidden = shifted(self.fuse(torch.cat([lesson.taps[layer] for layer in self.taps], -1)), 1)
        masks = self.masks.to(embedded.dtype).repeat(count, 1).expand(batch, -1, -1)
        blanks = self.blank.to(hidden.dtype).expand(batch, count * size, -1)
        positions, visible = _layout(length, anchors, size)
        x = self._read(torch.cat([embedded, masks], 1), torch.cat([hidden, blanks], 1), positions, visible)
        text, blocks = x.split([length, count * size], 1)
        return text, blocks.unflatten(1, (count, size))

    def _read(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """The layers over rows [batch, rows, width]; `visible` [rows, rows] is the attention mask."""
        x = hidden
        inputs = torch.cat([self.rms_norm(embedded, self.embed_norm), self.rms_norm(hidden, self.hidden_norm)], -1)
        for number, layer in enumerate(self.parts()):
            if number:
                inputs = self.rms_norm(x, self.stack_norms[number - 1])
            rows = layer.project(layer.qkv(inputs), layer.turns(positions))
            x = layer.close(rows.attended(visible), x)
        return self.rms_norm(x, self.norm)

    def losses(self, lesson: Lesson) -> Losses:
        length, device = lesson.tokens.shape[1], lesson.tokens.device
        share = round(self.settings.anchors * length)
        # Drawn on the host, so that every device trains the same; before the first token nothing is known.
        anchors = (torch.randperm(max(0, length - 1))[: max(1, share)].sort().values + 1).to(device)
        text, blocks = self.blocks(lesson, anchors)
        losses: list[torch.Tensor] = []
        right: list[torch.Tensor] = []

        def note(loss: torch.Tensor, right_ones: torch.Tensor, counting: torch.Tensor) -> None:
            losses.append(self.settings.decay ** len(losses) * mean(loss, counting))
            right.append(mean(right_ones, counting))

        logits = self.logits(lesson.at(text))
        loss = distance(logits, lesson.at(lesson.probabilities))
        note(loss, hits(logits, lesson.at(lesson.best)), lesson.counting(1))
        for depth, (texts, which, counting) in enumerate(self._alive(lesson, anchors), 1):
            places = (anchors[which] + depth).clamp_max(length - 1)
            hidden, probabilities = blocks[texts, which, depth - 1], lesson.probabilities[texts, places]
            logits = self.logits(hidden)
            loss = _UNLINKED * distance(logits, probabilities)
            logits = logits + self.linked(hidden, self.frame.embed(lesson.tokens[texts, places]))
            note(loss + distance(logits, probabilities), hits(logits, lesson.best[texts, places]), counting)
        return Losses(torch.stack(losses).sum(), torch.stack(right).detach())

    def _alive(
        self, lesson: Lesson, anchors: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each depth below the first: the texts and anchors whose block is the target's own text up to there.

        Padded to whole numbers; the third tensor is the mask. A GPU is synchronised once, for all depths.
        """
        learn = functional.pad(lesson.learn, (0, self.settings.block))
        alive = torch.stack([learn[:, anchors + depth] for depth in range(self.settings.block)]).cummin(0).values[1:]
        alive = alive.flatten(1)  # [depths, batch * anchors]
        order = alive.int().argsort(dim=1, descending=True, stable=True)
        for places, count in zip(order, alive.sum(1).tolist(), strict=True):
            chosen = places[: max(1, whole(count))]
            counting = torch.arange(len(chosen), device=chosen.device) < count
            yield chosen // len(anchors), chosen % len(anchors), counting.float()


def _layout(length: int, anchors: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of a text's rows and of `size` rows after each anchor, [rows]; the attention mask, [rows, rows]."""
    text = torch.arange(length, device=anchors.device)
    roots = anchors.repeat_interleave(size)
    offsets = torch.arange(1, size + 1, device=anchors.device).repeat(len(anchors))
    of_text = text[None, :] <= torch.cat([text, roots])[:, None]
    own = (roots[:, None] == roots[None, :]) & (offsets[:, None] >= offsets[None, :])
    return torch.cat([text, roots + offsets]), torch.cat([of_text, functional.pad(own, (0, 0, length, 0))], 1)


@dataclass(frozen=True)
class ParallelOptions(LearnedOptions):
    """Those of every trained drafter. `depth` is at most the block size of the head."""

    depth: int = 8


@dataclass
class BlockGrowth(Growth):
    """A tree of a block's paths."""

    gates: torch.Tensor = field(init=False, repr=False)  # [levels, rank]: factors of each row on the links to it

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
        self._block = head.settings.block
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
        head.link.to(device, dtype)
        self._links = head.links(self.target.embed(self.vocab))  # [draft tokens, rank]
        self._ids: list[int] = self.vocab.tolist()

    def room(self, sequence: Sequence) -> int:
        return min(self._block, super().room(sequence))

    def scratch_rows(self, plan: Plan) -> int:
        return min(self._block, plan.depth) - 1 if plan.drafts else 0

    # -- the pass -----------------------------------------------------------------------------------------------------

    def hidden(self, features: torch.Tensor) -> torch.Tensor:
        return self._fuse(features)

    def _entered(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._enter(embedded, hidden), hidden

    def judged(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._output(self._leave(hidden))

    def gates(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layers' output [rows, width] -> factors of each row on the links to it, [rows, rank]."""
        return 1.0 + self._gate(self._leave(hidden))

    def _feed_roots(self, growths: list[Growth]) -> list[torch.Tensor]:
        rows = []
        for growth, (logits, gates) in zip(growths, catch_up(self.key, growths, self._blocks), strict=True):
            assert isinstance(growth, BlockGrowth)
            growth.logits, growth.gates = logits, gates
            rows.append(logits[:1])
        return rows

    def _blocks(self, _: list[Growth], segments: list[Segment]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A pass over known tokens and the blocks after them: logits and gates of the rows that request them."""
        hidden, counts = self._read(segments), wanted(segments)
        return zip(self.judged(hidden).split(counts), self.gates(hidden).split(counts), strict=True)

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
        return TreeDraft(self, replace(plan, depth=min(plan.depth, self._block)), ParallelLoop) if trees else None

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
        temperature = 1.0 if growth.sequence.params.greedy else growth.sequence.params.temperature

        def link(before: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            links = self._links[before] * gates[1:, None]  # [levels - 1, before, rank]
            return torch.bmm(links, self._pull[tokens].transpose(1, 2)).float() / temperature

        scores = self._scores(growth)
        if bool(scores.isnan().any()):
            raise DraftFault(f"{self.name}: the draft's probabilities are not finite")
        lattice = Lattice(scores, link, plan.branch)
        for parent, token, joint in lattice.best(plan.nodes, plan.min_confidence):
            tree.add(parent, self._ids[token], origin=self.name, confidence=joint)
        growth.fed = len(tree)

    def _scores(self, growth: Growth) -> torch.Tensor:
        """The scores by which the target will choose at each level, as far as known, [levels, draft tokens]."""
        assert growth.logits is not None
        sampler, params, scores = growth.sequence.sampler, growth.sequence.params, growth.logits.float()
        if params.adjusts:
            scores = self._adjusted(sampler, scores)
        if params.greedy:
            return scores
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
