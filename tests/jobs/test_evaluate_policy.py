"""jobs.evaluate --what policy on fake engines and a fake server: what is asked, once, and what is left."""

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fake_endpoint import KEY, KEY_VARIABLE, FakeEndpoint, Reply, fake_endpoint, says
from killed_jobs import run_until_killed

from jobs.common.cli import StopFlag
from jobs.evaluate.__main__ import evaluate
from jobs.evaluate.policy_evaluation import Evaluation
from t2g.config import ModelConfig, PolicyEvaluationJob, PolicyJob, loading, with_overrides
from t2g.errors import RunStopped, SamplingFailed, Stopped, UserError
from t2g.interfaces import Sampling
from t2g.tasks.tiny.assets import build_tokenizer
from t2g.types import Prompt, Rollout

PURCHASES = [*product(("phone", "car", "lamp", "radio", "chair"), ("Rome", "Bonn", "Oslo", "Lima"))]
SENTENCES = [
    f"The {thing} that I bought in {town} broke after {n} days and the shop is rude about it ."
    for n, (thing, town) in enumerate(PURCHASES)
]
RECORDS = [{"id": str(i), "post": f"post {i}", "ideal_human_summary": text} for i, text in enumerate(SENTENCES)]
PLAIN = [{"prompt": record["post"], **record} for record in RECORDS]  # of a task without ROUGE and BLEU, which are slow


class Engine:
    """Copies the reference, up to so many words; answers at most `left` prompts before it is killed. `says` gives
    another text, by prompt_id and number of the sample."""

    end: type[BaseException] = KeyboardInterrupt

    def __init__(self, num_words: int, left: int = 10**6, says: Callable[[str, int], str] | None = None) -> None:
        self.num_words = num_words
        self.left = left
        self.says = says
        self.received_requests: list[str] = []
        self.samplings: list[Sampling] = []

    async def sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        if self.left == 0:
            raise self.end
        self.left -= 1
        self.received_requests.append(prompt.prompt_id)
        self.samplings.append(sampling)
        words = prompt.payload.get("ideal_human_summary", "").split()
        rollouts = []
        for index in range(sampling.num_samples):
            text = self.says(prompt.prompt_id, index) if self.says else " ".join(words[: self.num_words])
            finish_reason = "length" if self.num_words < len(words) else "stop"
            rollout = Rollout(
                prompt_id=prompt.prompt_id, sample_index=index, prompt_ids=prompt.prompt_ids,
                response_ids=np.zeros(1, np.int32), rollout_logprobs=np.zeros(1, np.float32), response_text=text,
                finish_reason=finish_reason, policy_versions=((0, 1, 0),),
            )  # fmt: skip
            rollouts.append(rollout)
        return rollouts


