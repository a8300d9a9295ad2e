"""Optimizers, the objective, the learner, supervised training."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from t2g.config.common import RESTART_WINDOW_S, Dtype, FollowingSection, RoleConfig, Section
from t2g.config.feedback import EngineConfig
from t2g.config.field_annotations import ResumeMutable

Schedule = Literal["constant", "linear", "cosine"]
Transport = Literal["store", "ipc", "nccl"]
Surrogate = Literal["ppo", "gspo", "cispo"]
Whitening = Literal["full", "scale_only", "none"]
RolloutCorrection = Literal["token", "sequence", "masked", "none"]
Placement = Literal["span", "step", "scalar", "shuffled"]
Advantages = Literal["gae", "group", "group_normalised", "unlikely"]
DEFAULT_WHITENING = {"group_normalised": "none", "unlikely": "scale_only"}  # others: full


class OptimConfig(Section):
    """Optimizer and learning-rate schedule."""

    lr: float = Field(1e-6, gt=0)
    schedule: Schedule = "linear"
    final_lr_ratio: float = Field(0.0, ge=0, le=1, description="lr at the end, as a share of lr")
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="share of the steps in which lr rises")
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class RewardRuleConfig(FollowingSection):
    """How spans become token rewards."""

    unit: Literal["span", "token"] = Field(
        "span",
        description="span: the value of a span once, at its last token; token: at each token of the span (the paper's "
        "delta), so that a span of eight tokens is worth eight times a span of one",
    )
    placement: Placement = Field(
        "span",
        description="span: as unit says; step: summed per sentence or line of code, at its last token; scalar: summed "
        "at the last token; shuffled: at random tokens (control)",
    )
    good: float = 1.0
    poor: tuple[float, float, float] = Field(
        (-1.0, -1.0, -1.0),
        description="value by severity 1, 2, 3; in the task code, severity 1 is worth 0 by default if a model gives "
        "the feedback",
    )
    overlap: Literal["poor", "good", "sum"] = Field(
        "poor",
        description="label of a token in both good and poor spans, whatever their confidence; sum: adds both values",
    )


class OutcomeRewardConfig(Section):
    """A number for the whole response, which is paid at its last token."""

    source: str = Field(
        pattern=r"^(task|[^\s:]+:\S+)$",
        description="task: the task's own measure; pkg.mod:function: a reward function as in TRL; metric:NAME: a "
        "number that the feedback function returned",
    )
    weight: float = Field(1.0, description="factor, of any sign; 0: only a curve")


class TeacherConfig(Section):
    """A teacher: the frozen reference with the critique of a response in its prompt, without the response itself.

    It is distilled (SDPO, arXiv 2601.20802), or it scales the advantages of the rewards (RLSD, arXiv 2604.03128).
    """

    use: Literal["distill", "scale"] = Field(
        "distill",
        description="distill: KL(policy || teacher) is a term of the loss; scale: the teacher multiplies each token's "
        "advantage by a positive weight, more where the critique changes its probability, with the mean 1",
    )
    weight: float = Field(
        1.0, gt=0, le=1, description="use=distill: weight of KL(policy || teacher) in the loss; PPO's loss has "
        "1 - weight"
    )  # fmt: skip
    bound: float = Field(2.0, gt=1, le=100, description="use=scale: the weights lie between 1 / bound and bound")
    top_k: int = Field(
        20,
        ge=1,
        description="use=distill: the KL is over the policy's k likeliest tokens and the others as one outcome",
    )
    critique: Literal["own", "shuffled"] = Field(
        "own", description="shuffled: the critique of another prompt's response, a control of what the critique adds"
    )

    @model_validator(mode="after")
    def check_use(self) -> Self:
        """Check that no key of the other use is set."""
        default_bound = type(self).model_fields["bound"].default
        default_top_k = type(self).model_fields["top_k"].default
        if self.use == "distill" and self.bound != default_bound:
            raise ValueError(
                f"objective.teacher.bound={self.bound:g} bounds the weights of use=scale, and use=distill has none: "
                f"set use=scale, or bound={default_bound:g}"
            )
        if self.use == "scale" and self.top_k != default_top_k:
            raise ValueError(
                f"objective.teacher.top_k={self.top_k} is for the KL of use=distill, and use=scale has none: set "
                f"use=distill, or top_k={default_top_k}"
            )
        if self.use == "scale" and self.weight != 1:
            raise ValueError(
                f"objective.teacher.weight={self.weight:g} is the share of the distillation in the loss, and use=scale "
                "distils nothing: set weight=1, or use=distill"
            )
        return self

    @property
    def replaces_rewards(self) -> bool:
        """Return whether nothing but the teacher is trained."""
        return self.use == "distill" and self.weight == 1


def _choose_local_coef(values: dict[str, Any]) -> float:
    """Return the weight for spans that are paid at their own tokens, and compared with other samples."""
    rewards = values.get("rewards")
    pays_spans = values.get("span_coef", 0) > 0 and rewards is not None and rewards.placement == "span"
    is_compared = values.get("advantages") == "group"
    return 0.3 if pays_spans and is_compared else 0.0


class ObjectiveConfig(FollowingSection):
    """Settings of the policy's loss (arXiv 2505.22338, section 3.3): rewards -> advantages -> loss.

    Several defaults depend on `advantages`. The paper's settings are configs/methods/paper.yaml.
    """

    rewards: RewardRuleConfig = RewardRuleConfig()
    span_coef: float = Field(1.0, ge=0, description="weight of the token rewards")
    outcome_rewards: tuple[OutcomeRewardConfig, ...] = Field(
        (), description="numbers for the whole response, times their weights, added at the last token: "
        "[{source: task}, {source: pkg.mod:function, weight: 0.5}]"
    )  # fmt: skip
    normalize_criteria: bool = Field(
        False,
        exclude_if=lambda is_on: not is_on,
        description="divide each criterion's rewards and each outcome reward by its own deviation among the samples of "
        "the prompt, before weights apply (GDPO, arXiv 2601.05242): criteria of other scales have equal influence",
    )
    truncation_penalty: float = Field(
        0.0,
        le=0,
        description="token reward at the last token of a response that rollout.max_new_tokens truncated, or that ended "
        "within its thinking; below 0 for a model that thinks",
    )
    train_thinking: bool = Field(
        True, exclude_if=bool, description="train thinking tokens by the advantages of the answer; false: their loss "
        "weight is 0"
    )  # fmt: skip
    gamma: float = Field(1.0, gt=0, le=1)
    advantages: Advantages = Field(
        "group",
        description="group: token returns less those of the prompt's other samples (RLOO where the reward is scalar); "
        "group_normalised: less the group's mean, by its standard deviation (GRPO there); gae: with a critic, the "
        "default where rollout.samples_per_prompt=1; unlikely: -1 at the least likely 20 % of a response's tokens, "
        "without any feedback (control)",
    )
    lam: float = Field(
        default_factory=lambda data: 0.95 if data.get("advantages") == "gae" else 1.0,
        ge=0,
        le=1,
        description="lambda of GAE; below 1 the values of later states replace a part of later rewards. Default 0.95 "
        "with gae, 1 without a critic",
    )
    turn_gamma: float = Field(
        1.0, ge=0, le=1, description="discount from a turn of a conversation to the turn before it, times gamma. 0: "
        "a turn's rewards are those of its own tokens alone; the default with feedback.source=next_message and "
        "rewards.placement span or step"
    )  # fmt: skip
    values: Literal["position", "sentence", "span"] = Field(
        "position",
        description="what a return is compared with, without a critic: the returns of the prompt's other samples at "
        "the same token position, at the start of the same sentence (line of code), or after as many finished spans",
    )
    local_coef: float = Field(
        default_factory=_choose_local_coef,
        ge=0,
        description="weight of a span's value on its own tokens, added to the advantages at unit scale. Default 0.3 "
        "with advantages=group where spans are paid at their own tokens, else 0",
    )
    local_cap: float = Field(
        3.0, gt=0, description="bound of that term before its weight, in root mean squares over the step's tokens"
    )
    local_keeps_sign: bool = Field(
        False, description="whether that term leaves the sign of every advantage that is not 0"
    )
    teacher: TeacherConfig | None = Field(
        None,
        description="the reference that reads the critique, to distil it or to scale the advantages by it; none: the "
        "rewards alone",
    )
    whiten: Whitening = Field(
        default_factory=lambda data: DEFAULT_WHITENING.get(data.get("advantages"), "full"),
        description="normalization over the tokens of the step; default full, with group_normalised none, with "
        "unlikely scale_only",
    )
    surrogate: Surrogate = Field(
        "ppo",
        description="ppo: clipped ratios of tokens; gspo: clipped ratios of responses; cispo: every token has a "
        "gradient, weighted by its bounded ratio",
    )
    clip_eps: float = Field(0.2, gt=0, lt=1, description="ratios below 1 - clip_eps are clipped")
    clip_eps_high: float | None = Field(
        None, gt=0, description="ratios above 1 + clip_eps_high are clipped (DAPO: 0.28); none: clip_eps"
    )
    value_clip: float | None = Field(
        0.2, gt=0, description="clip range of the critic's loss; none: plain squared error"
    )
    vf_coef: float = Field(
        0.1,
        gt=0,
        description="factor of the critic's loss; since the critic has its own AdamW, it only decides how early "
        "learner.critic.max_grad_norm clips",
    )
    entropy_coef: float = Field(0.0, ge=0, description="coefficient of the entropy bonus")
    loss_aggregation: Literal["token", "sequence"] = Field(
        default_factory=lambda data: "sequence" if data.get("advantages") == "group_normalised" else "token",
        description="token: mean over tokens; sequence: mean over responses of their token means, the default with "
        "group_normalised (GRPO, eq. 3)",
    )
    kl_estimator: Literal["k1", "k3", "full"] = Field(
        default_factory=lambda data: "k1" if data.get("advantages") == "gae" else "k3",
        description="k1: in the reward, the default with gae; k3, or full over the whole vocabulary: a term of the "
        "loss. k3 is the default without a critic, where k1 would update a group of equal rewards by its KL alone. "
        "full keeps the logits of a microbatch in memory",
    )
    kl_coef: float = Field(0.05, ge=0, description="initial coefficient of the KL penalty")
    kl_target: float | None = Field(6.0, gt=0, description="nats per sequence; none keeps the coefficient fixed")
    kl_target_per_token: float | None = Field(
        None, gt=0, description="nats per token, for long responses: kl_target is not read then; none: kl_target"
    )
    kl_horizon: int = Field(
        10_000,
        ge=1,
        description="samples over which the coefficient adapts: N samples change it by at most a factor of "
        "exp(0.2 N / kl_horizon)",
    )
    rollout_correction: RolloutCorrection = Field(
        "token",
        description="importance weight for the difference between engine and learner, r = exp(old - rollout). token: "
        "min(r, cap); sequence: min(product of r, cap); masked: r, and 0 outside [1 / cap, cap]",
    )
    rollout_correction_cap: float = Field(2.0, ge=1)

    @model_validator(mode="after")
    def check_credit(self) -> Self:
        if self.values != "position" and self.advantages != "group":
            raise ValueError(
                f"objective.values={self.values} replaces a critic for advantages=group; advantages is "
                f"{self.advantages}: set group, or values=position"
            )
        if self.lam < 1 and self.advantages == "group_normalised":
            raise ValueError(
                f"objective.lam={self.lam:g} needs values that follow each other, which advantages=group_normalised "
                "lacks: set advantages=group, or lam=1"
            )
        has_groups = self.advantages in ("group", "group_normalised")
        if self.normalize_criteria and not (has_groups and self.values == "position"):
            raise ValueError(
                "objective.normalize_criteria has a scale for each prompt, which only its own samples share; "
                f"advantages is {self.advantages} and values is {self.values}: set advantages=group or "
                "group_normalised and values=position, or normalize_criteria=false"
            )
        if self.local_coef > 0 and self.span_coef == 0:
            raise ValueError(
                f"objective.local_coef={self.local_coef:g} pays spans on their own tokens, and span_coef=0 leaves "
                "them out: set span_coef above 0, or local_coef=0"
            )
        return self

    @model_validator(mode="after")
    def check_unlikely(self) -> Self:
        """Check that nothing adds feedback to the control without feedback."""
        if self.advantages != "unlikely":
            return self
        if self.teacher is not None:
            raise ValueError(
                "objective.advantages=unlikely is a control without critiques, and objective.teacher reads them: set "
                "teacher=null, or other advantages"
            )
        if self.local_coef > 0:
            raise ValueError(
                f"objective.advantages=unlikely is a control without critiques, and objective.local_coef="
                f"{self.local_coef:g} pays their spans: set local_coef=0"
            )
        if self.whiten == "full":
            raise ValueError(
                "objective.whiten=full would praise all tokens that objective.advantages=unlikely leaves at 0: set "
                "scale_only or none"
            )
        if not self.kl_in_loss:
            raise ValueError(
                "objective.kl_estimator=k1 is part of the rewards, and objective.advantages=unlikely trains none: set "
                "k3 or full"
            )
        return self

    @property
    def uses_critic(self) -> bool:
        return self.advantages == "gae"

    def resolve_clip_eps_high(self) -> float:
        """Return clip_eps_high, or clip_eps without one."""
        return self.clip_eps if self.clip_eps_high is None else self.clip_eps_high

    @property
    def trains_rewards(self) -> bool:
        is_alone = self.teacher is not None and self.teacher.replaces_rewards
        return self.advantages != "unlikely" and not is_alone

    @property
    def distillation(self) -> TeacherConfig | None:
        """Return the teacher whose KL is a term of the loss, if there is one."""
        has_term = self.teacher is not None and self.teacher.use == "distill"
        return self.teacher if has_term else None

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_estimator != "k1"


class LoRAConfig(Section):
    """Low-rank adapters (Hu et al., arXiv 2106.09685) on every linear layer but the head; defaults are the paper's.

    In a mixture of experts only layers outside of the blocks with experts have adapters.
    """

    r: int = Field(16, ge=1)
    alpha: float = Field(32, gt=0)


class SFTLoRAConfig(LoRAConfig):
    """LoRA with dropout. PPO has none: its ratios would differ from 1 before the first update."""

    dropout: float = Field(0.05, ge=0, lt=1)


class LearnerConfig(RoleConfig):
    """ZeRO-3 ranks that train the policy."""

    # The number of ranks and the microbatch size change a step by rounding alone, so that a run that ran out of memory
    # or lost GPUs can continue with other values.
    workers: ResumeMutable[int] = Field(1, ge=1, description="ranks of this role")
    policy: OptimConfig = OptimConfig()
    critic: OptimConfig = OptimConfig(lr=1e-5)
    critic_ranks: ResumeMutable[RoleConfig | None] = Field(
        None, description="processes of the critic's own ZeRO-3 group; none: the critic shares the policy's ranks"
    )
    schedule_steps: int | None = Field(
        None, ge=1, description="steps of the learning-rate schedules, after which the rate stays at final_lr_ratio; "
        "none: num_steps. A resume with another num_steps needs it, unless the schedules are constant"
    )  # fmt: skip
    lora: LoRAConfig | None = Field(
        None, description="train adapters of the policy; its reference is the model without them. none: all weights"
    )
    gradient_checkpointing: ResumeMutable[bool] = False
    offload: Literal["none", "cpu"] = Field("none", description="cpu: optimizer state and parameters in host memory")
    num_epochs: int = Field(4, ge=1, description="passes over a step's samples")
    minibatches_per_epoch: int = Field(1, ge=1, description="optimizer steps per pass")
    tokens_per_microbatch: ResumeMutable[int] = Field(4096, ge=16, description="budget of one forward and backward")
    share_prompts: ResumeMutable[bool] = Field(
        False,
        description="compute a prompt once for all responses to it in a microbatch, which saves time where prompts are "
        "not much shorter than responses and a pass has one minibatch; every layer must attend to all earlier tokens. "
        "Not measured on a GPU",
    )
    dtype: Dtype = "float32"
    critic_warmup_steps: int = Field(0, ge=0, description="first steps in which only the critic learns")
    sync_bucket_mib: ResumeMutable[float] = Field(64, gt=0, description="size of a bucket of weights, MiB")
    sync_transport: ResumeMutable[Transport] = Field(
        "store",
        description="how weights reach the engines. store: Ray's object store, everywhere; ipc: memory of a GPU that a "
        "rank and an engine share, the default with cluster.gpu_sharing; nccl: broadcast between GPUs, the default "
        "where both sides have whole GPUs. All three check names and the probe; store alone checks hashes of the bytes",
    )
    sync_adapters: ResumeMutable[bool] = Field(
        True,
        description="with lora, engines receive only the adapters, by Ray's object store, and merge them; false: "
        "merged weights by sync_transport, for models whose adapters vLLM does not support",
    )
    sync_verify: ResumeMutable[Literal["probe", "full"]] = Field(
        "probe", description="check after each sync. probe: logprobs of a probe; full: the hash of every tensor as well"
    )
    max_restarts: ResumeMutable[int] = Field(
        2, ge=0, description="restarts of failed ranks from the last checkpoint within restart_window_s"
    )
    restart_window_s: ResumeMutable[float] = Field(RESTART_WINDOW_S, gt=0, description="older starts do not count")
    probe_tolerance: ResumeMutable[float | None] = Field(
        None,
        gt=0,
        description="largest |engine - learner| logprob on the probe that is always accepted, nats, also of an "
        "exported model; after a checkpoint 3 x the difference there is accepted, too; none: 0.001, "
        "with GPU engines 0.03, with bfloat16 0.25",
    )
    step_timeout_s: ResumeMutable[float] = Field(
        600, gt=0, description="deadline of one learner call: model load, forward, update, sync, checkpoint, export"
    )

    @field_validator("critic_ranks")
    @classmethod
    def check_critic_ranks(cls, ranks: RoleConfig | None) -> RoleConfig | None:
        if ranks is not None:
            ranks.check_rank_gpus()
        return ranks

    @property
    def sends_adapters(self) -> bool:
        return self.lora is not None and self.sync_adapters

    @property
    def is_replayable(self) -> bool:
        """Return whether a push can be repeated without the learner."""
        return self.sends_adapters or self.sync_transport == "store"

    @property
    def uses_cuda_ipc(self) -> bool:
        """Return whether engines copy weights directly from the memory of ranks."""
        return self.sync_transport == "ipc" and not self.sends_adapters

    def resolve_probe_tolerance(self, engine: EngineConfig) -> float:
        """Return learner.probe_tolerance, or the difference that rounding explains."""
        if self.probe_tolerance is not None:
            return self.probe_tolerance
        rounding = 0.03 if engine.gpus else 1e-3  # a GPU engine's attention multiplies float32 numbers as TF32
        return 0.25 if "bfloat16" in (engine.dtype, self.dtype) else rounding

    @property
    def rounding_tolerance(self) -> float:
        """Return the difference of log-probabilities that rounding explains between two ways to compute them, nats."""
        rounding = 0.03 if self.gpus else 1e-3
        return 0.25 if self.dtype == "bfloat16" else rounding

    @property
    def export_tolerance(self) -> float:
        """Return the difference that rounding explains between the ranks and plain transformers on a CPU.

        `probe_tolerance` raises it: an export rounds merged adapters as a weight sync does.
        """
        return max(self.rounding_tolerance, self.probe_tolerance or 0)

    def roles(self, objective: ObjectiveConfig) -> dict[str, RoleConfig]:
        """Return the resources of the groups of ranks by config section; the critic's own group comes last."""
        critic_ranks = self.critic_ranks if objective.uses_critic else None
        return {"learner": self} | ({"learner.critic_ranks": critic_ranks} if critic_ranks else {})


