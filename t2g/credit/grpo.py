"""TRL's GRPOTrainer with the advantages of spans: `SpanGRPOTrainer("FOLDER", judge, args, train_dataset=...)`.

Imports trl, which t2g does not install for its users. Written for TRL 1.16: `_generate_and_score_completions` is
private to TRL.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from trl import GRPOConfig, GRPOTrainer

from t2g.config import ObjectiveConfig
from t2g.credit.assign import assign_credit
from t2g.feedback import decode


class SpanGRPOTrainer(GRPOTrainer):
    """GRPO with an advantage for each token: that of the spans, added to that of the reward functions.

    Args:
        judge: `judge(prompts, completions, **columns)` returns a judgement, or None, for each completion: what a
            feedback function of t2g returns.
        reward_funcs: TRL's reward functions, for numbers in addition to the spans.
        objective: How spans become advantages, see `assign_credit`.
        kwargs: Other arguments of GRPOTrainer.
    """

    def __init__(
        self,
        model: Any,
        judge: Callable[..., Sequence[Any]],
        args: GRPOConfig,
        reward_funcs: Any = (),
        objective: ObjectiveConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self.judge = judge
        self.objective = objective
        others = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        args = copy.copy(args)
        other_weights = args.reward_weights or [1.0] * len(others)
        args.reward_weights = [0.0, *other_weights]  # spans are no number
        super().__init__(model, [self.spans, *others], args, **kwargs)

    def spans(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[list[int]], **columns: Any
    ) -> list[float | None]:
        """Judge the completions, set their advantages and log the mean sum of token rewards as `span_reward`."""
        texts = [decode(self.processing_class, ids) for ids in completion_ids]
        judgements = self.judge(prompts=prompts, completions=texts, **columns)
        if len(judgements) != len(texts):
            raise ValueError(
                f"judge returned {len(judgements)} judgements for {len(texts)} completions: return one each"
            )
        own_rows = [*zip(texts, completion_ids, judgements, strict=True)]
        batch = gather_object(own_rows)  # rows of all processes
        size = self.num_generations if self.model.training else self.num_generations_eval
        groups = [row // size for row in range(len(batch))]
        all_texts, all_ids, all_judgements = zip(*batch, strict=True)
        credit = assign_credit(
            self.processing_class, all_texts, all_ids, all_judgements, groups, objective=self.objective
        )

        first = self.accelerator.process_index * len(texts)
        rank_rows = slice(first, first + len(texts))
        self.span_advantages = credit.advantages[rank_rows]
        totals = credit.token_rewards[rank_rows].sum(1).tolist()
        for judged, total in zip(judgements, totals, strict=True):
            if judged is not None:
                columns["log_metric"]("span_reward", total)
        # TRL excludes a completion without any number. Where there are no other functions it would exclude all.
        number = None if len(self.reward_funcs) > 1 else 0.0
        return [number] * len(texts)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        output = super()._generate_and_score_completions(inputs)
        width = output["completion_ids"].shape[1]  # this process's width: the batch's may differ
        num_missing = width - self.span_advantages.shape[1]
        spans = F.pad(self.span_advantages, (0, num_missing))
        advantages = output["advantages"]
        output["advantages"] = advantages[:, None] + spans.to(advantages.device)
        return output
