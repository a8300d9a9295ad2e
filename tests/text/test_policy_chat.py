from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from thinking import QWEN3_LIKE, build_thinking_tokenizer

from t2g.config import ModelConfig, PolicyJob, with_overrides
from t2g.config.loading import identity_values
from t2g.errors import UserError
from t2g.text.policy_chat import load_policy_tokenizer
from t2g.text.tokenizer import encode_chat, load_tokenizer

USER = {"role": "user", "content": "Hi <|im_end|>"}
PROMPT = "<|im_start|>user\nHi < |im_end|><|im_end|>\n<|im_start|>assistant\n"
SYSTEM = 'Answer in "one" line: it\'s {{ short }} %} \\ é 🙂.\nNo more.'


def render(tokenizer: Any, *messages: dict[str, str]) -> str:
    return tokenizer.decode(encode_chat(tokenizer, messages or [USER]))


def load(folder: Path, **options: Any) -> Any:
    return load_policy_tokenizer(ModelConfig(policy=str(folder), **options))


def test_variables_and_system_prompt_reach_the_prompt(tmp_path: Path) -> None:
    build_thinking_tokenizer(tmp_path)
    closed = "<think>\n\n</think>\n\n"
    system = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    assert render(load(tmp_path)) == PROMPT
    assert load(tmp_path).chat_template == QWEN3_LIKE  # without options nothing changes
    assert render(load(tmp_path, chat_template_kwargs={"enable_thinking": True})) == PROMPT
    assert render(load(tmp_path, chat_template_kwargs={"enable_thinking": False})) == PROMPT + closed
    assert render(load(tmp_path, system_prompt=SYSTEM)) == system + PROMPT
    both = load(tmp_path, system_prompt=SYSTEM, chat_template_kwargs={"enable_thinking": False})
    assert render(both) == system + PROMPT + closed
    system_message = {"role": "system", "content": "Mine."}
    assert render(both, system_message, USER) == f"<|im_start|>system\nMine.<|im_end|>\n{PROMPT}{closed}"
    on = both.apply_chat_template([USER], tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert not on.endswith(closed)  # a caller's own value takes precedence, as in another server


def test_an_exported_model_keeps_the_options_and_takes_others(tmp_path: Path) -> None:
    build_thinking_tokenizer(tmp_path / "base")
    options = {"system_prompt": SYSTEM, "chat_template_kwargs": {"enable_thinking": False}}
    tokenizer = load(tmp_path / "base", **options)
    tokenizer.save_pretrained(str(tmp_path / "trained"))
    assert render(load_tokenizer(str(tmp_path / "trained"))) == render(tokenizer)
    assert render(load(tmp_path / "trained", **options)) == render(tokenizer)  # not twice
    other = load(tmp_path / "trained", system_prompt="Other.", chat_template_kwargs={"enable_thinking": True})
    assert render(other) == f"<|im_start|>system\nOther.<|im_end|>\n{PROMPT}"


def test_a_template_that_cannot_take_an_option(tmp_path: Path) -> None:
    def refused(template: str | None, **options: Any) -> str:
        build_thinking_tokenizer(tmp_path, template=template)
        if template is None:
            (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        with pytest.raises(UserError) as error:
            load(tmp_path, **options)
        assert "\n" not in str(error.value)
        return str(error.value).replace(str(tmp_path), "M")

    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"
    modes = "{% if mode not in ['a', 'b'] %}{{ raise_exception('mode is a or b') }}{% endif %}x"
    no_variable = "model.chat_template_kwargs.enable_thinkin: the chat template of M has no such variable"
    assert refused(QWEN3_LIKE, chat_template_kwargs={"enable_thinkin": False}) == no_variable
    assert (
        refused(no_system, system_prompt="s")
        == "model.system_prompt: the chat template of M refuses them: no system here"
    )
    assert "leaves out messages of the role system" in refused("{{ messages[-1].content }}", system_prompt="s")
    assert refused(modes, chat_template_kwargs={"mode": 3}).endswith("refuses them: mode is a or b")
    assert "refuses them: unsupported operand" in refused("{{ n + 1 }}", chat_template_kwargs={"n": None})
    assert "model.system_prompt and model.chat_template_kwargs: the tokenizer of M has no chat template" in refused(
        None, system_prompt="s", chat_template_kwargs={"a": 1}
    )


@pytest.mark.parametrize("key", ["messages", "tools", "a-b", ""])
def test_variables_that_no_config_can_set(key: str) -> None:
    with pytest.raises(ValidationError):
        ModelConfig(policy="p", chat_template_kwargs={key: 1})


def test_the_options_are_part_of_the_identity() -> None:
    job = PolicyJob.model_validate({"model": {"policy": "p"}, "data": {"path": "d"}, "feedback": {"source": "program"}})
    plain = identity_values(job)
    assert plain["model.system_prompt"] is plain["model.chat_template_kwargs"] is None  # as in runs before these keys
    changed = with_overrides(
        job, {"model.chat_template_kwargs": {"enable_thinking": False}, "model.system_prompt": "s"}
    )
    values = identity_values(changed)
    assert {key for key, value in values.items() if value != plain.get(key)} == {
        "model.chat_template_kwargs.enable_thinking", "model.system_prompt"
    }  # fmt: skip
    assert ModelConfig(policy="p", chat_template_kwargs={}) == ModelConfig(policy="p")
