import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.deploy.submission import (
    RUN_KEY,
    STOP_WAIT_KEY,
    Submission,
    is_attempt,
    read_config,
    stop_wait_s,
    submission,
    uploaded_path,
)
from t2g.errors import UserError

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/own/policy.yaml"
MODEL = ["model.policy=some/model", "data.path=prompts.jsonl", "feedback.source=program"]


def test_an_id_is_used_once() -> None:
    job = Submission(name="own", arguments=("jobs.train_policy",))
    assert job.job_id(set()) == "own"
    assert job.job_id({"own"}) == "own-2"
    assert job.job_id({"own", "own-2", "other", None}) == "own-3"


@given(st.lists(st.text(min_size=1), min_size=1))
def test_a_shell_reads_the_arguments_as_they_were_given(arguments: list[str]) -> None:
    given_back = shlex.split(Submission(name="own", arguments=tuple(arguments)).entrypoint)
    assert given_back == ["exec", "python", "-m", *arguments]


def test_a_run_as_a_job() -> None:
    overrides = [*MODEL, "run.root=/mnt/runs", "run.name=own", "learner.step_timeout_s=100"]
    config = read_config("policy", CONFIG, overrides, ROOT)
    job = submission("policy", config, Path("configs/own/policy.yaml"), overrides)
    assert job.name == "own"
    assert job.entrypoint.startswith("exec python -m jobs.train_policy --config configs/own/policy.yaml model.policy=")
    assert job.metadata == {RUN_KEY: "own", STOP_WAIT_KEY: "460"}  # 4 calls of 100 s and a minute
    assert job.runtime_env(Path("p.zip")) == {
        "working_dir": "p.zip", "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "460"},
    }  # fmt: skip
    assert stop_wait_s(job.metadata) == 460


def test_a_relative_run_root_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(UserError, match=r"run\.root: got 'runs', but a Ray job needs an absolute path"):
        read_config("policy", CONFIG, [*MODEL, "run.root=runs"], ROOT)


def test_a_config_that_is_not_uploaded_is_refused(tmp_path: Path) -> None:
    assert uploaded_path(CONFIG, ROOT) == Path("configs/own/policy.yaml")
    for other in (tmp_path / "policy.yaml", ROOT / "runs" / "own" / "config.yaml"):
        with pytest.raises(UserError, match="not among the files that are uploaded"):
            uploaded_path(other, ROOT)


@pytest.mark.parametrize(
    ("job_id", "metadata", "is_one"),
    [
        ("own-2", {RUN_KEY: "own"}, True),
        ("own", {RUN_KEY: "other"}, False),
        ("own", {}, True),
        ("own", None, True),
        ("own-2", None, False),
        (None, None, False),
    ],
)
def test_attempts_at_a_run_go_by_metadata_and_without_by_id(
    job_id: str | None, metadata: dict[str, str] | None, is_one: bool
) -> None:
    assert is_attempt("own", job_id, metadata) is is_one


@pytest.mark.parametrize("text", ["", "soon", "-5", "1e9", "nan", "²"])
def test_a_foreign_wait_is_the_default(text: str) -> None:
    assert stop_wait_s({STOP_WAIT_KEY: text}) == stop_wait_s(None) == 60
