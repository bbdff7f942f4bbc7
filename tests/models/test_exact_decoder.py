"""A whole decoder on exact kernels passes the self-check, and computes what it computes without them."""

from __future__ import annotations

import pytest
import torch

from slipstream import attention
from slipstream.attention import tree_segment
from slipstream.cache import PagedCache
from slipstream.models import decoder
from slipstream.models.decoder import Decoder
from slipstream.models.formats.resolve import open_model
from slipstream.models.layers.norm import Stream, UnitNorm
from slipstream.models.load import load_model
from slipstream.models.selfcheck import is_exact
from slipstream.models.weights import Weights
from tests.interpreted import DEVICE
from tests.tiny import tiny_directory


@pytest.mark.kernels
def test_a_decoder_on_exact_kernels_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_directory(context=40, sliding_window=25)

    def logits(model: Decoder) -> torch.Tensor:
        cache = PagedCache(4, DEVICE)
        model.add_store(cache, "test")
        table = cache.open([])
        cache.reserve(table, 40)
        segment = tree_segment(table, 0, [7 * i % 97 for i in range(30)], None)
        with torch.inference_mode():
            return model.head(model.forward(cache, "test", [segment]).hidden)

    expected = logits(load_model(folder, dtype="float32", device=DEVICE)[0])
    model, _ = load_model(folder, dtype="float32", device=DEVICE, exact=True)
    assert isinstance(model, Decoder)
    if DEVICE == "cpu":  # the kernels of a GPU, interpreted
        monkeypatch.setattr(attention, "paged_available", lambda device: True)
        monkeypatch.setattr(decoder, "native_shape", lambda config: None)
        monkeypatch.setattr(UnitNorm, "stream", lambda norm, x: Stream(x, norm))
        weights = Weights(open_model(folder), torch.float32, DEVICE, "none", exact=True, weights_file=None)
        model.exact, model.native = True, None
        model._embed, model._head = weights.tables()
        model.layers = [model._layer(weights, layer) for layer in range(2)]
    torch.testing.assert_close(logits(model), expected, atol=1e-3, rtol=1e-3)
    assert is_exact(model)
    for dtype in ("float16", "bfloat16") if DEVICE == "cuda" else ():
        assert is_exact(load_model(folder, dtype=dtype, device=DEVICE, exact=True)[0])
