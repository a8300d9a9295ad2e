"""Write configs/README.md: every config key with its type, default and meaning, from the schemas of the jobs.

    make docs        # or: python tests/make_config_reference.py

`test_documents.py` fails where the file is not what the schemas say.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from t2g.config import (
    AnnotateJob,
    BenchmarkJob,
    CompareJob,
    CriterionConfig,
    DemoJob,
    EvaluateJob,
    OutcomeRewardConfig,
    PolicyEvaluationJob,
    PolicyJob,
    RewardJob,
    ScoreJob,
    ServeJob,
    SFTJob,
)
from t2g.config.evaluation import SampledConfig
from t2g.config.feedback import RolloutConfig
from t2g.config.field_annotations import can_change_on_resume
from t2g.config.resolve import DERIVED_DEFAULTS
from t2g.config.validation_errors import list_fields, section_type

TARGET = Path(__file__).parent.parent / "configs" / "README.md"
JOBS: dict[type[BaseModel], str] = {  # schema -> the command that reads it
    PolicyJob: "t2g train",
    CompareJob: "t2g compare",
    DemoJob: "t2g demo",
    AnnotateJob: "t2g annotate",
    RewardJob: "t2g reward",
    SFTJob: "t2g sft",
    PolicyEvaluationJob: "t2g evaluate --what policy",
    EvaluateJob: "t2g evaluate --what reward",
    ScoreJob: "t2g score",
    ServeJob: "t2g serve",
    BenchmarkJob: "t2g benchmark",
}
EXTENDS: dict[type[BaseModel], type[BaseModel]] = {CompareJob: PolicyJob, SampledConfig: RolloutConfig}
INTRO = """\
# Config reference

This file is generated from the schemas by `make docs`; a test compares the two. A config is a YAML file, and
`key=value` on the command line changes single keys: `t2g train --config policy.yaml rollout.temperature=0.6`.
Unknown keys are refused with the nearest known one. `t2g JOB --help` prints the same keys in the terminal;
`--show-config` prints the resolved config of a run.

- **Default**: `required` has none. A star marks a default that follows other keys, as the meaning says; the value is
  the one without those keys.
- **On resume**: a `free` key can change when the same command resumes a run, a `fixed` key cannot: the start is refused
  and names the key. `by key`: the table of the section says it for each key. `by job`: it differs between jobs.
- *none* in these tables is written `null` in YAML and on the command line; `none` in quotes is a text.
- `auto` is allowed for `gpus`, `dtype`, `threads`, `memory_gib`, `enforce_eager` and `gpu_memory_utilization`: a GPU
  and bfloat16 where there is one, else the schema's default on all cores. The run keeps the values, and a resume with
  another `dtype` is refused.