def temperatures_of(engines: dict[str, Engine]) -> list[set[float]]:
    temperatures = []
    for engine in engines.values():
        own_temperatures = {sampling.temperature for sampling in engine.samplings}
        temperatures.append(own_temperatures)
    return temperatures


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokenizers: those of the policies differ."""
    folder = tmp_path_factory.mktemp("models")
    build_tokenizer(folder / "whole", ["x"], vocab_size=261)
    build_tokenizer(folder / "cut", SENTENCES, vocab_size=400)
    return folder


def job(tmp_path: Path, models: Path, records: list[dict[str, Any]] = RECORDS, **fields: Any) -> PolicyEvaluationJob:
    data = tmp_path / "heldout.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    defaults = {
        "run": {"root": tmp_path / "runs", "name": "evaluation"},
        "task": "summarization",
        "policies": {name: {"policy": str(models / name)} for name in ("whole", "cut")},
        "data": {"path": str(data)},
    }
    return PolicyEvaluationJob.model_validate(defaults | fields)


def run(config: PolicyEvaluationJob, engines: dict[str, Engine], stop: StopFlag | None = None) -> dict[str, Any]:
    @contextmanager
    def serve(model: ModelConfig) -> Iterator[Engine]:
        yield engines[Path(model.policy).name]

    return Evaluation(config).run(serve, StopFlag() if stop is None else stop)


def pair(result: dict[str, Any], measure: str) -> dict[str, Any]:
    return next(one for one in result["pairs"] if one["measure"] == measure)


def test_a_policy_truncated_to_8_words_is_worse(tmp_path: Path, models: Path) -> None:
    config = job(tmp_path, models)
    result = run(config, {"whole": Engine(100), "cut": Engine(8)})
    for measure in ("rouge1", "rouge2", "rougeL", "bleu"):
        pairing = pair(result, measure)
        assert pairing["policy"] == "cut"
        assert pairing["high"] < 0
        assert pairing["p_holm"] < 0.01
        assert pairing["value"] < -pairing["resolvable"]
    assert result["policies"]["whole"]["bleu"]["value"] == pytest.approx(100)
    assert result["policies"]["cut"]["words"] == {"value": 8, "low": 8, "high": 8}
    assert result["policies"]["cut"]["truncated"]["value"] == 1
    assert result["problems"]["truncated"]["count"] == len(RECORDS)
    folder = config.run.folder
    assert json.loads((folder / "evaluation.json").read_text())["prompts"] == len(RECORDS)
    assert "| cut | whole | rougeL | -0." in (folder / "evaluation.md").read_text()
    assert "The phone that I bought" in (folder / "evaluation.html").read_text()
    (first, *_) = json.loads((folder / "exports" / "alpaca_eval_cut.json").read_text())
    assert first == {"instruction": "post 0", "output": " ".join(SENTENCES[0].split()[:8]), "generator": "cut"}


def test_a_reference_that_is_no_text_is_for_the_feedback_function_alone(tmp_path: Path, models: Path) -> None:
    records = [{"prompt": f"{n} * 7?", "reference": 7 * n} for n in range(4)]
    config = job(tmp_path, models, records, task="prompts")
    result = run(config, {"whole": Engine(1, says=lambda *_: "42"), "cut": Engine(1, says=lambda *_: "4")})
    assert result["policies"]["whole"]["words"]["value"] == 1


class Thinking(Engine):
    """Thinks before it copies the reference."""

    async def sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        head = "Hm hm hm hm hm.</think>"
        sampled = await super().sample(prompt, sampling)
        return [replace(r, response_text=head + r.response_text, answer_start=len(head)) for r in sampled]


def test_the_thinking_of_a_policy_is_not_measured(tmp_path: Path, models: Path) -> None:
    thinks = {"policy": str(models / "cut"), "thinking_tags": ["<think>", "</think>"]}
    policies = {"whole": {"policy": str(models / "whole")}, "cut": thinks}
    config = job(tmp_path, models, PLAIN, task="prompts", policies=policies)
    result = run(config, {"whole": Engine(100), "cut": Thinking(100)})
    assert result["policies"]["cut"] == result["policies"]["whole"]
    rows = (config.run.folder / "responses" / "cut" / "responses.jsonl").read_text()
    assert "Hm" not in rows and "The phone that I bought" in rows
    engine = Engine(100)
    run(with_overrides(config, {"policies.cut.thinking_tags": []}), {"cut": engine})
    assert len(engine.received_requests) == len(RECORDS)  # other tags make other answers


def test_rouge_and_bleu_of_the_saved_responses_are_the_reports(tmp_path: Path, models: Path) -> None:
    """Recomputed from files alone, with the packages' own loops; one response is empty, one is huge."""
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    records = [*RECORDS[:8], {"id": "x", "post": "p", "ideal_human_summary": "word " * 3000}]
    config = job(tmp_path, models, records, policies={"cut": {"policy": str(models / "cut")}})
    engine = Engine(6)
    run(config, {"cut": engine})
    lines = (config.run.folder / "responses" / "cut" / "responses.jsonl").read_text().splitlines()
    texts = {row["prompt_id"]: row["responses"][0]["text"] for row in map(json.loads, lines)}
    result = json.loads((config.run.folder / "evaluation.json").read_text())["policies"]["cut"]
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    references = {r["id"]: r["ideal_human_summary"] for r in records}
    rouge = [scorer.score(references[i], text)["rougeL"].fmeasure for i, text in texts.items()]
    assert result["rougeL"]["value"] == pytest.approx(sum(rouge) / len(rouge), abs=1e-6)
    bleu = BLEU().corpus_score([*texts.values()], [[references[i] for i in texts]]).score
    assert result["bleu"]["value"] == pytest.approx(bleu, abs=1e-6)


