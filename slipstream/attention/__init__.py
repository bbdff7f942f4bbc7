"""Tree attention over pages."""

from slipstream.attention.blocks import BlockAttention
from slipstream.attention.segment import Segment, tree_segment

__all__ = ["BlockAttention", "Segment", "tree_segment"]