| folder | configs |
| --- | --- |
| `own/` | your own model, prompts and feedback, one file for each job; `one_gpu.yaml` for a single GPU |
| `tiny/` | the demo, comparisons and worlds of the tiny tasks |
| `methods/` | what each method of `t2g compare` overrides, see [choose a method](../t2g/guides/03-choose-a-method.md) |
| `slf5k/`, `ultrafeedback/`, `kodcode/` | the paper's tasks and settings, for an 8B model |
| `smol/`, `smol_lines/` | a model of 135 M: `make real`, `make real-lines` |
| `smol_checked/`, `smol_reward/` | `make real-proof`, `make real-reward` |
| `benchmark/` | `t2g benchmark` |
"""
MEANINGS = {  # of keys that the schema does not describe: (section, key), or the key alone for every section
    "seed": "seed of everything random",
    "split": "split of a hub data set or a folder; a file has none",
    "dtype": "type of the weights and of the computation",
    "enforce_eager": "vLLM without CUDA graphs and compilation",
    "prompts_per_step": "prompts of a training step",
    "samples_per_prompt": "responses to each prompt",
    "temperature": "of sampling",
    "max_new_tokens": "longest response, tokens",
    "max_quote_chars": "bound of a quote in guided decoding",
    "keep": "newest checkpoints that stay; the best policy stays as well",
    ("CheckpointConfig", "every"): "steps between checkpoints",
    ("EvalConfig", "num_prompts"): "held-out prompts of an evaluation",
    "max_failed_share": "of the responses, without usable feedback",
    "revision": "commit of a hub model",
    "reward_revision": "commit of a hub reward model",
    "num_train": "training records",
    "num_heldout": "held-out records",
    "wrong": "share of the facts of a reference that are wrong",
    "missing": "share that is left out",
    "invented": "chance of an invented fact",
    "repeated": "chance of a repeated fact",
    "lr": "peak learning rate",
    "schedule": "of the learning rate after the warm-up",
    "betas": "of AdamW",
    "weight_decay": "of AdamW",
    "max_grad_norm": "gradients are clipped to this norm",
    "good": "reward of a good span",
    "gamma": "discount of later rewards",
    "rollout_correction_cap": "bound of the weights, see rollout_correction",
    "r": "rank of the adapters",
    "alpha": "scale of the adapters; the update is multiplied by alpha / r",
    "dropout": "of the adapters",
    "gradient_checkpointing": "compute activations again in the backward pass, to save memory",
    "num_epochs": "passes over the data",
    "tokens_per_microbatch": "budget of one forward and backward pass",
    "num_steps": "training steps",
    "methods": "placements of rewards that are trained and compared",
    "architecture": "family of the model",
    "vocab_size": "tokens of the vocabulary",
    "hidden_size": "width of the model",
    "intermediate_size": "width of the MLP",
    "num_hidden_layers": "layers",
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "heads of keys and values",
    "max_processes": "processes at once",
    "serve": "where the server listens and what it serves",
    "tie_word_embeddings": "input and output embeddings are one matrix",
}


def format_reference() -> str:
    """Return the text of configs/README.md."""
    parts = [INTRO, "## Jobs\n", "The keys of each job. A linked section has a table below.\n"]
    for job, command in JOBS.items():
        purpose = " ".join((job.__doc__ or "").split()).partition(": ")[2]
        parts += [f"### {command}\n", f"{purpose[:1].upper()}{purpose[1:]}\n", format_table(job)]
    parts.append("## Sections\n")
    for section in sorted(list_sections(), key=lambda item: item.__name__):
        parts += [f"### {section.__name__}\n", f"{format_purpose(section)}\n", format_table(section)]
    return "\n".join(parts)


def list_sections() -> list[type[BaseModel]]:
    """Return every section of the jobs once, inner ones and values of mappings included."""
    sections: list[type[BaseModel]] = []
    waiting: list[type[BaseModel]] = [*JOBS]
    while waiting:
        inner = [s for info in waiting.pop().model_fields.values() for s in find_sections(info.annotation)]
        new = [section for section in dict.fromkeys(inner) if section not in sections]
        sections += new
        waiting += new
    return sections


def find_sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections anywhere in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from find_sections(argument)


def format_purpose(section: type[BaseModel]) -> str:
    """Return the first sentence of the section's own docstring and the keys under which jobs have it."""
    purpose = " ".join((section.__dict__.get("__doc__") or "").split("\n\n")[0].split())
    places = {
        key for job in JOBS for key, info in list_fields(job).items() if section in find_sections(info.annotation)
    }
    keys = ", ".join(f"`{key}`" for key in sorted(places))
    return f"{purpose} Keys: {keys}." if purpose else f"Keys: {keys}."


def format_table(section: type[BaseModel]) -> str:
    """Return the table of one section or job: all of its keys, or what they add to those of the section it extends."""
    header = ["| key | type | default | on resume | meaning |", "| --- | --- | --- | --- | --- |"]
    rows = format_rows(section)
    extended = EXTENDS.get(section)
    if extended:
        same = format_rows(extended)
        rows = [row for row in rows if row not in same]
        header = [f"Takes every key of {name_section(extended)}. Its own keys and defaults:\n", *header]
    return "\n".join([*header, *rows, ""])


def name_section(section: type[BaseModel]) -> str:
    """Return a link to the table of a job or section."""
    name = JOBS.get(section, section.__name__)
    anchor = name.lower().replace(" ", "-")
    return f"[{name}](#{anchor})"


