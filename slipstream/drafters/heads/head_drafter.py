"""Drafters that were trained for their target: a checkpoint, a reduced vocabulary, trees grown by a head."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slipstream.drafters.device.tree_loop import TreeDraft, TreeLoop
from slipstream.drafters.growing.likeliest import Candidates, likeliest_children
from slipstream.drafters.growing.tree_growth import GrowingDrafter, Growth, GrowthOptions
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head import Frame, Head, HeadSettings
from slipstream.drafters.heads.head_layer import HeadLayer
from slipstream.errors import CorruptFile
from slipstream.models.model import usual_rows
from slipstream.policy.sizes import device_tree, host_tree
from slipstream.types import Plan

if TYPE_CHECKING:
    from slipstream.drafters.device.device_draft import DeviceDraft
    from slipstream.models.view import TargetView


@dataclass(frozen=True)
class HeadOptions(GrowthOptions):
    """`checkpoint`: a directory or hub id of a checkpoint of `slipstream train`, or of an EAGLE-3 or Medusa head of
    another project; without one, the drafter for this target in the cache or in the package. `depth`: 0 for a default
    of the device. `nodes`: 0 for a default of the device, and on a CPU only likely ones. `branch`: 1 for a chain.
    `draw` is that of `draft_model`.
    """

    depth: int = 0
    branch: int = 4
    checkpoint: str = ""


Options = TypeVar("Options", bound=HeadOptions)


class HeadDrafter(GrowingDrafter[Options], Generic[Options]):
    """Draft with a head trained on its target's outputs."""

    needs = "a checkpoint trained for this target (SmolLM2-135M has one): `slipstream train`"
    instead: ClassVar[str] = "checkpoint=DIRECTORY"  # suggested if none is found
    settings_type: ClassVar[type[HeadSettings]]
    head_type: ClassVar[type[Head]]

    def __init__(self, options: Options, target: TargetView) -> None:
        super().__init__(options, target)
        self._require_layers("reads hidden states of the target")
        self._place = self._find()
        self.trained = head_checkpoint.load(self._place)
        self.trained.require(self.name, target.fingerprint, self._place)
        self.vocab = self.trained.vocab.to(target.device)
        with torch.inference_mode():
            self._build(self._restored())

    def _build(self, head: Head) -> None:
        """Prepare the trained head for drafting; the head itself is not kept."""
        self.taps = head.taps
        self.shape = head.frame.config  # the target's, except for the head's own shape

    @classmethod
    def usual(cls, options: Options, *, on_cpu: bool) -> Plan:
        rows = usual_rows("cpu" if on_cpu else "cuda")
        plan = host_tree(_requested(options), on_cpu=on_cpu, cheap_rows=rows, expensive_rows=False)
        return plan if on_cpu else _shared(options, plan, 1)

    @property
    def plan(self) -> Plan:
        target, on_cpu = self.target, self.target.device == "cpu"
        requested = _requested(self.options)
        return host_tree(requested, on_cpu=on_cpu, cheap_rows=target.cheap_rows, expensive_rows=target.expensive_rows)

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        plan, loop = self.plan_for(lanes), self.loop_type()
        if loop is None or not plan.drafts or plan.min_confidence > 0.0 or self.samples:
            return None  # a tree of fixed shape cannot leave out unlikely nodes
        return TreeDraft(self, plan, loop)

    def plan_for(self, lanes: int) -> Plan:
        """The plan per sequence for `lanes` sequences in one pass: unless the user set the nodes, the sequences share
        the rows that are nearly free.
        """
        return _shared(self.options, self.plan, lanes)

    def loop_type(self) -> type[TreeLoop] | None:
        """Its `TreeLoop` for device rounds, if it has one."""
        return None

    def _find(self) -> Path:
        if self.options.checkpoint:
            from slipstream.drafters.interchange import checkpoint_of  # it imports some of the methods

            return checkpoint_of(self.options.checkpoint, self.name, self.target)
        return head_checkpoint.own(self.name, self.target.fingerprint, f"{self.name}:{self.instead}")

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
        if growth.likeliest is not None:
            return [children[: growth.plan.branch] for children in growth.likeliest]
        if growth.sequence.params.adjusts:
            return super()._candidates(growth, logits, parents)
        paths, noisy = [growth.tree.path_tokens(node) for node in parents], not self.target.reads_draws
        sampler = growth.sequence.sampler.free  # a grammar's mask has the target's vocabulary; the engine prunes
        return likeliest_children(sampler, logits, paths, growth.plan.branch, self.vocab, noisy=noisy)


def _requested(options: HeadOptions) -> Plan:
    return Plan(options.depth, options.nodes, options.branch, options.min_confidence)


def _shared(options: HeadOptions, plan: Plan, lanes: int) -> Plan:
    if options.nodes or plan.branch == 1:
        return plan
    return device_tree(plan, lanes, fixed_depth=options.depth > 0)


def unfilled_head(kind: type[HeadDrafter[Any]], settings: dict[str, Any], frame: Frame) -> Head:
    """A head without initialised weights: they come from elsewhere, or only the shapes are wanted."""
    with _SkipInit():
        return make_head(kind, settings, frame)


def restored(kind: type[HeadDrafter[Any]], checkpoint: head_checkpoint.Trained, frame: Frame, place: Path) -> Head:
    """The head of the checkpoint at `place`, in float32."""
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


_RANDOM_INITS = (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_)


class _SkipInit(TorchFunctionMode):
    """Skips random initialisation: it takes seconds for a large target, and its result is not kept.

    (The meta device would do too, but its arithmetic imports half of torch.)
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _RANDOM_INITS:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def make_head(kind: type[HeadDrafter[Any]], settings: dict[str, Any], frame: Frame) -> Head:
    """A head of a method with its initial weights."""
    try:
        shaped = kind.settings_type(**settings)
    except TypeError as error:
        raise CorruptFile(f"{kind.name}: the settings are not those of this method: {error}") from None
    return kind.head_type(shaped, frame)  # type: ignore[call-arg, arg-type]


def kept_per_token(head: Head) -> int:
    """Numbers kept per token of context: K/V of the head's layers, and the hidden states they read."""
    layers = [module.config for module in head.modules() if isinstance(module, HeadLayer)]
    if not layers:
        return head.also_kept  # it needs the last hidden state alone
    kv = sum(2 * config.kv_heads * config.head_dim for config in layers)
    return kv + len(head.taps) * head.frame.config.hidden_size + head.also_kept


def settings_of(settings: HeadSettings) -> dict[str, Any]:
    """Settings in the form that a checkpoint stores."""
    return asdict(settings)


def frame_of(target: TargetView, vocab: torch.Tensor) -> Frame:
    """What a head shares with this target."""
    return Frame(target.config, vocab, target.head_rows(vocab), target.norm_weight, target.embed, target.layer)
