"""The policy: how much each sequence drafts in each step, and which nodes ride in the pass."""

from slipstream.policy.fixed import FixedPolicy

__all__ = ["FixedPolicy"]