def test_pass_at_k_of_problems_of_both_formats(tmp_path: Path, models: Path) -> None:
    """`whole` passes every time but in one sample of one problem; one fault is not resolvable."""
    code = "def double(values: List[int]) -> List[int]:\n    return [2 * v for v in values]\n"
    human_eval = {
        "prompt": 'from typing import List\n\n\ndef double(values: List[int]) -> List[int]:\n    """Twice."""\n',
        "entry_point": "double", "test": "def check(f):\n    assert f([1, 2]) == [2, 4]\n",
    }  # fmt: skip
    kodcode = {
        "question": "Double them.", "question_id": "k",
        "test": "from solution import double\n\ndef test_it():\n    assert double([3]) == [6]\n",
    }  # fmt: skip
    records = [human_eval | {"task_id": "HumanEval/0"}, human_eval | {"task_id": "HumanEval/1"}, kodcode]

    def says(prompt_id: str, index: int) -> str:
        typed = f"from typing import List\n{code}" if prompt_id == "k" else code  # the other prompts import it
        return typed.replace("2 * v", "3 * v") if (prompt_id, index) == ("HumanEval/1", 1) else typed

    config = job(
        tmp_path, models, records, task="code", pass_at=[1, 2], sandbox={"require": []},
        rollout={"samples_per_prompt": 2, "temperature": 1.0},
    )  # fmt: skip
    always = Engine(0, says=lambda prompt_id, index: says(prompt_id, 0))
    result = run(config, {"whole": Engine(0, says=says), "cut": always})
    figures = {name: of["pass@1"]["value"] for name, of in result["policies"].items()}
    assert figures == {"whole": pytest.approx(2.5 / 3), "cut": 1}
    assert result["policies"]["whole"]["pass@2"]["value"] == 1
    one = pair(result, "pass@1")
    assert (one["wins"], one["ties"], one["losses"]) == (1, 2, 0)
    assert one["value"] < one["resolvable"]
    assert result["warning"] is None


def test_a_policy_may_have_a_temperature_of_its_own(tmp_path: Path, models: Path) -> None:
    engines = {"whole": Engine(100), "cut": Engine(8)}
    run(job(tmp_path, models, PLAIN, task="prompts", temperatures={"cut": 0.3}), engines)
    assert temperatures_of(engines) == [{1.0}, {0.3}]
    again = {"whole": Engine(100), "cut": Engine(8)}
    run(job(tmp_path, models, PLAIN, task="prompts", temperatures={"cut": 0.5}), again)
    assert temperatures_of(again) == [set(), {0.5}]
    with pytest.raises(ValueError, match="temperatures names warm; the policies are whole, cut"):
        job(tmp_path, models, temperatures={"warm": 1})


def test_killed_half_way_it_asks_for_the_rest_alone(tmp_path: Path, models: Path) -> None:
    config = job(tmp_path, models, rollout={"max_num_seqs": 1})
    first = {"whole": Engine(100), "cut": Engine(8, left=7)}
    run_until_killed(run, config, first)
    second = {"whole": Engine(100), "cut": Engine(8)}
    result = run(config, second)
    assert second["whole"].received_requests == []
    assert result["policies"]["cut"]["words"]["value"] == 8
    assert sorted(first["cut"].received_requests + second["cut"].received_requests) == sorted(
        record["id"] for record in RECORDS
    )
    again = {"whole": Engine(0), "cut": Engine(0)}
    assert run(config, again)["pairs"] == result["pairs"]
    assert again["cut"].received_requests == []


