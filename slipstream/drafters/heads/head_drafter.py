"""Drafters that were trained for their target: a checkpoint, a reduced vocabulary, trees grown by a head."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slipstream import noise
from slipstream.attention.even import LANES
from slipstream.drafters import trained
from slipstream.drafters.head import Frame, Head, HeadSettings
from slipstream.drafters.head_layer import HeadLayer
from slipstream.drafters.levels import Candidates, GrowingDrafter, Growth, GrowthOptions
from slipstream.drafters.tree_loop import TreeDraft, TreeLoop
from slipstream.errors import CorruptFile, OptionError
from slipstream.folders import expanded
from slipstream.models.linear import native_works
from slipstream.native.small import likeliest
from slipstream.types import Plan

if TYPE_CHECKING:
    from slipstream.drafters.device_draft import DeviceDraft
    from slipstream.models.view import TargetView

# Rows of all trees of a pass on a GPU: up to the first number reading weights costs more than the products, up to the
# second a tree of four rows each is worth them. Larger batches share the second, two rows each at least.
_ROWS_GPU, _MOST_ROWS_GPU = 128, 256
_SMALL_TREE, _LEAST_TREE = 4, 2
# A level costs a pass of a layer. On a CPU it is left out where nothing below would be offered; on a GPU it never is.
_DEPTH_CPU, _DEPTH_GPU = 8, 6
# The joint probability from which a node is worth its row on a CPU, where a row costs some 4% of a pass; and where it
# costs 5% to 16%, as memory is slow or fast.
_WORTH_ON_CPU, _WORTH_OF_DEAR_ROWS = 0.07, 0.2
_FEW_ROWS, _DEPTH_OF_FEW_ROWS = 7, 6  # with fast products a level costs a tenth of a pass, too


@dataclass(frozen=True)
class LearnedOptions(GrowthOptions):
    """`checkpoint`: a directory that `slipstream train` wrote; without one, the drafter for this target that lies in
    the cache or came with the package. `depth`: 0 for as many levels as suit the device. `nodes`: 0 for as many as suit
    it, and on a CPU only likely ones. `branch`: 1 for a chain. `draw` is that of `draft_model`.
    """

    depth: int = 0
    branch: int = 4
    checkpoint: str = ""


Options = TypeVar("Options", bound=LearnedOptions)


class LearnedDrafter(GrowingDrafter[Options], Generic[Options]):
    """Draft with a head that was trained on what its target says."""

    needs = "a checkpoint trained for this target (SmolLM2-135M has one): `slipstream train`"
    instead: ClassVar[str] = "checkpoint=DIRECTORY"  # what can be given where none is found
    settings_type: ClassVar[type[HeadSettings]]
    head_type: ClassVar[type[Head]]

    def __init__(self, options: Options, target: TargetView) -> None:
        super().__init__(options, target)
        if not target.layered:
            raise OptionError(
                f"{self.name} reads the inside of the target, which a model of transformers does not give",
                hint="draft with a method that needs nothing of the inside of the target",
            )
        self._place = self._find()
        self.trained = trained.load(self._place)
        self.trained.require(self.name, target.fingerprint, self._place)
        self.vocab = self.trained.vocab.to(target.device)
        self._numbers = self.trained.vocab.numpy()
        self._native_choice = target.device == "cpu" and len(self.vocab) % LANES == 0 and native_works()
        with torch.inference_mode():
            self._build(self._restored())

    def _build(self, head: Head) -> None:
        """Make what drafting needs from the trained head; the head itself is not kept."""
        self.taps = head.taps
        self.shape = head.frame.config  # the target's, except for what a head has of its own

    @property
    def plan(self) -> Plan:
        options, on_cpu, rows = self.options, self.target.device == "cpu", self.target.cheap_rows
        deepest = _DEPTH_CPU if on_cpu else _DEPTH_GPU
        if options.nodes or options.branch == 1:
            return replace(options, depth=options.depth or deepest).plan
        few = on_cpu and rows <= _FEW_ROWS
        deepest = min(_DEPTH_OF_FEW_ROWS, rows - 1) if few else deepest
        plan = replace(options, depth=options.depth or deepest, nodes=rows - 1).plan
        worth = _WORTH_OF_DEAR_ROWS if few or self.target.dear_rows else _WORTH_ON_CPU
        return replace(plan, min_confidence=options.min_confidence or worth) if on_cpu else plan

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        plan, loop = self.plan_for(lanes), self.loop_type()
        if loop is None or not plan.drafts or plan.min_confidence > 0.0 or self.samples:
            return None  # a tree of one shape has no room for nodes that are not worth it
        return TreeDraft(self, plan, loop)

    def plan_for(self, lanes: int) -> Plan:
        """The plan for each of so many sequences in one pass: where the nodes are ours to choose, they share the rows
        that come nearly free.
        """
        plan = self.plan
        if self.options.nodes or plan.branch == 1:
            return plan
        least = max(_LEAST_TREE, min(_SMALL_TREE, _MOST_ROWS_GPU // lanes))
        rows = max(least, min(1 + plan.nodes, _ROWS_GPU // lanes))
        levels = plan.depth if self.options.depth else min(plan.depth, rows.bit_length())  # small trees are shallow
        return replace(plan, nodes=rows - 1, depth=levels, branch=min(plan.branch, rows - 1))

    def loop_type(self) -> type[TreeLoop] | None:
        """How it grows trees for lanes, if it can."""
        return None

    def _find(self) -> Path:
        if self.options.checkpoint:
            return expanded(self.options.checkpoint)
        return trained.own(self.name, self.target.fingerprint, f"{self.name}:{self.instead}")

    def _restored(self) -> Head:
        return restored(type(self), self.trained, frame_of(self.target, self.vocab), self._place)

    # -- a reduced vocabulary -----------------------------------------------------------------------------------------

    def _add_level(self, growth: Growth, logits: torch.Tensor, level: int) -> None:
        if growth.sampled or growth.sequence.params.adjusts:
            logits = self._widened(logits)
        super()._add_level(growth, logits, level)

    def _widened(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, draft tokens] -> [rows, the target's vocabulary]."""
        wide = logits.new_full((len(logits), self.target.config.vocab_size), float("-inf"))
        return wide.index_copy_(1, self.vocab, logits)

    def _candidates(self, growth: Growth, logits: torch.Tensor, parents: Seq[int]) -> Candidates:
        params = growth.sequence.params
        if params.adjusts:
            return super()._candidates(growth, logits, parents)
        if not params.greedy:
            return [self._drawn(growth, row, node) for row, node in zip(logits, parents, strict=True)]
        count = min(growth.plan.branch, logits.shape[1])
        if self._native_choice and logits.dtype == torch.float32:
            places, shares = likeliest(logits, count)
            tokens, weights = self._numbers[places].tolist(), shares.tolist()
        else:
            top = torch.topk(torch.softmax(logits.float(), -1), count)
            tokens, weights = self.vocab[top.indices].tolist(), top.values.tolist()
        return [list(zip(*pair, strict=True)) for pair in zip(tokens, weights, strict=True)]

    def _drawn(self, growth: Growth, row: torch.Tensor, node: int) -> list[tuple[int, float]]:
        """The likeliest children of a node where the request samples.

        Which token the target takes depends on noise that is known: it is read at the draft tokens' ids. A verifier
        that compares p and q takes none from it.
        """
        sampler = growth.sequence.sampler
        support = sampler.support(row, growth.tree.path_tokens(node))
        ids = self.vocab if support.ids is None else self.vocab[support.ids]
        scores = support.logits.double()
        if not self.target.reads_draws:
            position = sampler.position + growth.tree.depths[node]
            key = noise.key(sampler.seed, sampler.choice, position, noise.MATCH)
            scores = scores + noise.gumbel(key, ids, self.target.device)
        top = torch.topk(torch.softmax(scores, -1), min(growth.plan.branch, len(scores)))
        return list(zip(ids[top.indices].tolist(), top.values.tolist(), strict=True))


