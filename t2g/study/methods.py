"""Build the configs of a comparison's runs from its method files.

A method is a YAML file with a description and overrides of the policy job:

    about: Text2Grad, rewards on the tokens of the spans that the critique speaks of.
    overrides: {objective.rewards.placement: span}

The shipped files are in configs/methods, and in the wheel; `compare.methods` may also name a file by its path.

    <run>/search/<method>-<lr>-<seed>      runs of the learning rate search, with -<n>-steps for compare.search_steps
    <run>/methods/<method>-<seed>          compared runs
    <run>/noise/<noise>-<method>-<seed>    compared runs with noise in the feedback
    <run>/rewards/<model>-<seed>/model     reward models that `compare.rewards` trains
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, ValidationError

from t2g.config import CompareJob, PolicyJob, Section, loading, with_overrides
from t2g.config.artifacts import PLACEHOLDER, find_artifacts
from t2g.config.validation_errors import format_errors
from t2g.errors import UserError

Scores = dict[float, dict[int, float | None]]  # learning rate -> seed -> score, None for a run that diverged

SHIPPED = Path(__file__).parents[2] / "configs" / "methods"  # next to t2g in a checkout, an upload and a wheel
PLAIN = "plain"  # reward model of the methods that do not change the feedback style
NOISY = ("span", "scalar")  # methods that run under `compare.noise`
MAX_WIDER = 4  # learning rates that a search may add to its grid
STYLE = "feedback.style."
# key of feedback.style -> feedback sources that use it
READS_STYLE = {"critique": ("reward_model", "llm"), "labels": ("reward_model", "llm", "program"), "spans": ("llm",)}


class Method(Section):
    """The content of a method file."""

    about: str = Field(..., description="description of the method in one sentence")
    procedure: Literal["ppo", "base", "reflection", "dpo", "ilf"] = Field(
        "ppo", description="how the policy is made; base: not trained; reflection, dpo, ilf: see t2g.study.baselines"
    )
    overrides: dict[str, Any] = Field({}, description="dotted key of jobs.train_policy -> its value")

    @property
    def is_trained(self) -> bool:
        """Return whether the method changes weights, and so has a learning rate."""
        return self.procedure not in ("base", "reflection")

    @property
    def is_baseline(self) -> bool:
        return self.procedure in ("reflection", "dpo", "ilf")


UNCHANGED = Method(about="The job as it is.")


def read_method(entry: str) -> Method:
    """Read a method file, given by the name of a shipped method or by its path.

    Raises:
        UserError: There is no such file, or it is not a method.
    """
    file = Path(entry) if entry.endswith(".yaml") else SHIPPED / f"{entry}.yaml"
    if not file.is_file():
        if entry.endswith(".yaml"):
            raise UserError(f"compare.methods has {entry}, and there is no such file")
        known = sorted(file.stem for file in SHIPPED.glob("*.yaml"))
        near = get_close_matches(entry, known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
        raise UserError(f"compare.methods has {entry}; {advice} The path of an own method ends in .yaml")
    return loading.load(Method, file)


def next_lr(scores: Scores) -> float | None:
    """Return the next learning rate to try: one grid step beyond the end of the grid if that end is the best so far.

    A learning rate at which a run diverged counts as worse. Otherwise the search is over: None.

    >>> next_lr({1e-4: {1: 0.5}, 1e-3: {1: 0.7}}), next_lr({1e-4: {1: 0.5}, 1e-3: {1: 0.7}, 1e-2: {1: 0.2}})
    (0.01, None)
    """
    rates = sorted(scores)
    best = choose_lr(scores)
    if len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    inner = rates[1] if best == rates[0] else rates[-2]
    beyond = best * best / inner
    return float(f"{beyond:.3g}")


def choose_lr(scores: Scores) -> float:
    """Return the learning rate with the best mean score over seeds, the smaller one of equals.

    Raises:
        UserError: At every learning rate a run diverged.
    """
    means: dict[float, float] = {}
    for lr, by_seed in sorted(scores.items()):
        known = [score for score in by_seed.values() if score is not None]
        if len(known) == len(by_seed):
            means[lr] = mean(known)
    if not means:
        raise UserError(f"no learning rate of compare.lr_grid={[*scores]} trains to the end; add smaller ones")
    return max(means, key=means.__getitem__)


@dataclass(frozen=True)
class ComparisonPlan:
    """The configs of a comparison's runs.

    Raises:
        UserError: A method is unknown, or its overrides do not fit the job.
    """

    job: CompareJob

    @cached_property
    def methods(self) -> dict[str, Method]:
        """Return the methods by the name of their files, without the suffix."""
        return {Path(entry).stem: read_method(entry) for entry in self.job.compare.methods}

    @cached_property
    def artifacts(self) -> Path | None:
        """Return the folder that stands for ${artifacts} in the method files."""
        return find_artifacts(self.job)

    @property
    def trained_methods(self) -> list[str]:
        return [name for name, method in self.methods.items() if method.is_trained]

    def make_job(self, name: str, seed: int, lr: float | None = None, noise: str = "") -> PolicyJob:
        """Return the config of a compared run.

        Args:
            lr: Learning rate; None for the job's own.
            noise: A name of `compare.noise`; "" for feedback without noise.
        """
        if noise:
            changes = {"feedback.noise": self.job.compare.noise[noise]}
            return self._run(name, f"noise/{noise}-{name}-{seed}", seed, lr, changes)
        return self._run(name, f"methods/{name}-{seed}", seed, lr)

    def search(self, name: str, seed: int, lr: float) -> PolicyJob:
        """Return the config of a run of the learning rate search.

        A search of fewer steps has the rates of a compared run's first steps: its schedule is not shortened.
        """
        steps = self.job.compare.search_steps
        folder = f"search/{name}-{lr}-{seed}"
        if steps is None:
            return self._run(name, folder, seed, lr)
        full_steps = self.job.learner.schedule_steps or self.job.num_steps
        changes = {"num_steps": steps, "learner.schedule_steps": full_steps}
        return self._run(name, f"{folder}-{steps}-steps", seed, lr, changes)

    def identity_extras(self, name: str, method_job: PolicyJob) -> dict[str, Any]:
        """Return what identifies a run in addition to its own config (see `Identity.from_config`).

        Runs are compared at equal numbers of samples per evaluation, and no policy job holds a baseline's procedure.
        """
        method = self.methods[name]
        extras: dict[str, Any] = {"num_steps": method_job.num_steps, "eval.every": method_job.eval.every}
        if method.is_baseline:
            extras |= {"procedure": method.procedure, "reviser": self.job.compare.reviser}
        return extras

    @property
    def reference(self) -> PolicyJob:
        """Return the job with which the base policy responds to `compare.reference_prompts` prompts."""
        changes = {"eval.num_prompts": self.job.compare.reference_prompts}
        return self._run("reference", "reference", self.job.run.seed, None, changes)

    def reward_model(self, name: str) -> str:
        """Return the name of the method's model of `compare.rewards`; methods of equal feedback style share one."""
        style = _style_changes(self.methods.get(name, UNCHANGED))
        if not style:
            return PLAIN
        sharers = [sharer for sharer, method in self.methods.items() if _style_changes(method) == style]
        return sharers[0]

    def reward_folder(self, model: str, seed: int) -> Path:
        return self.job.run.folder / "rewards" / f"{model}-{seed}"

    def _run(
        self, name: str, folder: str, seed: int, lr: float | None, overrides: Mapping[str, Any] = MappingProxyType({})
    ) -> PolicyJob:
        path = self.job.run.folder / folder
        run = self.job.run.make_part(root=path.parent, name=path.name, seed=seed)
        changes: dict[str, Any] = {"run": run, "artifacts": None}
        if lr is not None:
            changes["learner.policy.lr"] = lr
        rewards = self.job.compare.rewards
        if rewards:
            folder_of_model = self.reward_folder(self.reward_model(name), rewards.seeds[0])
            changes["feedback.reward_model"] = str(folder_of_model / "model")
        method = self.methods.get(name, UNCHANGED)
        for key, value in (method.overrides | dict(overrides)).items():
            changes[key] = value
            if isinstance(value, str) and PLACEHOLDER in value and self.artifacts is not None:
                changes[key] = value.replace(PLACEHOLDER, str(self.artifacts))
        policy_job = self.job.make_policy_job()
        try:
            return with_overrides(policy_job, changes, loading.path_context())
        except ValidationError as error:
            messages = format_errors(PolicyJob, error, lambda _: f"compare.methods has {name}: ")
            raise UserError("\n".join(messages)) from None
        except UserError as error:  # a dotted key goes through a plain value
            raise UserError(f"compare.methods has {name}: {error}") from None

    def check(self, score_name: str) -> None:
        """Check, before anything starts, that the job can compare its methods.

        Args:
            score_name: The task's own measure, "" if it has none. Without one the feedback is the score.

        Raises:
            UserError: A method does not fit the job.
        """
        self._check_methods(score_name)
        for name, method in self.methods.items():
            if any(self.make_job(name, 0, lr).learner.policy.lr != lr for lr in self.job.compare.lr_grid):
                raise UserError(
                    f"compare.methods has {name}, which sets learner.policy.lr; compare.lr_grid sets it for all methods"
                )
            self._check_style(name, method)

    def _check_methods(self, score_name: str) -> None:
        config = self.job.compare
        if config.seeds and not self.trained_methods:
            raise UserError(
                "compare.methods has no trained method; sft is measured at step 0 of a trained method's run"
            )
        if config.noise and not set(NOISY) <= set(self.methods):
            raise UserError("compare.noise needs span and scalar among compare.methods: it uses their learning rates")
        own_feedback = self.reference.feedback
        changed = [name for name in self.methods if self.make_job(name, 0).feedback != own_feedback]
        if changed and config.seeds and not score_name:
            names = ", ".join(changed)
            raise UserError(
                f"{names} cannot be compared: task {self.job.task} has no measure of its own, so these methods would "
                "be scored by the feedback that they change; leave them out"
            )

    def _check_style(self, name: str, method: Method) -> None:
        """Check that the feedback source can give the feedback style of a method."""
        source = self.job.feedback.source
        style = _style_changes(method)
        for key in style:
            sources = READS_STYLE[key.removeprefix(STYLE)]
            if source not in sources:
                raise UserError(
                    f"compare.methods has {name}, which changes a feedback style that feedback.source={source} "
                    f"does not use; set feedback.source to one of {', '.join(sources)}"
                )
        has_own_model = self.job.compare.rewards or "feedback.reward_model" in method.overrides
        if source == "reward_model" and style and not has_own_model:
            raise UserError(
                f"compare.methods has {name}, which needs a reward model of its own: set compare.rewards, or "
                "feedback.reward_model among the overrides of the method file"
            )


def _style_changes(method: Method) -> dict[str, Any]:
    return {key: value for key, value in method.overrides.items() if key.startswith(STYLE)}
