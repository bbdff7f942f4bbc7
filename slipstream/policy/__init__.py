"""The policy: how much each sequence drafts per step, which nodes are verified, how long bursts are."""

from slipstream.policy.base import Policy
from slipstream.policy.fixed import FixedPolicy
from slipstream.policy.report import Progress, Report, Round
from slipstream.policy.tally import Tally

__all__ = ["FixedPolicy", "Policy", "Progress", "Report", "Round", "Tally"]