def unfilled_head(kind: type[LearnedDrafter[Any]], settings: dict[str, Any], frame: Frame) -> Head:
    """A head whose weights have to come from elsewhere, or of which only the shapes are wanted."""
    with _WithoutChance():
        return make_head(kind, settings, frame)


def restored(kind: type[LearnedDrafter[Any]], checkpoint: trained.Trained, frame: Frame, place: Path) -> Head:
    """The head of a checkpoint, which lies at `place`, in float32."""
    head = unfilled_head(kind, checkpoint.settings, frame)
    wanted = {name: tuple(weight.shape) for name, weight in head.state_dict().items()}
    found = {name: tuple(weight.shape) for name, weight in checkpoint.weights.items()}
    if wanted != found:
        wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise CorruptFile(
            f"{place}: the weights do not fit the settings: {', '.join(wrong[:4])}", hint="train or copy it again"
        )
    head.load_state_dict({name: weight.float() for name, weight in checkpoint.weights.items()}, assign=True)
    return head.eval()


_BY_CHANCE = (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_)


class _WithoutChance(TorchFunctionMode):
    """Heads are made without numbers by chance: these take seconds for a large target, and are not kept.

    (The meta device would do that, too, but its arithmetic imports half of torch.)
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _BY_CHANCE:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def make_head(kind: type[LearnedDrafter[Any]], settings: dict[str, Any], frame: Frame) -> Head:
    """A head of a method with weights as at the beginning of training."""
    try:
        shaped = kind.settings_type(**settings)
    except TypeError as error:
        raise CorruptFile(f"{kind.name}: the settings are not those of this method: {error}") from None
    return kind.head_type(shaped, frame)  # type: ignore[call-arg, arg-type]


def kept_per_token(head: Head) -> int:
    """Numbers that a drafter keeps for every token of context: K/V of its layers, and the hidden states they read."""
    layers = [module.config for module in head.modules() if isinstance(module, HeadLayer)]
    if not layers:
        return head.also_kept  # the last hidden state is all it needs
    kv = sum(2 * config.kv_heads * config.head_dim for config in layers)
    return kv + len(head.taps) * head.frame.config.hidden_size + head.also_kept


def settings_of(settings: HeadSettings) -> dict[str, Any]:
    """Settings as a checkpoint stores them."""
    return asdict(settings)


def frame_of(target: TargetView, vocab: torch.Tensor) -> Frame:
    """What a head borrows of this target."""
    return Frame(target.config, vocab, target.head_rows(vocab), target.norm_weight, target.embed, target.layer)