def format_rows(section: type[BaseModel]) -> list[str]:
    """Return a row of the table for each key."""
    rows = []
    for name, info in section.model_fields.items():
        default = format_default(info)
        if (section, name) in derived_fields():
            default += "*"
        facts = format_type(info), default, format_resume(section, name), format_meaning(section, name)
        cells = [cell.replace("|", "\\|") for cell in (f"`{name}`", *facts)]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


@cache
def derived_fields() -> set[tuple[type[BaseModel] | None, str]]:
    """Return section and name of each field whose default follows from other sections."""
    known = list_fields(PolicyJob)
    fields = set()
    for default in DERIVED_DEFAULTS:
        outer, _, name = default.key.rpartition(".")
        fields.add((section_type(known[outer].annotation), name))
    return fields


def format_meaning(section: type[BaseModel], name: str) -> str:
    """Return what a key means: its description, MEANINGS, or the docstring of the section behind it; never blank."""
    info = section.model_fields[name]
    inner = section_type(info.annotation)
    named = MEANINGS.get((section.__name__, name)) or MEANINGS.get(name)
    docstring = " ".join((inner.__doc__ or "").split("\n\n")[0].split()) if inner else None
    meaning = info.description or docstring or named
    assert meaning, f"{section.__name__}.{name} has no description: give the field one"
    return re.sub(r"\s+", " ", meaning).replace("<", "&lt;")


def format_type(info: FieldInfo) -> str:
    """Return the type with its bounds: "int, at least 1"."""
    bounds = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "entries: at least"}
    limits = [
        f"{text} {getattr(m, name):g}" for m in info.metadata for name, text in bounds.items() if hasattr(m, name)
    ]
    return ", ".join([type_name(info.annotation), *limits])


def type_name(annotation: Any) -> str:
    """Return a type as a user of YAML names it."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " / ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join("none" if option is NoneType else type_name(option) for option in arguments)
    if origin is tuple:
        kinds = arguments[:1] if arguments[-1] is Ellipsis else arguments
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return f"list of {count}{type_name(kinds[0])}"
    if origin is dict:
        return f"mapping of {type_name(arguments[0])} to {type_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return {str: "text", Path: "path", Any: "any"}.get(annotation) or annotation.__name__


def format_default(info: FieldInfo) -> str:
    """Return the default: a value, or of a section what differs from the section's own defaults."""
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        known = type(default).model_fields.items()
        defaults = {name: field.get_default(call_default_factory=True, validated_data={}) for name, field in known}
        set_names = default.model_fields_set & defaults.keys()
        values = {
            name: getattr(default, name)
            for name in defaults
            if name in set_names and getattr(default, name) != defaults[name]
        }
        return ", ".join(f"`{name}: {format_value(value)}`" for name, value in values.items())
    return f"`{format_value(default)}`{'*' if info.default_factory else ''}"


def format_value(value: Any) -> str:
    if value is None:
        return "none"
    return str(value) if isinstance(value, str | Path) else json.dumps(value, default=str)


@cache
def resume_rules() -> dict[tuple[type[BaseModel], str], set[bool]]:
    """Return (section, key) -> whether the key can change on resume, of every job that has it."""
    rules: dict[tuple[type[BaseModel], str], set[bool]] = {}
    for job in JOBS:
        known = list_fields(job)
        for key in known:
            outer, _, name = key.rpartition(".")
            section = section_type(known[outer].annotation) if outer else job
            rules.setdefault((section, name), set()).add(can_change_on_resume(job, key))
    unlisted = {CriterionConfig: "feedback.sources.any", OutcomeRewardConfig: "objective.outcome_rewards.0"}
    return rules | {
        (section, name): {can_change_on_resume(PolicyJob, f"{key}.{name}")}
        for section, key in unlisted.items()
        for name in section.model_fields
    }


def format_resume(section: type[BaseModel], name: str) -> str:
    """Return whether the key can change on resume; sections by name have no key of their own."""
    rules = tuple(resume_rules().get((section, name), ()))
    if rules == (False,) and section_type(section.model_fields[name].annotation):
        return "by key"
    return {(True,): "free", (False,): "fixed"}.get(rules, "by job")


if __name__ == "__main__":
    TARGET.write_text(format_reference(), encoding="utf-8")
