"""The policy's tokenizer: the chat options of the config become defaults of its chat template.

So every prompt of a run has them, and a model exported by the run keeps them, in t2g and in other servers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from t2g.config import ModelConfig
from t2g.errors import UserError
from t2g.text.tokenizer import chat_renderer, check_chat_template, load_tokenizer


def load_policy_tokenizer(model: ModelConfig) -> Any:
    """Load the tokenizer of a policy; its template has `chat_template_kwargs` and `system_prompt` as defaults.

    Raises:
        UserError: There is no tokenizer, or its chat template cannot take the options.
    """
    tokenizer = load_tokenizer(model.policy, model.revision)
    set_template_defaults(tokenizer, model)
    return tokenizer


def set_template_defaults(tokenizer: Any, model: ModelConfig) -> None:
    """Change the tokenizer's chat template to one with the options of `model` as defaults.

    A message of the role system in a chat, and a variable that the caller sets, take precedence.

    >>> set_template_defaults(tokenizer, ModelConfig(policy="p", chat_template_kwargs={"enable_thinking": False}))
    >>> tokenizer.chat_template.splitlines()[0]
    '{% if enable_thinking is not defined %}{% set enable_thinking = False %}{% endif %}'

    Raises:
        UserError: The tokenizer has no chat template, or its template refuses or ignores an option.
    """
    name = model.policy
    variables = model.chat_template_kwargs or {}
    options = [f"model.{key}" for key in ("system_prompt", "chat_template_kwargs") if getattr(model, key)]
    if not options:
        return
    keys = " and ".join(options)
    if not tokenizer.chat_template:
        raise UserError(
            f"{keys}: the tokenizer of {name} has no chat template that could use them; take an instruct model, or "
            "put a chat_template.jinja in its folder"
        )
    template = tokenizer.get_chat_template()
    defaults: list[str] = []
    for key, value in variables.items():
        if not re.search(rf"\b{key}\b", template):
            raise UserError(f"model.chat_template_kwargs.{key}: the chat template of {name} has no such variable")
        defaults.append(f"{{% if {key} is not defined %}}{{% set {key} = {value!r} %}}{{% endif %}}")
    if model.system_prompt:
        system = repr([{"role": "system", "content": model.system_prompt}])
        defaults.append(
            f"{{% if messages[0].role != 'system' %}}{{% set messages = {system} + messages %}}{{% endif %}}"
        )
    tokenizer.chat_template = "\n".join([*defaults, template])  # Jinja drops the line end after a block

    chat = [{"role": "user", "content": "Hello"}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        raise UserError(f"{keys}: the chat template of {name} refuses them: {error}") from error
    if model.system_prompt and model.system_prompt.strip() not in text:
        raise UserError(
            f"model.system_prompt: the chat template of {name} leaves out messages of the role system; put the text "
            "into the prompts instead"
        )


def set_tools(tokenizer: Any, schemas: Sequence[Mapping[str, Any]], name: str) -> None:
    """Change the tokenizer's chat template to one that describes these tools, unless the caller gives others.

    Args:
        schemas: Tools of OpenAI's form.
        name: The model, for messages.

    Raises:
        UserError: The tokenizer has no chat template, or its template leaves out tools.
    """
    check_chat_template(tokenizer)
    template = tokenizer.get_chat_template(tools=[*schemas])
    literal = repr(json.loads(json.dumps([*schemas])))
    tokenizer.chat_template = f"{{% if not tools %}}{{% set tools = {literal} %}}{{% endif %}}\n{template}"
    render = chat_renderer(tokenizer)
    text = render([{"role": "user", "content": "Hello"}])
    missing = [schema["function"]["name"] for schema in schemas if schema["function"]["name"] not in text]
    if missing:
        raise UserError(
            f"environment: the chat template of {name} leaves out the tools {', '.join(missing)}; take a model that "
            "was trained with tools"
        )
