"""The run's configuration: what `run.json` freezes and every role obeys. Unknown keys are refused.

Per-machine choices (ports, devices, number of local workers) are command-line flags, never here.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bucketrl.bucket.algorithm_config import complete, contradiction

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM has kernels (`max_lora_rank`)."""

UNSERVABLE_MODULES = ("lm_head", "embed_tokens", "embed_in", "embed_out", "wte", "wpe")
"""Embeddings and heads, as architectures call them. vLLM is started without adapters on them, and where the two are
tied one adapter would change both."""

_UNSERVABLE_LORA = {
    "use_dora": "vLLM cannot serve DoRA",
    "bias": "vLLM cannot serve adapters with biases",
    "lora_bias": "vLLM cannot serve adapters with biases",
    "modules_to_save": "vLLM cannot serve modules that are trained whole, only low-rank changes to them",
    "trainable_token_indices": "vLLM cannot serve trained embeddings",
    "use_rslora": "the scaling is always alpha / rank; for that of rsLoRA multiply alpha by sqrt(rank)",
    "rank_pattern": "all modules have the same rank",
    "alpha_pattern": "all modules have the same alpha",
    "lora_dropout": "the learner must train the very policy that was sampled from",
}
"""PEFT's names, known here only to say why they are refused."""


class Section(BaseModel):
    """A table of the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(Section):
    """The frozen base model."""

    id: str
    """Built-in name (`tiny-arithmetic`, `smollm2-135m-instruct`), a local folder, or a hub id."""
    revision: str = ""
    """Hub revision; empty for built-in models and local folders."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the base weights and activations in both roles. Adapter masters are always float32."""


class LoraConfig(Section):
    """The trained adapter. Only what vLLM can serve can be expressed: no DoRA, bias or modules_to_save."""

    rank: int = 16
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 32.0
    """Scaling is alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"

    @model_validator(mode="before")
    @classmethod
    def _unservable_settings_are_explained(cls, settings: Any) -> Any:
        for name in settings if isinstance(settings, dict) else ():
            if name in _UNSERVABLE_LORA:
                raise ValueError(f"remove {name}: {_UNSERVABLE_LORA[name]}")
        return settings

    @model_validator(mode="after")
    def _targets_are_servable(self) -> Self:
        if not self.target_modules:
            raise ValueError('target_modules is empty; name modules, or use "all-linear"')
        for target in self.target_modules if isinstance(self.target_modules, tuple) else ():
            if target.rpartition(".")[2] in UNSERVABLE_MODULES:
                raise ValueError(
                    f"target_modules: {target} cannot be served: engines take adapters on the linear layers "
                    "between embeddings and head only"
                )
        return self

    @model_validator(mode="after")
    def _rank_is_servable(self) -> Self:
        if self.rank not in VLLM_LORA_RANKS:
            raise ValueError(f"rank {self.rank} cannot be served; choose one of {list(VLLM_LORA_RANKS)}")
        return self


class SamplingConfig(Section):
    """How completions are drawn. Behaviour logprobs are those of this very distribution."""

    group_size: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt."""
    max_tokens: Positive = 256
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _learner_can_reproduce(self) -> Self:
        if self.top_p < 1.0:
            raise ValueError(
                f"top_p {self.top_p} truncates the behaviour distribution, which makes importance "
                "ratios wrong for every token outside it; use top_p = 1.0"
            )
        return self


