"""A Hugging Face directory of an architecture that only transformers runs, opened: its shape, without weights.

The shape is not guessed from names in config.json. The model is built on the `meta` device and runs one pass, which
shows what K and V each layer keeps. What cannot be run is refused here, before a weight is read.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.errors import ModelError, UnsupportedModel
from slipstream.models.config import ModelConfig
from slipstream.models.formats.hf import DTYPES, open_files, read_json
from slipstream.models.formats.hf_layers import FULL, SLIDING
from slipstream.text.chat import one_line

if TYPE_CHECKING:
    from slipstream.text import Tokenizer

# Old files carry masks and counters beside the weights.
BUFFERS = ("BOOL", "U8", "I64")
OLDEST = (5, 5)  # older versions of transformers cannot run on the `meta` device, or keep K and V in other ways


@dataclass(frozen=True)
class AdapterConfig(ModelConfig):
    """The shape of a model that runs through transformers; the fields that describe the inside of layers are not set.

    `head_dim` is the larger of the widths of keys and values: both are in one store.
    """

    key_width: int = 0
    value_width: int = 0
    weights: int = 0
    attention: str = "sdpa"  # which of transformers' implementations

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return self.weights


class AdapterCheckpoint:
    """A directory that transformers can load. `why`: the reason why our decoder does not run it."""

    def __init__(self, path: Path, name: str, why: UnsupportedModel) -> None:
        self.path = path
        self.name = name
        self.why = why.message
        self._raw = read_json(path / "config.json")
        self._refuse_weights()
        with self.asking("transformers cannot build"):
            self.config = self._examine()

    @property
    def architecture(self) -> str:
        """The class that config.json names."""
        names = self._raw.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else "none"

    def tokenizer(self) -> Tokenizer | None:
        """The directory's tokenizer; None if it has none."""
        from slipstream.text import Tokenizer
        from slipstream.text.directory import SLOW_FILES

        if not any((self.path / file).exists() for file in ("tokenizer.json", *SLOW_FILES)):
            return None
        return Tokenizer.from_directory(self.path)

    def refuse(self, reason: str, hint: str | None = None) -> UnsupportedModel:
        """The error that names this model, its architecture and the reason."""
        return UnsupportedModel(f"{self.name} has architecture {self.architecture!r}, which {reason}", hint=hint)

    @contextmanager
    def asking(self, reason: str) -> Iterator[None]:
        """Run transformers without its advice and progress bars; any exception becomes a refusal for `reason`."""
        from transformers.utils import logging

        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except ModelError:
            raise
        except Exception as error:  # of any kind: this is third-party modelling code
            raise self.refuse(f"{reason}: {type(error).__name__}: {one_line(error)}") from error
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()

    def _refuse_weights(self) -> None:
        quantised = self._raw.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise UnsupportedModel(
                f"{self.name} is quantised with {method or 'an unnamed method'}",
                hint="use the unquantised weights or a GGUF file",
            )
        for tensor, file in open_files(self.path).items():
            if (dtype := file.get_slice(tensor).get_dtype()) not in (*DTYPES, *BUFFERS):
                raise UnsupportedModel(f"tensor {tensor!r} of {self.name} is stored as {dtype}")

    def _examine(self) -> AdapterConfig:
        from transformers import AutoConfig

        self._refuse_class()
        config = AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        if getattr(config, "is_encoder_decoder", False):
            raise self.refuse("has an encoder: it does not continue a text")
        model, attention = _build_without_memory(_with_plain_rotation(config))
        if getattr(model, "_is_stateful", False):
            raise self.refuse("keeps a recurrent state: it cannot branch into a tree")
        text = config.get_text_config(decoder=True)
        context = self._context(text)
        seen, vocabulary = self._keys_and_values(model)
        heads, key_width, value_width = self._uniform(seen)
        return AdapterConfig(
            family=config.model_type,
            vocab_size=min(vocabulary, model.get_input_embeddings().weight.shape[0]),
            hidden_size=text.hidden_size,
            layers=len(seen),
            heads=text.num_attention_heads,
            kv_heads=heads,
            head_dim=max(key_width, value_width),
            intermediate_size=getattr(text, "intermediate_size", None) or 0,
            context=context,
            tied_head=bool(getattr(text, "tie_word_embeddings", False)),
            windows=self._windows(text, len(seen), context),
            bos_id=next(iter(self._token_ids("bos_token_id")), None),
            eos_ids=tuple(sorted(self._token_ids("eos_token_id"))),
            key_width=key_width,
            value_width=value_width,
            weights=sum(parameter.numel() for parameter in model.parameters()),
            attention=attention,
        )

    def _refuse_class(self) -> None:
        """Refuse everything but a class of transformers itself for causal language models."""
        from transformers import __version__
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

        if tuple(map(int, __version__.split(".")[:2])) < OLDEST:
            raise self.refuse("needs transformers {}.{} or newer".format(*OLDEST), hint=f"{__version__} is installed")
        if self.architecture == KNOWN.get(str(self._raw.get("model_type"))):
            return
        if "auto_map" in self._raw:
            raise self.refuse("comes with code of its own", hint="code from a checkpoint is never run")
        raise self.refuse(f"transformers {__version__} does not run as a causal language model")

    def _context(self, text: Any) -> int:
        """The longest sequence. Rotations that depend on the length would invalidate cached keys."""
        context = getattr(text, "max_position_embeddings", None)
        if not isinstance(context, int) or context < 1:
            raise self.refuse("has no max_position_embeddings: its context is not known")
        rope = getattr(text, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            short = getattr(text, "original_max_position_embeddings", None)
            context = min(context, short or rope.get("original_max_position_embeddings", context))
        return context

    def _keys_and_values(self, model: Any) -> tuple[dict[int, tuple[torch.Size, torch.Size]], int]:
        """The shapes of K and V that each layer writes in a pass over two rows, and the width of the logits."""
        from slipstream.models.adapter import Recorder

        recorder = Recorder()
        rows = torch.zeros(1, 2, dtype=torch.int64, device="meta")
        mask = torch.zeros(1, 1, 2, 2, dtype=model.dtype, device="meta")
        with self.asking("does not take a cache of keys and values with a 4-D mask"):
            output = model(rows, attention_mask=mask, position_ids=rows, past_key_values=recorder, use_cache=True)
        return recorder.seen, output.logits.shape[-1]

    def _uniform(self, seen: dict[int, tuple[torch.Size, torch.Size]]) -> tuple[int, int, int]:
        """Heads, width of keys and width of values, which must be the same in every layer."""
        if not seen or sorted(seen) != list(range(len(seen))):
            raise self.refuse("does not keep keys and values in every layer")
        shapes = {(keys[1], keys[3], values[1], values[3]) for keys, values in seen.values()}
        heads, key_width, value_heads, value_width = min(shapes)
        if len(shapes) > 1 or heads != value_heads:
            raise self.refuse("keeps keys and values of different shapes in different layers")
        return heads, key_width, value_width

    def _windows(self, text: Any, layers: int, context: int) -> tuple[int | None, ...]:
        """The sliding window of each layer; () if no layer has one that matters."""
        window = getattr(text, "sliding_window", None)
        kinds = getattr(text, "layer_types", None) or [SLIDING if window else FULL] * layers
        if unknown := sorted(set(kinds) - {FULL, SLIDING}):
            raise self.refuse(f"has layers of kind {unknown[0]!r}", hint=f"supported: {FULL}, {SLIDING}")
        if len(kinds) != layers:
            raise self.refuse(f"names {len(kinds)} layers and has {layers}")
        if window is None or window >= context or SLIDING not in kinds:
            return ()
        return tuple(window if kind == SLIDING else None for kind in kinds)

    def _token_ids(self, key: str) -> list[int]:
        generation = self.path / "generation_config.json"
        sources = [read_json(generation) if generation.exists() else {}, self._raw]
        found = [source.get(key) for source in sources]
        listed = [token for value in found for token in (value if isinstance(value, list) else [value])]
        return list(dict.fromkeys(token for token in listed if type(token) is int and token >= 0))


def _with_plain_rotation(config: Any) -> Any:
    """A copy for the pass on the meta device: some rotations read the positions, and shapes do not depend on them."""
    twin = copy.deepcopy(config)
    text = twin.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        text.rope_parameters = {"rope_type": "default", **kept}
    return twin


def _build_without_memory(config: Any) -> tuple[Any, str]:
    """The model on the `meta` device, and the attention implementation of its class: the faster one if it has both."""
    from transformers import AutoModelForCausalLM

    def build(attention: str) -> Any:
        with torch.device("meta"):
            # Some expert kernels exist in 16 bits only, and values do not matter here.
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(torch.bfloat16).eval()

    try:
        return build("sdpa"), "sdpa"
    except (ValueError, ImportError):
        return build("eager"), "eager"
