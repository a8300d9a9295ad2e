"""Conversations on workers of a fleet: each stays on its worker, and starts again where that is lost."""

import asyncio
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from fake_ray import Died, FakeRay
from fakes import letter_prompts, letter_tokenizer
from fleet_worker import Worker, make_fleet

from actors.engines import multi_turn
from actors.engines.multi_turn import Conversations
from actors.engines.rollout import sample_seed
from actors.fleet.fleet_worker import RequestTimedOut
from t2g.config import EngineConfig, PolicyJob, WorkersConfig
from t2g.environments import Reply
from t2g.environments.environment import Environment
from t2g.errors import RunStopped, UserError
from t2g.interfaces import Sampling
from t2g.tasks.prompts_only import PromptsTask
from t2g.types import Prompt, Rollout

CONFIG = EngineConfig(workers=WorkersConfig(initial=2, min=1, max=2), cpus=0.1, memory_gib=0.1, request_timeout_s=20)
LENGTH = 3


class Talker(Worker):
    """Answers a turn with letters drawn by its seed. `mood` mortal: it dies in the second turn of a conversation."""

    requests: ClassVar[list[tuple[str, int, int, int]]] = []  # worker, index, length of the context, seed

    async def sample(self, prompt_id: str, context: np.ndarray, sampling: Sampling, index: int) -> Rollout:
        seed = sample_seed(sampling.seed, prompt_id, index)
        Talker.requests.append((self.name, index, len(context), seed))
        if self.mood == "mortal" and len(context) > 1:
            raise Died
        await asyncio.sleep(60 if self.mood == "late" else 0.01)
        ids = np.random.default_rng(seed).integers(5, 99, LENGTH).astype(np.int32)
        return Rollout(
            prompt_id=prompt_id, sample_index=index, prompt_ids=context, response_ids=ids,
            rollout_logprobs=np.zeros(LENGTH, np.float32), response_text="abc", finish_reason="stop",
            policy_versions=((0, LENGTH, 0),),
        )  # fmt: skip


class Again:
    """Asks for one turn more."""

    async def reply(self, prompt: Prompt, messages: Any) -> Reply:
        return Reply("again", done=len(messages) == 3)


class Deaf:
    def reply(self, prompt: Prompt) -> Reply:
        return Reply(prompt.prompt_text)


class Slow:
    async def reply(self, prompt: Prompt, messages: Any) -> Reply:
        await asyncio.sleep(60)
        return Reply("late", done=True)


class Busy:
    """Replies to one turn at a time, so that all conversations together wait longer than an engine may take."""

    async def reply(self, prompt: Prompt, messages: Any) -> Reply:
        await asyncio.sleep(0.4)
        return Reply("", done=True)


def policy_job(environment: str, **changes: Any) -> PolicyJob:
    return PolicyJob.model_validate(
        {
            "model": {"policy": "unused"},
            "data": {"path": "unused"},
            "environment": environment,
            "feedback": {"source": "pkg:judge", "timeout_s": 20},
            "rollout": {"max_turns": 3, "max_new_tokens": 8, "max_model_len": 128},
        }
        | changes
    )


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)  # the run folder is relative
    fake = FakeRay()
    fake.take_place(monkeypatch)
    monkeypatch.setattr(multi_turn, "ray", fake)
    Talker.requests = []
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("letters"))


def converse(
    ray: FakeRay, tokenizer: Any, *moods: str, job: PolicyJob | None = None, config: EngineConfig = CONFIG,
    failures: list[int] | None = None,
) -> list[list[Rollout]]:  # fmt: skip
    """The conversations of three prompts with two samples each, on workers in these moods.

    `failures` gets the number of failed requests of each worker.
    """
    fleet = make_fleet(ray.actor(Talker), {}, config, placement_timeout_s=20)
    fleet.wait_ready()
    for number, (worker, mood) in enumerate(zip(fleet.serving(), moods, strict=True)):
        ray.get(worker.handle.become.remote(f"worker {number}", mood))
    job = job or policy_job(f"{__name__}:Again")
    source = Conversations(fleet, job.rollout, Environment(job, PromptsTask()), tokenizer)
    sampling = Sampling(num_samples=2, temperature=1.0, max_new_tokens=8, seed=5)

    async def run() -> list[list[Rollout]]:
        groups = await asyncio.gather(*(source.sample(prompt, sampling) for prompt in letter_prompts(3)))
        assert all(worker.load == 0 for worker in fleet.serving())
        if failures is not None:
            failures.extend(worker.health.failed_requests for worker in fleet.serving())
        return list(groups)

    try:
        return asyncio.run(run())
    finally:
        fleet.close()