class AlgorithmConfig(Section):
    """What is optimised, and how (`docs/algorithms.md`).

    `name` sets the fields from `surrogate` to `entropy_coefficient` (and `filter_zero_variance`) as a paper
    does; what the file sets besides replaces that. `default` is what the defaults below say: GRPO with a clip
    around the behaviour policy, neither scaled advantages nor a reference. A field that would have no effect
    is refused; None is the value of one that does not apply.
    """

    name: Literal["default", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp"] = "default"
    steps: Positive = 100
    """Policy versions to make; the run ends after them."""
    groups_per_step: Positive = 8
    max_staleness: Annotated[int, Field(ge=0)] = 4
    """Bound on `step trained - step sampled`, held by admission; older groups are dropped and counted."""
    minibatches: Positive = 1
    """Optimizer updates of one step: its groups in order, in so many parts. With more than one, updates after
    the first are off policy by themselves; see `proximal`."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    surrogate: Literal["ppo_clip", "cispo", "reinforce"] = "ppo_clip"
    ratio_level: Literal["token", "sequence"] | None = None
    """Of the surrogate's ratio; `sequence` is the geometric mean over the completion (GSPO). Default token."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The ratio is clipped below 1 - clip_low. Default 0.2."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """And above 1 + clip_high. Default 0.28; with `cispo`, where it bounds a weight, 4."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bounds the ratio where the advantage is negative; None does not."""
    baseline: Literal["group_mean", "leave_one_out", "batch_mean"] = "group_mean"
    """What is subtracted from a reward."""
    advantage_scale: Literal["none", "group_std", "batch_std"] = "none"
    """What the difference is divided by."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """From a loss per token to one: over all tokens, over completions of means over tokens, or over completions
    of sums over tokens divided by `sampling.max_tokens`."""
    overlong_buffer: Fraction = 0.0
    """The last share of `sampling.max_tokens`, in which the reward falls with the length (DAPO); 0: nowhere."""
    overlong_penalty: Annotated[float, Field(gt=0)] | None = None
    """By how much at most. Default 1."""
    proximal: Literal["none", "recomputed", "interpolated"] = "none"
    """The policy that the surrogate's ratio is to: none is the behaviour policy itself; else that which the step
    starts from (decoupled PPO), by a forward pass or guessed from the staleness of each token (AReaL)."""
    importance_weight: Literal["none", "token", "sequence"] = "none"
    """Weigh tokens by proximal / behaviour probability (reinforce: policy / behaviour), truncated. `sequence` is
    the geometric mean over the completion."""
    importance_cap: Annotated[float, Field(ge=1)] | None = None
    """Upper bound of the weight. Default 2."""
    importance_mask: Literal["none", "token", "sequence"] = "none"
    """Leave out tokens, or whole completions by their geometric mean, whose weight is outside the band below."""
    importance_mask_low: Annotated[float, Field(ge=0)] | None = None
    """Default 0.5 by token, 0.99 by sequence."""
    importance_mask_high: Annotated[float, Field(gt=0)] | None = None
    """Default 5 by token, 1.01 by sequence."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Of the divergence from the base model; above 0 it costs a forward pass with the adapter switched off."""
    kl_estimator: Literal["k2", "k3"] | None = None
    """Default k3. k1 is logged with them but is no loss: the mean of its gradient is 0."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Of the bonus for entropy."""
    filter_zero_variance: bool = True
    """Skip groups whose rewards are all equal: with a baseline of their own they carry no gradient of the
    reward (nor do they get one of the KL or the entropy then). Each is named in the commit."""

    @model_validator(mode="before")
    @classmethod
    def _name_stands_for_choices(cls, settings: Any) -> Any:
        if not isinstance(settings, dict):
            return settings
        return complete(settings, {name: field.default for name, field in cls.model_fields.items()})

    @model_validator(mode="after")
    def _choices_fit_together(self) -> Self:
        if problem := contradiction(self.model_dump()):
            raise ValueError(problem)
        return self


class RolloutConfig(Section):
    """Limits that every rollout engine of the run shares."""

    max_model_len: Positive = 1024
    """Prompt plus completion, in tokens."""
    lease_seconds: Annotated[float, Field(gt=0)] = 120.0
    """A group not uploaded (or renewed) within this time is leased to another worker."""
    chunk_tokens: Annotated[int, Field(ge=0)] = 0
    """0: a completion ends on the policy version that it began with. Else it goes on with the newest version
    after so many tokens (and after each turn, either way)."""


class LearnerConfig(Section):
    """How the learner batches."""

    tokens_per_microbatch: Positive = 8192
    """Packing budget: tokens per forward pass, a shared prompt counted once. Gradients do not depend on it."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Compute activations again in the backward pass instead of keeping them: slower, the same gradients. `auto`:
    only where they would not fit."""

    def largest_microbatch(self, longest: int, total: int) -> int:
        """Tokens, given those of the longest sequence and of a whole step: a sequence of more than the budget is a
        micro-batch by itself, and a small step does not fill one."""
        return min(max(self.tokens_per_microbatch, longest), total)


class RunConfig(Section):
    """The whole TOML file."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    seed: int = 0
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    task: dict[str, Any]
    """Validated by `tasks.config.TaskConfig`; the bucket does not interpret it."""
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()

    @model_validator(mode="after")
    def _completion_fits(self) -> Self:
        if self.sampling.max_tokens >= self.rollout.max_model_len:
            raise ValueError(
                f"sampling.max_tokens {self.sampling.max_tokens} leaves no room for a prompt within "
                f"rollout.max_model_len {self.rollout.max_model_len}"
            )
        return self

    @property
    def max_outstanding_groups(self) -> int:
        """Groups issued and not yet consumed, at most. With oldest-first consumption this bounds
        staleness by `max_staleness` (AReaL, arXiv 2505.24298, section 5.1)."""
        return (self.algorithm.max_staleness + 1) * self.algorithm.groups_per_step
