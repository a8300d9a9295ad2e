"""A reward model is used only for the task and style of its training."""

import logging
from pathlib import Path

import pytest

from t2g.config import StyleConfig
from t2g.errors import UserError
from t2g.feedback.card import CARD_FILE, RewardCard, check_card, make_card, read_card, write_card
from t2g.tasks.tiny.task import TinyTask

BARE = StyleConfig(critique=False)
DENSE = StyleConfig(labels="dense")


def test_a_card_comes_back_and_admits_what_it_was_written_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    card = make_card(TinyTask(), DENSE)
    write_card(tmp_path, card)
    assert read_card(tmp_path) == card
    assert (card.task, card.style) == ("tiny", DENSE)
    check_card(tmp_path, card)
    assert caplog.records == []


def test_every_style_has_a_version_of_its_own() -> None:
    styles = (StyleConfig(), BARE, DENSE, StyleConfig(critique=False, labels="dense"))
    assert len({make_card(TinyTask(), style).prompt_version for style in styles}) == 4


def test_another_style_task_or_instruction_is_refused(tmp_path: Path) -> None:
    trained = make_card(TinyTask(), StyleConfig())
    write_card(tmp_path, trained)
    with pytest.raises(UserError, match=r"for task tiny, with a critique, .* needs task tiny, without a critique"):
        check_card(tmp_path, make_card(TinyTask(), BARE))
    with pytest.raises(UserError, match="needs task code, with a critique, sparse labels; set task and style"):
        check_card(tmp_path, trained.model_copy(update={"task": "code"}))
    with pytest.raises(UserError, match=f"{trained.prompt_version} of the instructions .* current version is 0"):
        check_card(tmp_path, trained.model_copy(update={"prompt_version": "0"}))


def test_a_model_without_a_card_gets_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for model in (tmp_path, Path("some/model-on-the-hub")):
        with caplog.at_level(logging.WARNING):
            check_card(model, make_card(TinyTask(), BARE))
        assert caplog.messages.pop().endswith("not checked for task tiny, without a critique, sparse labels")
        caplog.clear()


@pytest.mark.parametrize("text", ["", "{}", '{"task": "tiny", "style": {"critique": 1}}', "[" * 10_000, "\xff"])
def test_a_file_that_is_no_card_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / CARD_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"span_reward\.json: .*it needs task, style and prompt_version"):
        read_card(tmp_path)


def test_the_card_in_the_documentation_is_one() -> None:
    text = '{"task": "tiny", "style": {"critique": true, "labels": "sparse"}, "prompt_version": "5f0c2a91"}'
    assert RewardCard.model_validate_json(text) == RewardCard(
        task="tiny", style=StyleConfig(), prompt_version="5f0c2a91"
    )
