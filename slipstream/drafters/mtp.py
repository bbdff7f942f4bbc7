"""`mtp`: multi-token prediction, a chain of modules of one decoder layer each, after the target's last layer.

A module joins the hidden state of the previous token with the embedding of the token, and runs one layer over the
sequence. Its output is read by the target's output rows, and as a hidden state by the next module one token later.
Module k drafts level k of the tree; the last module drafts all further levels on its own outputs.

Module k has its own K/V for every token. Its row of token x_j reads the output of module k - 1 at x_(j-1), and so the
target's hidden state of x_(j-k-1): rows up to the root depend on known tokens alone and are final. A module also needs
rows of a draft's nodes: at level k it is fed all levels above, as in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from slipstream.attention import Segment, tree_segment
from slipstream.cache import PagedCache
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.drafters.heads.features import FeatureStore
from slipstream.drafters.heads.head import Frame, Head, HeadSettings, Lesson, Losses
from slipstream.drafters.heads.head_drafter import HeadOptions
from slipstream.drafters.heads.head_layer import HeadLayer, PagedHeadLayer, begin_as, begin_with
from slipstream.drafters.heads.head_rows import HeadRows, PagedRows
from slipstream.drafters.heads.sequential import SequentialDrafter
from slipstream.drafters.heads.unroll import Unrolled, losses_of_levels, shifted
from slipstream.models.layers.linear import Linear, make_draft_linear
from slipstream.models.layers.norm import RowNorms
from slipstream.sequence import Sequence


@dataclass(frozen=True)
class MtpSettings(HeadSettings):
    """`modules`: one for all levels, or one for each of the first levels with the last one for all further. `unroll`:
    levels that they are trained for. `decay`: weight of a level's loss relative to the level before. `mlp`: MLP width
    of a module (0: the target's).
    """

    modules: int = 1
    unroll: int = 6
    decay: float = 0.9
    mlp: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.modules >= 1, "modules", "1 or more")
        self.require(self.unroll >= self.modules, "unroll", "as many as there are modules, or more")
        self.require(0.0 < self.decay <= 1.0, "decay", "above 0, 1 at most")
        self.require(self.mlp >= 0, "mlp", "0 or more")


class MtpModule(nn.Module):
    """Hidden state and embedding, each normed, joined by a matrix; one layer; the norm before the output rows."""

    def __init__(self, settings: MtpSettings, frame: Frame) -> None:
        super().__init__()
        width = frame.config.hidden_size
        self.hidden_norm = nn.Parameter(torch.ones(width))
        self.embed_norm = nn.Parameter(torch.ones(width))
        self.join = nn.Linear(2 * width, width, bias=False)
        self.input_norm = nn.Parameter(torch.ones(width))
        self.layer = HeadLayer(frame.config, width, settings.mlp or None)
        self.norm = nn.Parameter(frame.norm.detach().clone().float().cpu())


class MtpHead(Head):
    """The modules, trained end to end: every level's loss reaches all modules before it."""

    def __init__(self, settings: MtpSettings, frame: Frame) -> None:
        super().__init__(frame)
        self.settings = settings
        self.taps = (frame.config.layers - 1,)
        self.also_kept = (settings.modules - 1) * frame.config.hidden_size
        self.chain = nn.ModuleList(MtpModule(settings, frame) for _ in range(settings.modules))

    def begin(self) -> None:
        """Start as the target's last layer on its own output."""
        for module in self.parts():
            begin_with(module.join, 0)
            begin_as(module.layer, self.frame.layer(self.frame.config.layers - 1))

    def parts(self) -> list[MtpModule]:
        """The modules, in order of level."""
        return [module for module in self.chain if isinstance(module, MtpModule)]

    def levels(self, tokens: torch.Tensor, taps: dict[int, torch.Tensor]) -> Iterator[torch.Tensor]:
        """What the output rows read at each level, [batch, length, width].

        A module is first run over whole texts; only the last module runs again, on its own outputs.
        """
        embedded, width = self.frame.embed(tokens), self.frame.config.hidden_size
        hidden = shifted(taps[self.taps[0]], 1)
        modules = self.parts()
        # The tokens are the same at every level, so a module's projection of their embeddings is computed once.
        from_tokens = [
            nn.functional.linear(self.rms_norm(embedded, module.embed_norm), module.join.weight[:, width:])
            for module in modules
        ]
        readings = [Unrolled(module.layer, tokens.shape[1], tokens.device) for module in modules]
        for level in range(self.settings.unroll):
            number = min(level, len(modules) - 1)
            module = modules[number]
            normed = self.rms_norm(hidden, module.hidden_norm)
            joined = from_tokens[number] + nn.functional.linear(normed, module.join.weight[:, :width])
            hidden = readings[number].read(module.layer.qkv(self.rms_norm(joined, module.input_norm)), joined)
            yield self.rms_norm(hidden, module.norm)
            hidden = shifted(hidden, 1)

    def losses(self, lesson: Lesson) -> Losses:
        return losses_of_levels(self, self.levels(lesson.tokens, lesson.taps), lesson, self.settings.decay)


@dataclass(frozen=True)
class _Paged:
    """A module for drafting. The norms before `join` are folded into it."""

    join: Linear
    layer: PagedHeadLayer
    input_norm: RowNorms
    norm: RowNorms


@dataclass
class ModuleGrowth(Growth):
    """A tree whose first levels have a module each; `hidden` is the output of the module that ran last."""

    roots: tuple[torch.Tensor, ...] = ()  # each module's output at the root, [1, width]


class MtpDrafter(SequentialDrafter[HeadOptions]):
    """Draft with modules that read the target's last hidden state and then each other."""

    name = "mtp"
    summary = "trained modules after the target's last layer, each reading the one before, as a dynamic tree"
    helps = "any text, if modules were trained for the target; a single reused module is cheapest"
    cost = "one pass of one layer and of a reduced LM head per level; with D modules, D more layer rows per token"
    options_type = HeadOptions
    settings_type = MtpSettings
    head_type = MtpHead
    growth_type = ModuleGrowth

    def _build(self, head: Head) -> None:
        super()._build(head)
        assert isinstance(head, MtpHead)
        dtype, device = self.target.dtype, self.target.device

        def ready(weight: torch.Tensor) -> torch.Tensor:
            return weight.to(device, dtype)

        def paged(module: MtpModule) -> _Paged:
            joint = module.join.weight * torch.cat([module.hidden_norm, module.embed_norm])
            layer = PagedHeadLayer(module.layer, dtype, device)
            norms = (RowNorms(ready(weight), eps=eps) for weight in (module.input_norm, module.norm))
            return _Paged(make_draft_linear(ready(joint)), layer, *norms)

        eps = self.target.config.norm_eps
        self._modules = [paged(module) for module in head.parts()]
        self.layers = len(self._modules)
        ones = torch.ones(self.target.config.hidden_size, dtype=dtype, device=device)
        self._enter = RowNorms(ones, ones, eps=eps)
        self._output = make_draft_linear(ready(head.frame.rows))

    # -- one module ---------------------------------------------------------------------------------------------------

    def hidden(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def _entered(
        self, embedded: torch.Tensor, hidden: torch.Tensor, number: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module = self._modules[number]
        joined = module.join(self._enter(hidden, embedded))
        return module.input_norm(joined), joined

    def judged(self, hidden: torch.Tensor, number: int = 0) -> torch.Tensor:
        return self._output(self._modules[number].norm(hidden))

    def layered(self, embedded: torch.Tensor, hidden: torch.Tensor, rows: HeadRows) -> torch.Tensor:
        return self._read(0, embedded, hidden, rows)

    def _read(self, number: int, embedded: torch.Tensor, hidden: torch.Tensor, rows: HeadRows) -> torch.Tensor:
        """A module's output [rows, width]; its K/V are written."""
        inputs, residual = self._entered(embedded, hidden, number)
        return self._modules[number].layer(inputs, residual, rows, self._cache.layers(self.key)[number])

    def _rows(self, segments: list[Segment]) -> PagedRows:
        return PagedRows(segments, self.target.config, self._rope, self.target.device, self.target.dtype)

    # -- known tokens -------------------------------------------------------------------------------------------------

    def attach(self, cache: PagedCache) -> None:
        super().attach(cache)
        # Outputs of all modules but the last: the next module reads them one token later, perhaps in a later pass.
        self._between = range(self.layers - 1)
        if self._between:
            width, dtype = self.target.config.hidden_size, self.target.dtype
            self._outputs = FeatureStore(cache, f"{self.key}.outputs", tuple(self._between), width, dtype)

    def _pass(self, segments: list[Segment], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All modules, one after the other, over known tokens.

        Returns their outputs side by side, [rows, modules * width], and the first module's logits where requested.
        """
        rows = self._rows(segments)
        embedded = self.target.embed(rows.tokens)
        outputs = [self._read(0, embedded, hidden, rows)]
        if self._between:
            sizes = [segment.rows for segment in segments]
            kept = [self._outputs.read(s.table, s.committed - 1, s.committed) for s in segments]  # [1, ...] each
            width = hidden.shape[1]
            for number in self._between:
                before = zip(kept, outputs[number].split(sizes), strict=True)
                columns = slice(number * width, (number + 1) * width)
                hidden = torch.cat([part for last, new in before for part in (last[:, columns], new[:-1])])
                outputs.append(self._read(number + 1, embedded, hidden, rows))
            for segment, new in zip(segments, torch.cat(outputs[:-1], 1).split(sizes), strict=True):
                self._outputs.write(segment.table, segment.committed, new)
        return torch.cat(outputs, 1), self.judged(rows.wanted(outputs[0]))

    def _begin(self, growth: Growth, output: torch.Tensor) -> None:
        assert isinstance(growth, ModuleGrowth)
        growth.roots = output.chunk(self.layers, 1)
        growth.hidden = [growth.roots[0]]

    def rollback(self, sequence: Sequence, length: int) -> None:
        super().rollback(sequence, length)
        if self._between:
            self._cache.truncate(sequence.table, self._outputs.name, length)

    # -- guesses ------------------------------------------------------------------------------------------------------

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        level, count = growths[0].tree.depths[-1], self.layers
        segments, before = [], []
        for growth in growths:
            # A module that has not drafted for this tree yet is fed all its nodes: it needs rows of those above.
            first = growth.fed if level >= count else 1
            segments.append(self._nodes(growth, first))
            parents = torch.tensor(growth.tree.parents[first:], device=self.target.device)
            before.append(torch.cat(growth.hidden)[parents])
        rows, number = self._rows(segments), min(level, count - 1)
        output = self._read(number, self.target.embed(rows.tokens), torch.cat(before), rows)
        for growth, hidden in zip(growths, output.split([s.rows for s in segments]), strict=True):
            assert isinstance(growth, ModuleGrowth)
            growth.hidden = [*(growth.hidden if level >= count else [growth.roots[number]]), hidden]
        return self.judged(rows.wanted(output), number)

    @staticmethod
    def _nodes(growth: Growth, first: int) -> Segment:
        """The nodes from `first` on; logits are requested for those that have not been fed."""
        root = [growth.tree.tokens[0]]
        segment = tree_segment(growth.sequence.table, growth.root_slot, root, growth.tree, first_node=first)
        return replace(segment, logits_from=growth.fed - first)
