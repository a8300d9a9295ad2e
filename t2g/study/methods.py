"""Methods of a comparison, each a small YAML file of what it changes in the policy job; and their runs as configs.

    about: Text2Grad, rewards on the tokens of the spans that the critique speaks of.
    overrides: {objective.rewards.placement: span}

The shipped files lie in configs/methods, and in the wheel; `compare.methods` may name another by its path.

    <run>/search/<method>-<lr>-<seed>      chooses the learning rate
    <run>/arms/<method>-<seed>             is compared
    <run>/noise/<noise>-<method>-<seed>    is compared under noise
    <run>/rewards/<model>-<seed>/model     a reward model that `compare.rewards` trains
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from pydantic import Field, ValidationError

from t2g.config import CompareJob, PolicyJob, RunConfig, Section, loading, with_overrides
from t2g.config.validation_errors import format_errors
from t2g.errors import UserError

Scores = dict[float, dict[int, float | None]]  # learning rate -> seed -> score, None for a run that stopped

SHIPPED = Path(__file__).parents[2] / "configs" / "methods"  # beside t2g in a checkout, an upload and a wheel
PLACEHOLDER = "${artifacts}"  # in a path: the folder of the demo that a job builds on
PLAIN = "plain"  # the reward model of methods that change nothing about it
NOISY = ("span", "scalar")  # are run with compare.noise
MAX_WIDER = 4  # rates that a search may add to its grid
READS_STYLE = {"critique": ("reward_model", "llm"), "labels": ("reward_model", "llm", "program")}  # key -> sources


class Method(Section):
    """What one file says."""

    about: str = Field(..., description="what it is, in a sentence")
    procedure: Literal["ppo", "base", "reflection", "dpo", "ilf"] = Field(
        "ppo", description="who makes the policy; base: nobody, others than ppo: t2g.study.baselines"
    )
    overrides: dict[str, Any] = Field({}, description="dotted key of jobs.train_policy -> its value")

    @property
    def trained(self) -> bool:
        """Whether weights move, so that there is a learning rate."""
        return self.procedure not in ("base", "reflection")

    @property
    def is_baseline(self) -> bool:
        return self.procedure in ("reflection", "dpo", "ilf")


ITSELF = Method(about="The job as it is.")


def read_method(entry: str) -> Method:
    """entry: a shipped method's name, or the path of a file."""
    file = Path(entry) if entry.endswith(".yaml") else SHIPPED / f"{entry}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.yaml")))
        raise UserError(f"compare.methods has {entry}; there are {known}, or the path of a file that ends in .yaml")
    return loading.load(Method, file)


def next_lr(scores: Scores) -> float | None:
    """The rate to try next: a step of the grid beyond its end where that end is the best so far, else None.

    A rate at which a run stopped by itself counts as one that was worse.

    >>> next_lr({1e-4: {1: 0.5}, 1e-3: {1: 0.7}}), next_lr({1e-4: {1: 0.5}, 1e-3: {1: 0.7}, 1e-2: {1: 0.2}})
    (0.01, None)
    """
    rates = sorted(scores)
    best = choose_lr(scores)
    if len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    end, inner = (rates[0], rates[1]) if best == rates[0] else (rates[-1], rates[-2])
    return float(f"{end * end / inner:.3g}")


def choose_lr(scores: Scores) -> float:
    """The learning rate with the best mean over seeds, the smaller of equals; UserError for none."""
    means = {lr: mean(by.values()) for lr, by in sorted(scores.items()) if None not in by.values()}
    if not means:
        raise UserError(f"no learning rate of compare.lr_grid={[*scores]} trains to the end; add smaller ones")
    return max(means, key=means.__getitem__)


