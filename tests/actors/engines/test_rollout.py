"""Seeds and the window check; the fleet itself is in tests/integration."""

import numpy as np
import pytest

from actors.engines.rollout import check_prompt_fits, sample_seed
from t2g.errors import UserError
from t2g.types import Prompt


def prompt(length: int) -> Prompt:
    return Prompt(prompt_id="p", prompt_ids=np.zeros(length, np.int32), prompt_text="", task="prompts")


def test_seeds_differ_by_run_prompt_and_sample_and_fit_vllm() -> None:
    seeds = [sample_seed(s, p, i) for s in (1, 11) for p in ("1", "11", "") for i in (1, 11)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)
    assert sample_seed(1, "p", 0) == 2009800102034848454


def test_the_whole_response_must_fit_behind_the_prompt() -> None:
    check_prompt_fits(prompt(24), max_new_tokens=8, max_model_len=32)
    with pytest.raises(UserError, match=r"prompt p has 25 tokens: with 8 new ones .* window of 32"):
        check_prompt_fits(prompt(25), max_new_tokens=8, max_model_len=32)
    with pytest.raises(UserError, match="prompt p has no tokens"):
        check_prompt_fits(prompt(0), max_new_tokens=8, max_model_len=32)
