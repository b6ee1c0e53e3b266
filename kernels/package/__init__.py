"""The kernels and their eager references: `from bucketrl.kernels import linear_logprob`.

This is a folder below `kernels/` because that one, in the root of the repository, must be no package: it would hide
Hugging Face's package of that name from whoever runs there.
"""

from bucketrl.kernels.logprob import linear_logprob
from bucketrl.kernels.policy import Objective, group_advantage, packed_policy_loss

__all__ = ["Objective", "group_advantage", "linear_logprob", "packed_policy_loss"]