def test_a_signal_lets_what_is_under_way_come_in_and_the_same_command_goes_on(tmp_path: Path, models: Path) -> None:
    config = job(tmp_path, models, policies={"cut": {"policy": str(models / "cut")}}, rollout={"max_num_seqs": 1})
    stop = StopFlag()

    class Slow(Engine):
        async def sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
            sampled = await super().sample(prompt, sampling)
            if len(self.received_requests) > 3:
                stop.signal_name = "SIGTERM"
                await asyncio.sleep(0.5)
            return sampled

    first = Slow(8)
    second = Engine(8)
    with pytest.raises(Stopped):
        run(config, {"cut": first}, stop)
    assert 4 <= len(first.received_requests) <= 6, "two at once; nothing new is asked"
    run(config, {"cut": second})
    assert sorted(first.received_requests + second.received_requests) == sorted(record["id"] for record in RECORDS)


def test_unanswered_prompts_are_sampled_again_by_the_next_start(tmp_path: Path, models: Path) -> None:
    config = job(tmp_path, models, policies={"cut": {"policy": str(models / "cut")}})
    engine = Engine(8, left=15)
    engine.end = SamplingFailed
    with pytest.raises(RunStopped, match="responses of cut: 5 of 20 got no answer"):
        run(config, {"cut": engine})
    engine = Engine(8)
    run(config, {"cut": engine})
    assert len(engine.received_requests) == 5


def test_a_policy_may_come_later_and_equal_ones_differ_by_nothing(tmp_path: Path, models: Path) -> None:
    run(job(tmp_path, models, policies={"whole": {"policy": str(models / "whole")}}), {"whole": Engine(100)})
    both = {"whole": {"policy": str(models / "whole")}, "twin": {"policy": str(models / "cut")}}
    engines = {"whole": Engine(100), "cut": Engine(100)}
    result = run(job(tmp_path, models, policies=both), engines)
    assert engines["whole"].received_requests == []
    assert {(one["value"], one["low"], one["high"]) for one in result["pairs"]} == {(0, 0, 0)}
    assert {one["p"] for one in result["pairs"]} == {1, None}  # None: of measures that nobody tests
    for file in ("evaluation.md", "evaluation.html"):
        assert "Every pair ties on every prompt" in (tmp_path / "runs/evaluation" / file).read_text()


def test_an_adapter_is_merged_again_for_other_weights_of_it_or_of_its_base(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors.learner import lora

    base = tmp_path / "base"
    adapter = tmp_path / "adapter"
    merges = list[str]()

    def merge(adapter: Path, folder: Path, dtype: str) -> None:
        merges.append(folder.name)
        shutil.copytree(models / "cut", folder)

    monkeypatch.setattr(lora, "merge_adapter", merge)
    for folder in (base, adapter):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"1")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    config = job(tmp_path, models, PLAIN[:2], task="prompts", policies={"tuned": {"policy": str(adapter)}})
    for changed, num_asked in ((None, 2), (None, 0), (adapter, 2), (base, 2)):
        if changed:
            (changed / "model.safetensors").write_bytes(b"22")
        engine = Engine(8)

        @contextmanager
        def serve(model: ModelConfig, engine: Engine = engine) -> Iterator[Engine]:
            yield engine

        Evaluation(config).run(serve, StopFlag())
        assert len(engine.received_requests) == num_asked
    assert len(set(merges)) == len(merges) == 3
    assert [path.name for path in (config.run.folder / "merged" / "tuned").iterdir()] == merges[-1:]


# ------------------------------------------------------------------------------------------------- sampling as training
def trained(folder: Path, models: Path, **rollout: Any) -> Path:
    """The policy in the folder of a training run that sampled so."""
    job = {"model": {"policy": "m"}, "data": {"path": "d"}, "feedback": {"source": "program"}, "rollout": rollout}
    loading.write(PolicyJob.model_validate(job), folder)
    return Path(shutil.copytree(models / "cut", folder / "policy"))


