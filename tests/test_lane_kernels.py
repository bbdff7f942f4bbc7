"""What lanes compute on a GPU in one kernel is what they compute elsewhere in many operations."""

from __future__ import annotations

from tests.interpreted import interpreted

KERNELS = """
import torch
from slipstream import lane_kernels as kernels
from slipstream.cache import PAGE_SIZE
from slipstream.lanes import Lanes

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

def there(*tensors):
    return [tensor if tensor is None else tensor.to(device) for tensor in tensors]

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
        wanted = lanes._laid(first, offsets, depths_, lines_)
        laid = kernels.lay(*there(first, lanes.tables, offsets, depths_, lines_), lanes.highest, PAGE_SIZE)
        for mine, theirs in zip(laid, (wanted.positions, wanted._pages, wanted._offsets)):
            assert mine.cpu().equal(theirs), (size, nodes)
    chosen = torch.randint(0, 99, (size, nodes + 1))
    counts = torch.randint(0, depth + 1, (size,))
    path = torch.randint(1, nodes + 2, (size, depth)).clamp_max(nodes)
    path = torch.where(torch.arange(depth) < counts[:, None], path, 0)
    before = there(*(part.clone() for part in (lanes.tokens, lanes.taken, lanes.accepted, lanes.slots)))
    kernels.advance(*there(chosen, path, counts), *before)
    lanes.advance(chosen, path, counts)
    for mine, theirs in zip(before, (lanes.tokens, lanes.taken, lanes.accepted, lanes.slots)):
        assert mine.cpu().equal(theirs), (size, nodes)
"""


def test_the_kernels_do_what_the_plain_operations_do() -> None:
    interpreted(KERNELS)
