"""Records are read as they are published: in the forms of OpenAI, TRL and Alpaca, and with a system prompt."""

from typing import Any

import pytest

from t2g.tasks.base import get_task

SYSTEM = {"role": "system", "content": "Be short."}
HELLO = {"role": "user", "content": "Hi"}
WELCOME = {"role": "assistant", "content": "Hello."}
JOKE = {"role": "user", "content": "Tell a joke."}
ANSWER = {"role": "assistant", "content": "No."}
CHAT = [SYSTEM, HELLO, WELCOME, JOKE, ANSWER]
ALPACA = {"instruction": "Translate to French.", "input": "Good morning.", "output": "Bonjour."}
ONE_QUESTION = [{"role": "user", "content": "Sky?"}]


@pytest.mark.parametrize(
    ("record", "messages", "reference"),
    [
        ({"prompt": "Hi", "messages": CHAT, "category": "Chat"}, CHAT[:-1], "No."),  # no_robots: the first question
        ({"messages": CHAT[:-1]}, CHAT[:-1], None),
        ({"prompt": CHAT[:-1], "completion": [ANSWER]}, CHAT[:-1], "No."),
        ({"prompt": "Sky?", "completion": "Blue."}, ONE_QUESTION, "Blue."),
        (ALPACA, [{"role": "user", "content": "Translate to French.\n\nGood morning."}], "Bonjour."),
        (ALPACA | {"input": ""}, [{"role": "user", "content": "Translate to French."}], "Bonjour."),
        (ALPACA | {"input": " ", "output": ""}, [{"role": "user", "content": "Translate to French."}], None),
        ({"prompt": "Sky?", "output": "Blue.", "completion": ["Blue.", "Azure."]}, ONE_QUESTION, None),
        ({"prompt": "Sky?", "completion": 4}, ONE_QUESTION, None),
        ({"prompt": "Sky?", "system": "Be short."}, [SYSTEM, *ONE_QUESTION], None),
        ({"prompt": "Sky?", "system": ""}, ONE_QUESTION, None),
        ({"messages": CHAT, "system": "Be long."}, CHAT[:-1], "No."),
    ],
)
def test_a_record_is_read_as_its_publisher_means_it(
    record: dict[str, Any], messages: list[dict[str, str]], reference: str | None
) -> None:
    task = get_task("prompts")
    assert task.policy_messages(record) == messages
    assert task.reference(record) == reference
    assert not {"prompt", "messages"} & task.payload(record).keys()


@pytest.mark.parametrize("content", ["", " \n", [{"type": "text", "text": ""}]])
def test_an_empty_question_is_no_prompt(content: Any) -> None:
    with pytest.raises(ValueError, match="the last of messages is empty"):
        get_task("prompts").policy_messages({"messages": [{"role": "user", "content": content}]})


@pytest.mark.parametrize(("number", "prompt_id"), [(7, "7"), (7.0, "7"), (7.5, "7.5"), (float("nan"), None)])
def test_an_id_is_text_and_a_gap_is_none(number: float, prompt_id: str | None) -> None:
    assert get_task("prompts").prompt_id({"prompt": "Sky?", "id": number}) == prompt_id


def test_a_conversation_that_ends_with_a_user_is_no_response() -> None:
    with pytest.raises(ValueError, match="field completion ends with a message by user"):
        get_task("prompts").reference({"prompt": "Sky?", "completion": ONE_QUESTION})


@pytest.mark.parametrize("prompt", [{}, {"prompt": "Hi"}])
def test_every_turn_before_a_chosen_response_is_its_prompt(prompt: dict[str, str]) -> None:
    task = get_task("qa")
    record = prompt | {"chosen": CHAT[1:], "rejected": [*CHAT[1:-1], WELCOME]}
    assert task.policy_messages(record) == CHAT[1:-1]
    assert (task.response(record), task.reference(record), task.is_chat(record)) == ("No.", "No.", True)
    assert task.policy_messages(record | {"system": "Be short."}) == [SYSTEM, *CHAT[1:-1]]
    assert not task.is_chat({"prompt": "Hi", "chosen": CHAT[1:3]})