def load_job(tmp_path: Path, models: Path, **fields: Any) -> PolicyEvaluationJob:
    """The job of a config file."""
    config = job(tmp_path, models, PLAIN[:2], task="prompts", **fields).model_dump(mode="json", exclude_unset=True)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    return loading.load(PolicyEvaluationJob, tmp_path / "job.yaml")


def test_policies_are_sampled_as_their_training_was(tmp_path: Path, models: Path) -> None:
    policy = trained(tmp_path / "own", models, temperature=0.7, max_new_tokens=48, max_model_len=320)
    policies = {"whole": {"policy": str(models / "whole")}, "policy": {"policy": str(policy)}}
    config = load_job(tmp_path, models, policies=policies)
    engines = {"whole": Engine(9), "policy": Engine(9)}
    result = run(config, engines)
    assert (result["temperature"], result["max_new_tokens"], config.rollout.max_model_len) == (0.7, 48, 320)
    for engine in engines.values():
        (sampling,) = set(engine.samplings)
        assert (sampling.temperature, sampling.max_new_tokens, sampling.num_samples) == (0.7, 48, 1)
    assert with_overrides(config, {"run.seed": 2}).rollout == config.rollout


def test_what_the_user_sets_counts_more_than_the_training(tmp_path: Path, models: Path) -> None:
    policy = trained(tmp_path / "own", models, temperature=0.7, max_new_tokens=48)
    for rollout, expected in (({"temperature": 0}, (0, 48)), ({"max_new_tokens": 9}, (0.7, 9))):
        config = load_job(tmp_path, models, policies={"a": {"policy": str(policy)}}, rollout=rollout)
        assert (config.rollout.temperature, config.rollout.max_new_tokens) == expected
    no_run = load_job(tmp_path, models, policies={"a": {"policy": str(models / "cut")}})
    assert (no_run.rollout.temperature, no_run.rollout.max_new_tokens) == (1, 128), "the defaults of training"


def test_checkpoints_have_a_run_and_two_kinds_of_sampling_are_refused(tmp_path: Path, models: Path) -> None:
    first = trained(tmp_path / "first", models, temperature=0.7, max_new_tokens=256)
    checkpoint = tmp_path / "second" / "checkpoints" / "step-00000010" / "policy"
    shutil.move(trained(tmp_path / "second", models, temperature=0.9, max_new_tokens=256), checkpoint)
    policies = {"a": {"policy": str(first)}, "b": {"policy": str(checkpoint)}}
    with pytest.raises(UserError, match=r"rollout\.temperature is not set, .* \[0\.7, 0\.9\]"):
        load_job(tmp_path, models, policies=policies)
    assert load_job(tmp_path, models, policies=policies, rollout={"temperature": 1}).rollout.temperature == 1
    with pytest.raises(UserError, match=r"training: max_new_tokens=256 leaves no room"):
        load_job(tmp_path, models, policies={"a": {"policy": str(first)}}, rollout={"max_model_len": 200})


# ---------------------------------------------------------------------------------------- what changed under a run.name
def num_lines(config: PolicyEvaluationJob, file: str) -> int:
    return (config.run.folder / file).read_text().count("\n")


def test_a_corrected_reference_is_measured_anew_and_nothing_else(tmp_path: Path, models: Path) -> None:
    policies = {"cut": {"policy": str(models / "cut")}}
    run(job(tmp_path, models, RECORDS[:4], policies=policies), {"cut": Engine(8)})
    corrected = [*RECORDS[:3], RECORDS[3] | {"ideal_human_summary": "The shop is rude ."}]
    config = job(tmp_path, models, corrected, policies=policies)
    after = run(config, {"cut": Engine(0, left=0)})["policies"]["cut"]
    assert num_lines(config, "scores/cut.jsonl") == 5
    fresh = Engine(0, says=lambda prompt_id, index: " ".join(SENTENCES[int(prompt_id)].split()[:8]))
    elsewhere = {"root": tmp_path / "fresh", "name": "evaluation"}
    expected = run(job(tmp_path, models, corrected, policies=policies, run=elsewhere), {"cut": fresh})
    for measure in ("rouge1", "rougeL", "bleu"):
        assert after[measure] == expected["policies"]["cut"][measure]


