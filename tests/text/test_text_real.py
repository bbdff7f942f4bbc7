"""The tokenizer of a real model, read from its GGUF file, against transformers reading the same file."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.text import IncrementalDecoder, Tokenizer, tokenizer_from_gguf

pytestmark = pytest.mark.real_model
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

PROSE = [
    "It was the best of times, it was the worst of times; we'll never know, won't we?",
    "The Smiths' house -- the big one -- isn't for sale. \"Really?\" she asked... 'Yes!'",
    "En 1789, la Révolution française commença à Paris; l'été fut très chaud.",
    "Die Straße heißt Größenwahn und führt über den Fluß.",
]
CODE = [
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n\nprint(fib(30))  # 832040\n",
    "for (int i = 0; i < 10; ++i) {\n\tsum += a[i] * 0x1F;\n}\r\n",
    "SELECT name, COUNT(*) FROM users WHERE id >= 100 GROUP BY 1;--\n",
    '<div class="row">&nbsp;<br/></div>\n\n\n\n<!-- x -->',
    "#!/bin/sh\nset -eu\nfind . -name '*.py' | xargs wc -l > /dev/null 2>&1",
]
JSON = ['{"id": 17, "tags": ["a", "b"], "pi": 3.14159, "none": null}', '[[1,2,3],[4,5,6],{"k":"v\\u00e9\\n"}]']
SCRIPTS = [
    "Привет, мир! Ёлки-палки.",
    "你好，世界。東京タワーは高いです。",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "שָׁלוֹם עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Γειά σου Κόσμε",
    "გამარჯობა მსოფლიო",
    "Xin chào thế giới; e\u0301a\u0308 decomposed",
]
EMOJI = ["🙂", "👍🏽", "👨‍👩‍👧‍👦 family", "🇫🇷🇩🇪", "❤️‍🔥 ok ✅", "a😀b😀😀c"]
NUMBERS = [
    "12345678901234567890",
    "3.14159265",
    "1,000,000.50",
    "٣٤٥٦",
    "x²+y³=½",
    "0x1F 0b101 1e-9",
    "2024-02-29 12:30:59",
]
BLANKS = [
    "",
    " ",
    "    ",
    "\n",
    "\n\n\n",
    "\t\t x",
    "  \n  \n  ",
    "a\u00a0b\u2003c\u3000d",
    "end   ",
    "\r\n\r\n",
    "\x00\x1b[0m",
]
SPECIAL = [
    "<|im_start|>user\nHi<|im_end|>\n",
    "a<|endoftext|>b",
    "<|im_start|><|im_start|> <|im_end|>x",
    "<repo_name>me/it<file_sep>a.py\n<|im_start",
    "<|im_start|>assistant\n2 + 2 = 4<|im_end|><|endoftext|>",
]
GROUPS = [PROSE, CODE, JSON, SCRIPTS, EMOJI, NUMBERS, BLANKS, SPECIAL]
CHATS = [
    [{"role": "user", "content": text}] for text in (PROSE[0], CODE[0], NUMBERS[0], SCRIPTS[1], EMOJI[2], "  Hi \n")
] + [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why 42?"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And <b>2 + 2</b> & 'so on'?"},
    ],
]


def texts() -> list[str]:
    """200 texts: every sample alone, then random mixtures of them."""
    samples = [text for group in GROUPS for text in group]
    dice = random.Random(0)
    while len(samples) < 200:
        parts = [dice.choice(dice.choice(GROUPS)) for _ in range(dice.randint(2, 5))]
        samples.append(dice.choice(["", " ", "\n"]).join(parts))
    return samples


@pytest.fixture(scope="module")
def ours(smollm2_path: Path) -> Tokenizer:
    from gguf import GGUFReader

    fields = GGUFReader(smollm2_path).fields
    return tokenizer_from_gguf({key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")})


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> Any:
    """transformers' reading of the file, with the pre-tokenizer that the file declares.

    transformers 5.22 does not know the pre-tokenizer `smollm` and silently takes GPT-2's alone; 8 of the texts below
    then differ, all where white space comes before a digit ("\\n\\n12" loses its double newline to two single ones).
    SmolLM2's own tokenizer cuts out every digit (Digits, individual) before ByteLevel, as `smollm` says, and the
    vocabulary bears it out: it has no token of several digits and none of a space and a digit, which GPT-2's
    expression would have learned among the first. So the file is right and theirs is put right here; everything else
    of it stays as it is.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def test_ids_and_texts_equal_transformers(ours: Tokenizer, theirs: Any) -> None:
    samples = texts()
    assert len(samples) == 200
    for text in samples:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids, skip_special=False) == text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_chats_equal_transformers(ours: Tokenizer, theirs: Any) -> None:
    for chat in CHATS:
        for more in (True, False):
            rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=more)
            assert ours.render_chat(chat, add_generation_prompt=more) == rendered
            ids = theirs.apply_chat_template(chat, add_generation_prompt=more)["input_ids"]
            assert ours.encode_chat(chat, add_generation_prompt=more) == ids


def test_vocabulary(ours: Tokenizer, theirs: Any) -> None:
    assert len(ours) == len(theirs) == 49152
    assert ours.bos_id == 1 and ours.eos_ids == (2,) and ours.special_ids == set(range(17))
    assert [ours.token(id) for id in range(49152)] == theirs.convert_ids_to_tokens(list(range(49152)))
    digits = [text for id in range(17, 49152) if (text := ours.token_text(id)).strip().isdecimal()]
    assert sorted(digits) == list("0123456789")  # numbers were cut into digits in training, spaces apart


def test_streams_of_real_tokens(ours: Tokenizer) -> None:
    dice = random.Random(1)
    for text in texts():
        ids = ours.encode(text)
        cut = dice.randint(0, len(ids))
        decoder, prompt = IncrementalDecoder(ours, ids[:cut]), IncrementalDecoder(ours)
        pieces = [decoder.push([id]) for id in ids[cut:]]
        assert prompt.push(ids[:cut]) + "".join(pieces) == ours.decode(ids)
        assert decoder.flush() == ""