class SFTOptions(RoleConfig):
    """Supervised training under Ray Train and ZeRO-3; `workers` are ranks."""

    optim: OptimConfig = OptimConfig(lr=1e-5)
    dtype: Dtype = "float32"
    num_epochs: float = Field(3, gt=0)
    batch_size: int = Field(64, ge=1, description="examples per optimizer step, over all ranks")
    tokens_per_microbatch: int = Field(4096, ge=16)
    max_length: int = Field(
        1024, ge=16, description="prompt plus target, tokens; the input text of a longer prompt is truncated"
    )
    lora: SFTLoRAConfig | None = Field(None, description="train adapters, export the merged model; none: all weights")
    # Neither changes what a step computes: a training that ran out of memory can continue with them.
    gradient_checkpointing: ResumeMutable[bool] = False
    offload: ResumeMutable[Literal["none", "cpu"]] = Field(
        "none", description="cpu: optimizer state and parameters in host memory"
    )
    checkpoint_every: ResumeMutable[int | None] = Field(
        500, ge=1, description="optimizer steps between checkpoints; none: only one at a stop"
    )
    timeout_s: ResumeMutable[float] = Field(
        1800, gt=0, description="deadline of one optimizer step with its checkpoint, and of the start-up"
    )

    @model_validator(mode="after")
    def check_ranks(self) -> Self:
        self.check_rank_gpus()
        return self
