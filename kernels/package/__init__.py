"""The kernels and their eager references: `from bucketrl.kernels import linear_logprob`.

This is a folder below `kernels/` because that one, in the root of the repository, must be no package: it would hide
Hugging Face's package of that name from whoever runs there.
"""

from bucketrl.kernels.logprob import linear_logprob
from bucketrl.kernels.lora import LoraLayer, LoraLinears, lora_linear, rmsnorm_lora_linear, swiglu_lora_linear
from bucketrl.kernels.policy import Objective, group_advantage, packed_policy_grad, packed_policy_loss
from bucketrl.kernels.rope import qknorm_rope

__all__ = [
    "LoraLayer",
    "LoraLinears",
    "Objective",
    "group_advantage",
    "linear_logprob",
    "lora_linear",
    "packed_policy_grad",
    "packed_policy_loss",
    "qknorm_rope",
    "rmsnorm_lora_linear",
    "swiglu_lora_linear",
]
