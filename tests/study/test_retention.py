import json
from pathlib import Path

import numpy as np
import pytest
from fakes import letter_tokenizer

from t2g.config import DataConfig
from t2g.errors import UserError
from t2g.study.retention import measure_retention, read_texts
from t2g.types import TokenStats


def test_texts_for_retention(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer(tmp_path)
    file = tmp_path / "texts.jsonl"
    rows = [{"prompt": "ab", "solution": "cab"}, {"prompt": "a" * 9, "solution": "b"}]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = DataConfig(path=str(file), columns={"response": "solution"})
    (retention_text,) = read_texts(data, tokenizer, 8)
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "cab")]
    assert [retention_text.prompt_ids.tolist(), retention_text.response_ids.tolist()] == expected
    assert read_texts(None, tokenizer, 8) == []
    file.write_text('{"prompt": "ab", "response": " "}\n')
    with pytest.raises(UserError, match=r"compare\.retention record 1 \(texts\.jsonl:1\): field response"):
        read_texts(DataConfig(path=str(file)), tokenizer, 8)


def test_texts_that_no_window_holds_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = letter_tokenizer(tmp_path)
    file = tmp_path / "texts.jsonl"
    rows = [{"prompt": "ab", "response": "cab"}, {"prompt": "a" * 9, "response": "b"}]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = DataConfig(path=str(file))
    assert len(read_texts(data, tokenizer, 10)) == 2 and not caplog.text
    assert len(read_texts(data, tokenizer, 9)) == 1
    assert "1 of 2 texts are longer than rollout.max_model_len=9" in caplog.text
    with pytest.raises(UserError, match=r"rollout\.max_model_len=4 is shorter .*: the shortest has 5 tokens"):
        read_texts(data, tokenizer, 4)


def test_retention_is_a_mean_over_all_tokens() -> None:
    def stats(policy: list[float], reference: list[float]) -> TokenStats:
        numbers = {"old_logprobs": policy, "ref_logprobs": reference, "values": [], "entropy": []}
        return TokenStats(**{name: np.array(values, np.float32) for name, values in numbers.items()})

    texts = [stats([-1.0], [-0.5]), stats([-2.0, -3.0], [-2.0, -2.0])]
    retention = measure_retention(texts, has_reference=True)
    assert retention == {"perplexity": pytest.approx(np.exp(2)), "retention": pytest.approx(-0.5)}
    assert measure_retention(texts, has_reference=False) == {"perplexity": pytest.approx(np.exp(2))}
