"""The loss against TRL's own, on the same numbers."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from t2g.algo.losses import kl_loss, policy_loss

NUM_RESPONSES = 3
NUM_TOKENS = 5


class OneProcess:
    """The parts of accelerate's Accelerator that TRL's loss uses, for one process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor


def numbers(seed: int) -> dict[str, torch.Tensor]:
    """Return random logprobs and one advantage for each response; the last one has two tokens only."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_RESPONSES, NUM_TOKENS)

    def move(logprobs: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return logprobs + 0.3 * noise

    old = -torch.rand(shape, generator=generator, dtype=torch.float64) * 3
    advantages = torch.randn(NUM_RESPONSES, generator=generator, dtype=torch.float64)
    mask = torch.ones(shape, dtype=torch.float64)
    mask[-1, 2:] = 0
    return {"old": old, "now": move(old), "reference": move(old), "advantages": advantages, "mask": mask}


class TRLTrainer(SimpleNamespace):
    """The attributes of GRPOTrainer that its loss reads; the model's logprobs are given."""

    accelerator = OneProcess()
    args = SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1)
    model = SimpleNamespace(training=True)
    aux_loss_enabled = False
    current_gradient_accumulation_steps = 1
    epsilon_low = 0.2
    off_policy_mask_threshold = None
    top_entropy_quantile = 1.0
    use_vllm = False
    _entropy_bonus_enabled = False

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return self.now, torch.zeros_like(self.now), None


def trl_loss(
    batch: dict[str, torch.Tensor], now: torch.Tensor, loss_type: str, level: str, high: float, beta: float
) -> Any:
    """Return the loss of GRPOTrainer on given logprobs, with its KL corrected by the ratio."""
    from trl import GRPOTrainer

    trainer = TRLTrainer(now=now, beta=beta, loss_type=loss_type, importance_sampling_level=level)
    trainer.epsilon_high = 1 + high if loss_type == "cispo" else high
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    ids = torch.zeros_like(now, dtype=torch.long)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": batch["mask"]}
    inputs |= {"old_per_token_logps": batch["old"], "ref_per_token_logps": batch["reference"]}
    inputs |= {"advantages": batch["advantages"], "num_items_in_batch": batch["mask"].sum()}
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def our_loss(
    batch: dict[str, torch.Tensor], now: torch.Tensor, surrogate: Any, high: float, beta: float
) -> torch.Tensor:
    mask = batch["mask"].flatten()
    flat = {
        "logprobs": now.flatten(),
        "old_logprobs": batch["old"].flatten(),
        "importance_weights": torch.ones_like(mask),
        "weights": mask / mask.sum(),
    }
    advantages = batch["advantages"][:, None].expand(NUM_RESPONSES, NUM_TOKENS).flatten()
    sequence_ids = torch.arange(NUM_RESPONSES).repeat_interleave(NUM_TOKENS)
    loss, _ = policy_loss(
        **flat,
        advantages=advantages,
        sequence_ids=sequence_ids,
        surrogate=surrogate,
        clip_eps=0.2,
        clip_eps_high=high,
    )
    kl, _ = kl_loss(**flat, ref_logprobs=batch["reference"].flatten())
    return loss + beta * kl


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("surrogate", "loss_type", "level", "high", "beta"),
    [
        ("ppo", "bnpo", "token", 0.2, 0.3),
        ("ppo", "dapo", "token", 0.28, 0.3),
        ("cispo", "cispo", "token", 0.28, 0.3),
        ("gspo", "bnpo", "sequence", 0.2, 0.0),  # TRL multiplies its KL by the response's ratio, which biases it
    ],
)
def test_loss_and_gradient_are_those_of_trl(
    seed: int, surrogate: str, loss_type: str, level: str, high: float, beta: float
) -> None:
    batch = numbers(seed)
    now = batch["now"].clone().requires_grad_()
    ours = our_loss(batch, now, surrogate, high, beta)
    (our_gradient,) = torch.autograd.grad(ours, now)
    expected = trl_loss(batch, now, loss_type, level, high, beta)
    (expected_gradient,) = torch.autograd.grad(expected, now)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(our_gradient, expected_gradient, rtol=1e-9, atol=1e-12)
    assert our_gradient.abs().sum() > 0
