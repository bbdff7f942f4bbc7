"""The command line as a user calls it, and a tiny random model to call it with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from slipstream.cli import app
from tests.vocabularies import SPECIALS, TEMPLATE

ROOT = Path(__file__).parent.parent
CORPUS = ["The quick brown fox jumps over the lazy dog. Grüße, 東京 👍🏽!", "def add(a, b):\n    return a + b\n"]
CONTEXT = 512


def save_model(path: Path, *, extra: str = "", context: int = CONTEXT, template: str | None = TEMPLATE) -> Path:
    """A random Llama of two layers with a byte-level tokenizer that knows a few words."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [*SPECIALS, extra] if extra else SPECIALS
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, tie_word_embeddings=True, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(str(path))
    backend.save(str(path / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    if template is not None:
        described["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    return path


def invoke(*arguments: str, input: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=input)