@dataclass(frozen=True)
class Arms:
    """The runs of a comparison as configs. UserError for a method that is unknown or cannot be."""

    job: CompareJob
    stages: str = PLACEHOLDER  # what ${artifacts} stands for in the methods' own files

    @cached_property
    def methods(self) -> dict[str, Method]:
        """By name, which is that of the file."""
        return {Path(entry).stem: read_method(entry) for entry in self.job.compare.methods}

    @property
    def trained(self) -> list[str]:
        return [name for name, method in self.methods.items() if method.trained]

    def arm(self, name: str, seed: int, lr: float | None = None, noise: str = "") -> PolicyJob:
        """The run that is compared, under one of `compare.noise`; without `lr` at the job's own learning rate."""
        if noise:
            errors = {"feedback.noise": self.job.compare.noise[noise]}
            return self._run(name, f"noise/{noise}-{name}-{seed}", seed, lr, errors)
        return self._run(name, f"arms/{name}-{seed}", seed, lr)

    def search(self, name: str, seed: int, lr: float) -> PolicyJob:
        return self._run(name, f"search/{name}-{lr}-{seed}", seed, lr)

    def made_of(self, name: str) -> dict[str, Any]:
        """What of a run its own config does not hold, see `Identity.from_config`: scores are means over evaluations
        after the same numbers of samples, and a baseline's procedure stands in no policy job.
        """
        grid, method = {"num_steps": self.job.num_steps, "eval.every": self.job.eval.every}, self.methods[name]
        baseline = {"procedure": method.procedure, "reviser": self.job.compare.reviser}
        return grid | (baseline if method.is_baseline else {})

    @property
    def reference(self) -> PolicyJob:
        """The job itself; with these settings the base responds to `compare.reference_prompts`."""
        changes = {"eval.num_prompts": self.job.compare.reference_prompts}
        return self._run("reference", "reference", self.job.run.seed, None, changes)

    def reward_model(self, name: str) -> str:
        """Which model of `compare.rewards` a method needs: the first method's with the same style."""
        wanted = _style_changes(self.methods.get(name, ITSELF))
        if not wanted:
            return PLAIN
        return next(other for other, method in self.methods.items() if _style_changes(method) == wanted)

    def reward_folder(self, model: str, seed: int) -> Path:
        return self.job.run.folder / "rewards" / f"{model}-{seed}"

    def _run(
        self, name: str, folder: str, seed: int, lr: float | None, more: dict[str, Any] | None = None
    ) -> PolicyJob:
        at = self.job.run.folder / folder
        run = RunConfig(root=at.parent, name=at.name, seed=seed, accept=self.job.run.accept)
        changes: dict[str, Any] = {"run": run, "artifacts": None}
        if lr is not None:
            changes["learner.policy.lr"] = lr
        if self.job.compare.rewards:
            model = self.reward_folder(self.reward_model(name), self.job.compare.rewards.seeds[0]) / "model"
            changes["feedback.reward_model"] = str(model)
        given = self.methods.get(name, ITSELF).overrides | (more or {})
        changes |= {k: v.replace(PLACEHOLDER, self.stages) if isinstance(v, str) else v for k, v in given.items()}
        policy_job = PolicyJob(**{field: getattr(self.job, field) for field in PolicyJob.model_fields})
        try:
            return with_overrides(policy_job, changes, loading.path_context())
        except ValidationError as error:
            raise UserError(
                "\n".join(format_errors(PolicyJob, error, lambda _: f"compare.methods has {name}: "))
            ) from None
        except UserError as error:  # a key stands below a value
            raise UserError(f"compare.methods has {name}: {error}") from None

    def check(self, score_name: str) -> None:
        """UserError, before anything starts, for methods with which this job makes no sense.

        score_name: of the task's own measure; without one, feedback that a method changes would give the marks.
        """
        job, config = self.job, self.job.compare
        if config.seeds and not self.trained:
            raise UserError("compare.methods has none that is trained; sft is measured at step 0 of the others")
        if config.noise and not set(NOISY) <= set(self.methods):
            raise UserError("compare.noise needs span and scalar among compare.methods, whose learning rates it takes")
        changed = [name for name in self.methods if self.arm(name, 0).feedback != self.reference.feedback]
        if changed and config.seeds and not score_name:
            raise UserError(
                f"{', '.join(changed)} cannot be compared: task {job.task} has no measure of its own, so the feedback "
                "that they change would judge them; leave them out"
            )
        source = job.feedback.source
        for name, method in self.methods.items():
            style = _style_changes(method)
            for reads in (READS_STYLE[key.removeprefix("feedback.style.")] for key in style):
                if source not in reads:
                    raise UserError(
                        f"compare.methods has {name}, and feedback.source={source} does not read the style that it "
                        f"changes; {', '.join(reads)} would"
                    )
            own = config.rewards or "feedback.reward_model" in method.overrides
            if source == "reward_model" and style and not own:
                raise UserError(
                    f"compare.methods has {name}, which needs a reward model of its own: give compare.rewards, or a "
                    "method file with feedback.reward_model among its overrides"
                )


def _style_changes(method: Method) -> dict[str, Any]:
    return {k: v for k, v in method.overrides.items() if k.startswith("feedback.style.")}