def test_a_conversation_stays_on_its_worker_and_starts_again_with_the_same_seeds(ray: FakeRay, tokenizer: Any) -> None:
    expected = converse(ray, tokenizer, "", "")
    for group in expected:
        assert [r.sample_index for r in group] == [0, 1]
    assert len(expected) == 3
    contexts = sorted({length for _, _, length, _ in Talker.requests})
    assert len(contexts) == 2, "the second turn follows the first, and an inserted reply"
    by_seed = {seed: worker for worker, _, _, seed in Talker.requests}
    assert len(by_seed) == len(Talker.requests) == 12, "the seeds of all turns differ"

    Talker.requests = []
    groups = converse(ray, tokenizer, "mortal", "")
    assert {worker for worker, *_ in Talker.requests} == {"worker 0", "worker 1"}
    for one, other in zip(chain(*expected), chain(*groups), strict=True):
        np.testing.assert_array_equal(one.response_ids, other.response_ids)
        assert one.environment_turns == other.environment_turns
        assert len(one.environment_turns) == 2
        assert [turn.reply for turn in one.environment_turns] == ["again", "again"]
    whole = [(index, length, seed) for worker, index, length, seed in Talker.requests if worker == "worker 1"]
    assert len(whole) == len(set(whole)) == 12, "the other worker makes every conversation once, from its first turn"


def test_the_time_of_the_environment_is_not_the_engines_and_a_late_turn_is(ray: FakeRay, tokenizer: Any) -> None:
    config = CONFIG.model_copy(update={"request_timeout_s": 2.0})
    failures = list[int]()
    feedback = {"source": "pkg:judge", "timeout_s": 2.0, "concurrency": 1}
    rollout = {"max_turns": 1, "max_new_tokens": 8, "max_model_len": 128}
    job = policy_job(f"{__name__}:Busy", feedback=feedback, rollout=rollout)
    groups = converse(ray, tokenizer, "", "", job=job, config=config, failures=failures)
    assert failures == [0, 0] and len(Talker.requests) == 6, "2.4 s for six replies, one after the other"

    Talker.requests = []
    failures = []
    again = converse(ray, tokenizer, "late", "", config=config, failures=failures)
    assert failures[0] >= 1 and failures[1] == 0
    assert {worker for worker, *_ in Talker.requests} == {"worker 0", "worker 1"}
    for one, other in zip(chain(*groups), chain(*again), strict=True):
        np.testing.assert_array_equal(one.response_ids, other.response_ids[: len(one.response_ids)])


def test_a_turn_that_is_late_because_of_a_weight_sync_is_no_failure_of_its_engine(ray: FakeRay) -> None:
    fleet = make_fleet(ray.actor(Talker), {}, CONFIG, placement_timeout_s=20)
    fleet.wait_ready()
    workers = {worker.handle: worker for worker in fleet.serving()}
    tries = list[Any]()

    async def ask(worker: Any) -> str:
        tries.append(worker)
        if len(tries) == 1:
            workers[worker].syncing = True
            asyncio.get_running_loop().call_later(0.02, workers[worker].end_sync)
            raise RequestTimedOut(0.5)
        return "answer"

    try:
        assert asyncio.run(fleet.call(ask, timeout_s=20, what="it")) == "answer"
        assert [worker.health.failed_requests for worker in workers.values()] == [0, 0]
        assert tries[0] != tries[1]
    finally:
        fleet.close()


def test_a_late_environment_fails_its_conversations_and_then_stops_the_run(ray: FakeRay, tokenizer: Any) -> None:
    job = policy_job(f"{__name__}:Slow", feedback={"source": "pkg:judge", "timeout_s": 0.05, "concurrency": 1})
    with pytest.raises(RunStopped, match=r"environment=.*Slow: the environment gave no answer 3 times in a row"):
        converse(ray, tokenizer, "", "", job=job)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (f"{__name__}:CONFIG", "it needs to be a function"),
        (f"{__name__}:Nothing", "cannot be imported"),
        (f"{__name__}:Worker", "its method reply, has the type NoneType"),
        (f"{__name__}:Deaf", r"its method reply, cannot be called with \(prompt, messages\)"),
        ("again", "neither code_repair, python, tiny_tools nor an import path"),
        ("code_repair", "task prompts has no programs"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused(environment: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Environment(policy_job(environment), PromptsTask())
