"""The policy: how much each sequence drafts per step, which nodes are verified, how long bursts are."""

from slipstream.policy.auto import AutoPolicy
from slipstream.policy.base import Policy
from slipstream.policy.fixed import FixedPolicy
from slipstream.policy.report import DraftCall, Progress, Report, Round
from slipstream.policy.tally import Tally

__all__ = ["AutoPolicy", "DraftCall", "FixedPolicy", "Policy", "Progress", "Report", "Round", "Tally"]
