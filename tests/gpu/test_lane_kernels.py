"""What lanes compute on a GPU in one kernel is what they compute elsewhere in many operations."""

from __future__ import annotations

import pytest
import torch

from slipstream.cache import PAGE_SIZE
from slipstream.gpu.lanes import Lanes
from tests.interpreted import DEVICE


@pytest.mark.kernels
def test_the_kernels_do_what_the_plain_operations_do() -> None:
    from slipstream.gpu.kernels import lane_kernels as kernels

    torch.manual_seed(0)

    def there(*tensors):
        return [tensor if tensor is None else tensor.to(DEVICE) for tensor in tensors]

    for size, nodes, depth in ((1, 0, 0), (3, 12, 4), (2, 63, 6), (5, 200, 9)):
        lanes = Lanes(size, nodes, depth, longest=600, spare=300, device="cpu")
        lanes.tables.copy_(torch.randint(0, 90, lanes.tables.shape))
        lanes.slots.copy_(torch.randint(0, 599, (size,)))
        shared, own = torch.randint(0, 200, (nodes + 1,)), torch.randint(0, 200, (size, nodes + 1))
        lines = torch.randint(0, size, (nodes + 7,))
        behind, depths = torch.randint(0, 200, (nodes + 7,)), torch.randint(0, 200, (nodes + 7,))
        for first, offsets, depths_, lines_ in (
            (lanes.slots, shared, shared, None),
            (lanes.slots, shared, own, None),
            (lanes.slots, own, own, None),
            (torch.full((size,), -1), shared, shared, None),
            (lanes.slots, behind, depths, lines),
        ):
            wanted = lanes._place_rows(first, offsets, depths_, lines_)
            laid = kernels.place_rows(*there(first, lanes.tables, offsets, depths_, lines_), lanes.highest, PAGE_SIZE)
            for mine, theirs in zip(laid, (wanted.positions, wanted._pages, wanted._offsets), strict=True):
                assert mine.cpu().equal(theirs), (size, nodes)
        chosen = torch.randint(0, 99, (size, nodes + 1))
        depths = torch.randint(0, depth + 1, (size, nodes + 1))
        counts = torch.randint(0, depth + 1, (size,))
        path = torch.stack([torch.randperm(max(nodes, 1))[:depth].sort().values + 1 for _ in range(size)])
        path = torch.where(torch.arange(depth) < counts[:, None], path[:, :depth], 0)

        # Every lane has pages of its own, the last ones of a table may be anybody's.
        pages = torch.randperm(lanes.tables.numel()).view(lanes.tables.shape)
        lanes.tables.copy_(pages)
        lanes.slots.copy_(torch.randint(depth, 590, (size,)))
        lanes.slots[0] = 127
        data = torch.randn(2, 2, pages.numel(), 3, PAGE_SIZE, 20)
        (here,) = there(data.clone())
        if depth:
            kernels.move(here, *there(lanes.tables, lanes.slots, path))
            lanes.move(data, path)
            assert here.cpu().equal(data), (size, nodes)
        taps = [torch.randn(size * (nodes + 1), width) for width in (40, 1500)]
        kept = torch.randn(pages.numel(), PAGE_SIZE, 1540)
        (here,) = there(kept.clone())
        kernels.store_features(here, there(*taps), *there(lanes.tables, lanes.slots, path))
        lanes.store_features(kept, taps, path)
        assert here.cpu().equal(kept), (size, nodes)
        for accepted in (torch.randint(0, depth + 1, (size,)), lanes.slots.clone()):  # up to the first token
            lanes.accepted.copy_(accepted)
            found = kernels.features_before(*there(kept, lanes.tables, lanes.slots, accepted), depth + 1)
            assert found.cpu().equal(lanes.features_before(kept)), (size, nodes)

        told, number = torch.zeros(4, size, depth + 3, dtype=torch.int64), torch.tensor([2])
        own = (lanes.tokens, lanes.last_tokens, lanes.accepted, lanes.slots, told)
        before = there(*(part.clone() for part in own))
        kernels.advance(*there(chosen, path, counts, depths), *before, *there(number))
        lanes.advance(chosen, path, counts, depths, told, number)
        for mine, theirs in zip(before, own, strict=True):
            assert mine.cpu().equal(theirs), (size, nodes)
