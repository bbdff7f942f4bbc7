"""A whole decoder on exact kernels passes the self-check, and computes what it computes without them."""

from __future__ import annotations

from tests.interpreted import interpreted

DECODER = """
import torch
from slipstream import attention
from slipstream.attention import tree_segment
from slipstream.cache import PagedCache
from slipstream.models.load import load_model
from slipstream.models.loader import open_model
from slipstream.models.selfcheck import is_exact
from tests.tiny import tiny_directory

folder = tiny_directory(context=40, sliding_window=25)
device = "cuda" if torch.cuda.is_available() else "cpu"

def logits(model):
    cache = PagedCache(4, device)
    model.add_store(cache, "test")
    table = cache.open([])
    cache.reserve(table, 40)
    segment = tree_segment(table, 0, [7 * i % 97 for i in range(30)], None)
    with torch.inference_mode():
        return model.head(model.forward(cache, "test", [segment]).hidden)

expected = logits(load_model(folder, dtype="float32", device=device)[0])
model, _ = load_model(folder, dtype="float32", device=device, exact=True)
if device == "cpu":  # the kernels of a GPU, interpreted
    attention.paged_available = lambda device: True
    checkpoint = open_model(folder)
    model.exact = True
    model._embed, model._head = model._tables(checkpoint)
    model.layers = [model._layer(checkpoint, layer) for layer in range(2)]
torch.testing.assert_close(logits(model), expected, atol=1e-3, rtol=1e-3)
assert is_exact(model)
for dtype in ("float16", "bfloat16") if device == "cuda" else ():
    assert is_exact(load_model(folder, dtype=dtype, device=device, exact=True)[0])
"""


def test_a_decoder_on_exact_kernels_is_exact() -> None:
    interpreted(DECODER)