def test_a_corrected_test_is_run_on_the_same_responses(tmp_path: Path, models: Path) -> None:
    def records(result: int) -> list[dict[str, Any]]:
        test = "from solution import double\n\ndef test_it():\n    assert double(3) == {}\n"
        return [
            {"question": f"Double {i}.", "question_id": f"k{i}", "test": test.format(n)}
            for i, n in enumerate((6, result))
        ]

    options = {"task": "code", "sandbox": {"require": []}, "policies": {"cut": {"policy": str(models / "cut")}}}
    engine = Engine(0, says=lambda prompt_id, index: "def double(value):\n    return 2 * value\n")
    for result, passed in ((5, 0.5), (6, 1)):
        result_file = run(job(tmp_path, models, records(result), **options), {"cut": engine})
        assert result_file["policies"]["cut"]["pass@1"]["value"] == passed
    assert len(engine.received_requests) == 2
    config = job(tmp_path, models, records(6), **options | {"sandbox": {"require": [], "timeout_s": 5}})
    assert num_lines(config, "scores/cut.jsonl") == 3
    run(config, {"cut": engine})
    assert num_lines(config, "scores/cut.jsonl") == 5, "other limits, the same responses"
    assert len(engine.received_requests) == 2, "other limits, the same responses"


@pytest.mark.parametrize("task", ["measured_task:Mine", "derived_task:Derived"])
def test_another_measure_of_the_users_task_is_measured_anew(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = "from t2g.tasks.summarization import *\nclass Mine(SummarizationTask):\n" + (
        "    def measure(self, prompt, response_text, *, sandbox):\n        return {'rougeL': %s}\n"
    )
    config = job(tmp_path, models, RECORDS[:2], task=task, policies={"cut": {"policy": str(models / "cut")}})
    for value in (0.25, 0.125):
        (tmp_path / "measured_task.py").write_text(code % value)
        (tmp_path / "derived_task.py").write_text("from measured_task import Mine\nclass Derived(Mine): pass\n")
        for module in ("measured_task", "derived_task"):
            sys.modules.pop(module, None)
        result = run(config, {"cut": Engine(8)})
        assert result["policies"]["cut"]["rougeL"]["value"] == value


def test_more_prompts_are_sampled_and_known_ones_are_kept(tmp_path: Path, models: Path) -> None:
    policies = {"cut": {"policy": str(models / "cut")}}
    run(job(tmp_path, models, RECORDS[:5], policies=policies), {"cut": Engine(8)})
    engine = Engine(8)
    changed = [RECORDS[0] | {"post": "another post"}, *RECORDS[1:8]]
    assert run(job(tmp_path, models, changed, policies=policies), {"cut": engine})["prompts"] == 8
    assert sorted(engine.received_requests) == ["0", "5", "6", "7"]


def test_other_sampling_under_the_same_name_is_refused(tmp_path: Path, models: Path) -> None:
    run(job(tmp_path, models, RECORDS[:2]), {"whole": Engine(9), "cut": Engine(9)})
    with pytest.raises(UserError, match=r"rollout\.temperature"):
        run(job(tmp_path, models, RECORDS[:2], rollout={"temperature": 0.5}), {})


@pytest.mark.parametrize(
    ("records", "fact"),
    [
        ([*RECORDS[:2], {"post": "p"}], r"data record 3 \(heldout.jsonl:3\) has no reference"),
        (
            [*RECORDS[:2], {"post": "p", "ideal_human_summary": " "}],
            r"data record 3 \(heldout.jsonl:3\) has no reference",
        ),
        (RECORDS[:1], "one record"),
        ([{"ideal_human_summary": "s"}] * 2, r"data record 1 \(heldout.jsonl:1\): "),
    ],
)
def test_bad_data_is_refused_before_an_engine_starts(
    tmp_path: Path, models: Path, records: list[dict[str, Any]], fact: str
) -> None:
    with pytest.raises(UserError, match=fact):
        run(job(tmp_path, models, records), {})


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"policies": {}}, "at least one name"),
        ({"pass_at": [2]}, "pass_at"),
        ({"data": {"path": "d", "too_long": "skip"}}, r"data\.too_long=skip can skip other prompts"),
        ({"judges": {"j": {"model": "m"}}}, "judges.j needs url and model"),
        (
            {"policies": {"a": {"policy": "p"}}, "judges": {"j": {"model": "m", "url": "http://x"}}},
            "at least two are needed",
        ),
    ],
)
def test_a_config_that_makes_no_sense(tmp_path: Path, models: Path, fields: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        job(tmp_path, models, **fields)


def test_long_prompts_are_truncated_where_the_data_say_so(tmp_path: Path, models: Path) -> None:
    records = [PLAIN[0], PLAIN[1] | {"prompt": "post " * 400}]
    short = {"max_model_len": 256, "max_new_tokens": 64}
    with pytest.raises(UserError, match=r"data\.too_long"):
        run(job(tmp_path, models, records, task="prompts", rollout=short), {"whole": Engine(9), "cut": Engine(9)})
    config = job(tmp_path, models, records, task="prompts", rollout=short)
    config = config.model_copy(update={"data": config.data.model_copy(update={"too_long": "truncate"})})
    whole = Engine(9)
    run(config, {"whole": whole, "cut": Engine(9)})
    assert len(whole.received_requests) == len(records)


def test_a_model_that_is_not_there_is_refused_before_an_engine_starts(tmp_path: Path, models: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        run(job(tmp_path, models, policies={"gone": {"policy": str(models / "gone")}}), {})


# ------------------------------------------------------------------------------------------------------ servers, judges
@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEndpoint]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with fake_endpoint() as endpoint:
        yield endpoint


def llm(server: FakeEndpoint) -> dict[str, Any]:
    return {"url": server.url, "model": "judge", "key_env": KEY_VARIABLE}


def verdict(word: str) -> Callable[[int, dict[str, Any]], Reply]:
    return lambda number, body: says(json.dumps({"reason": "r", "verdict": word}))


def prefers_long(number: int, body: dict[str, Any]) -> Reply:
    _, first, second = body["messages"][0]["content"].rsplit("\n\nAnswer ", 2)
    return verdict("A" if len(first) > len(second) else "B")(number, body)


def test_a_judge_sees_both_orders_and_is_called_once_for_each(
    tmp_path: Path, models: Path, server: FakeEndpoint
) -> None:
    config = job(tmp_path, models, RECORDS[:4], judges={"j": llm(server)})
    server.reply = prefers_long
    engines = {"whole": Engine(100), "cut": Engine(8)}
    (judged,) = run(config, engines)["judged"]["pairs"]
    assert judged["win_rate"]["value"] == 0
    assert judged["consistency"] == 1
    assert judged["first_bias"]["value"] == 0
    assert judged["by_length"]["shorter"] == {"win_rate": 0, "prompts": 4}
    assert len(server.requests) == 8
    two = job(tmp_path, models, RECORDS[:4], judges={"j": llm(server), "k": llm(server) | {"temperature": 1.0}})
    server.reply = verdict("A")
    result = run(two, engines)
    assert len(server.requests) == 16, "the first judge has said what it says"
    assert result["judged"]["pairs"][1]["first_bias"]["value"] == 1
    assert result["judged"]["agreements"] == [{"judges": ["j", "k"], "share": 0, "of": 4}]


def test_other_weights_are_sampled_scored_and_judged_anew(tmp_path: Path, models: Path, server: FakeEndpoint) -> None:
    policies = {}
    for name in ("a", "b", "c"):
        shutil.copytree(models / "cut", tmp_path / name)
        (tmp_path / name / "model.safetensors").write_bytes(b"old")
        policies[name] = {"policy": str(tmp_path / name)}
    config = job(tmp_path, models, PLAIN[:4], task="prompts", policies=policies, judges={"j": llm(server)})
    server.reply = prefers_long
    run(config, {"a": Engine(4), "b": Engine(8), "c": Engine(12)})
    assert len(server.requests) == 6 * 4
    (tmp_path / "b" / "model.safetensors").write_bytes(b"new weights")
    engines = {name: Engine(16) for name in policies}
    result = run(config, engines)
    assert {name: len(engine.received_requests) for name, engine in engines.items()} == {"a": 0, "b": 4, "c": 0}
    assert len(server.requests) == 6 * 4 + 4 * 4, "a against c has its verdicts"
    assert [num_lines(config, f"scores/{name}.jsonl") for name in policies] == [4, 8, 4]
    rates = {(one["policy"], one["against"]): one["win_rate"]["value"] for one in result["judged"]["pairs"]}
    assert rates == {("b", "a"): 1, ("c", "a"): 1, ("c", "b"): 0}
    assert result["judged"]["pairs"][0]["prompts"] == 4
    assert result["policies"]["b"]["words"]["value"] > result["policies"]["c"]["words"]["value"] == 12


def test_invalid_answers_are_counted_and_a_failing_server_is_retried(
    tmp_path: Path, models: Path, server: FakeEndpoint
) -> None:
    config = job(tmp_path, models, RECORDS[:4], judges={"j": llm(server)})
    server.reply = lambda number, body: says("I like both!") if number % 2 else Reply(400, {"error": "no"})
    engines = {"whole": Engine(100), "cut": Engine(8)}
    with pytest.raises(RunStopped, match="judge j: 4 of 8 got no answer"):
        run(config, engines)
    server.reply = lambda number, body: says("I like both!")
    (judged,) = run(config, engines)["judged"]["pairs"]
    assert len(server.requests) == 12
    assert judged["unparsable_share"] == 1 and judged["win_rate"] is None


def test_a_policy_behind_a_server_answers_in_free_text(tmp_path: Path, models: Path, server: FakeEndpoint) -> None:
    config = job(
        tmp_path, models, RECORDS[:4], endpoints={"far": llm(server)}, policies={},
        rollout={"samples_per_prompt": 2, "temperature": 0.5, "max_new_tokens": 7},
    )  # fmt: skip
    server.reply = lambda number, body: says("A summary.", finish_reason="length")
    result = run(config, {})
    assert result["policies"]["far"]["words"]["value"] == 2
    assert result["policies"]["far"]["truncated"]["value"] == 1
    assert len(server.requests) == 8
    assert len({body["seed"] for body in server.requests}) == 8
    body = server.requests[0]
    assert "response_format" not in body
    assert (body["max_completion_tokens"], body["temperature"]) == (7, 0.5)
    assert body["messages"][0]["content"].startswith("Summarize")
    assert "post" in body["messages"][0]["content"]
    with fake_endpoint() as other:
        other.reply = lambda number, body: says("Another model's summary.")
        moved = with_overrides(config, {"endpoints": {"far": llm(other)}})
        assert run(moved, {})["policies"]["far"]["words"]["value"] == 3
        assert len(other.requests) == 8


def test_without_a_key_nothing_starts(tmp_path: Path, models: Path, server: FakeEndpoint) -> None:
    config = job(tmp_path, models, judges={"j": llm(server) | {"key_env": "T2G_NO_SUCH_KEY"}})
    with pytest.raises(UserError, match="T2G_NO_SUCH_KEY"):
        run(config, {})


def test_the_command_line_has_the_keys_of_what_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "evaluate.yaml"
    config.write_text("data: {path: my.jsonl}\npolicies: {base: {policy: my/model}}\n")
    assert evaluate(["--what", "policy", "--config", str(config), "policies.new.policy=b", "--dry-run"]) == 2
    out = capsys.readouterr().out
    assert "policies: base, new; judges: none" in out and "1 response to each prompt of my.jsonl" in out
