"""Schema of `compare`: methods, seeds and measurements of a comparison."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from t2g.config.common import DataConfig, Section
from t2g.config.feedback import NoiseConfig
from t2g.config.field_annotations import PathOrName


def _check_unique(names: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
    if len(set(names)) < len(names):
        raise ValueError(f"{info.field_name} has an entry twice; it would count as two measurements")
    return names


# Names of methods and noises become parts of run folders' names.
RunPart = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,20}$")]
MethodFile = Annotated[str, Field(pattern=r"^(.*/)?[a-z0-9_]{1,20}(\.yaml)?$")]


class ComparedRewardsConfig(Section):
    """Reward models of the tiny world, trained and evaluated for a comparison: one for each style of its methods."""

    seeds: tuple[int, ...] = Field(
        (1,),
        min_length=1,
        max_length=10,
        description="seeds of weights and data order; the model of the first seed is served",
    )
    num_epochs: float = Field(
        5, gt=0, description="epochs of each training; other settings are reward_sft of artifacts"
    )
    eval_records: int = Field(400, ge=1, description="held-out records for the evaluation of each model")

    check_unique = field_validator("seeds")(_check_unique)


class CompareConfig(Section):
    """Methods, seeds and measurements of a comparison."""

    methods: tuple[MethodFile, ...] = Field(
        ("sft", "shuffled", "scalar", "step", "grpo", "span"),
        min_length=1,
        description="files of configs/methods, or paths of others that end in .yaml",
    )
    seeds: tuple[int, ...] = Field(
        (1, 2, 3, 4, 5), max_length=10, description="seeds of prompts and sampling, the same for all methods; empty: "
        "only compare.rewards are trained, no policy"
    )  # fmt: skip
    lr_grid: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (1e-4, 3e-4, 1e-3, 3e-3), min_length=1, description="values of learner.policy.lr; each method uses its best one"
    )
    search_seeds: tuple[int, ...] = Field(
        (101,), min_length=1, description="seeds on which the learning rates are chosen"
    )
    search_steps: int | None = Field(
        None, ge=1, description="steps of a run that tries a learning rate, the first ones of a schedule of num_steps; "
        "none: num_steps"
    )  # fmt: skip
    reference_prompts: int = Field(
        128, ge=1, description="held-out prompts to which the base model responds as the reference"
    )
    noise: dict[RunPart, NoiseConfig] = Field(
        {}, description="name -> noise in the training feedback; span and scalar run with each"
    )
    retention: DataConfig | None = Field(
        None,
        description="texts that no method trains on, with the fields prompt and response: how much less likely each "
        "run makes them is measured, at rollout.temperature",
    )
    choices: DataConfig | None = Field(
        None,
        description="multiple-choice questions that no method trains on: prompt, choices (texts that continue it) and "
        "answer (index of the right one); the share of right answers is measured, at rollout.temperature",
    )
    results: Path | None = Field(
        None,
        description="file to which each compared run appends a line when it is finished, as does each run of a search "
        "on other held-out prompts; runs whose line is there are not run again. Relative to the working directory",
    )
    reviser: PathOrName[str | None] = Field(
        None, description="model that revises responses for reflection and ilf; none: the policy itself"
    )
    rewards: ComparedRewardsConfig | None = Field(
        None, description="train reward models first; feedback.reward_model is then ${rewards}"
    )

    @field_validator("methods")
    @classmethod
    def check_unique_methods(cls, methods: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        _check_unique(tuple(Path(method).stem for method in methods), info)
        return methods

    check_unique = field_validator("seeds", "lr_grid", "search_seeds")(_check_unique)

    @model_validator(mode="after")
    def check_seeds(self) -> "CompareConfig":
        if both := set(self.seeds) & set(self.search_seeds):
            raise ValueError(
                f"compare.search_seeds and compare.seeds both have {min(both)}: a learning rate would be evaluated on "
                "the seed that chose it; take other seeds"
            )
        if not self.seeds and self.rewards is None:
            raise ValueError("compare.seeds is empty and compare.rewards is not set: nothing would be compared")
        return self
