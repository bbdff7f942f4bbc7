"""Between text and token ids: tokenizers, chat templates, incremental decoding, stop strings."""

from slipstream.text.gguf_tokenizer import tokenizer_from_gguf
from slipstream.text.incremental import IncrementalDecoder
from slipstream.text.stop_strings import StopStrings
from slipstream.text.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "StopStrings", "Tokenizer", "tokenizer_from_gguf"]
