"""The test mode of each record: with `sandbox.tests=auto` the record's reference solution decides it."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from t2g.errors import UserError
from t2g.files import write_atomic
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import Task
from t2g.types import Prompt

logger = logging.getLogger(__name__)
MODE_FIELD = "tests_mode"  # field of the payload
NEITHER = "neither"
MODES_FILE = "reference_modes.json"  # in the run folder: hash of record and sandbox -> mode


def resolve_tests_mode(sandbox: SandboxConfig, payload: Mapping[str, Any]) -> SandboxConfig:
    """Return the sandbox with the mode that `check_references` stored in the payload."""
    if sandbox.tests == "auto" and payload.get(MODE_FIELD) == "together":
        return sandbox.model_copy(update={"tests": "together"})
    return sandbox


def check_references(
    prompts: Sequence[Prompt],
    task: Task,
    sandbox: SandboxConfig,
    folder: Path,
    *,
    leave_out: bool = True,
) -> list[Prompt]:
    """Run each record's reference solution against its tests, and store the mode in which it passes in the payload.

    A mode that the data themselves name is removed: a record without a solution would choose how it is measured.

    Args:
        folder: Run folder, where the modes are saved. A resumed run does not run references again: on a slow machine
            the result could differ and change the prompts of the run.
        leave_out: Whether records are removed whose reference passes in neither mode.

    Raises:
        UserError: No record is left, or this machine cannot isolate the programs.
    """
    prompts = [remove_tests_mode(prompt) for prompt in prompts]
    if sandbox.tests != "auto":
        return prompts
    keys = [_make_key(prompt, task, sandbox) for prompt in prompts]
    by_key = dict(zip(keys, prompts, strict=True))
    saved_modes = _find_modes(by_key, task, sandbox, folder / MODES_FILE)
    modes = [saved_modes[key] for key in keys]
    _log_modes(modes)
    failed = []
    checked = []
    for prompt, mode in zip(prompts, modes, strict=True):
        if mode == NEITHER:
            failed.append(prompt.prompt_id)
        if mode == NEITHER and leave_out:
            continue
        if mode:
            prompt = replace(prompt, payload={**prompt.payload, MODE_FIELD: mode})
        checked.append(prompt)
    if failed:
        remark = ": left out" if leave_out else ""
        summary = f"{len(failed)} of {len(prompts)} reference solutions do not pass their tests with sandbox.tests=auto"
        if leave_out and not checked:
            raise UserError(f"{summary}: nothing is left; the first is record {failed[0]}. Correct the data's tests")
        logger.warning("%s%s; the first is record %s", summary, remark, failed[0])
    return checked


def remove_tests_mode(prompt: Prompt) -> Prompt:
    """Return the prompt without a mode of its tests."""
    payload = {name: value for name, value in prompt.payload.items() if name != MODE_FIELD}
    return replace(prompt, payload=payload)


def _find_modes(by_key: Mapping[str, Prompt], task: Task, sandbox: SandboxConfig, file: Path) -> dict[str, str | None]:
    """Return the modes by key. The references of prompts that `file` does not have are run, and it is extended.

    Raises:
        UserError: This machine cannot isolate the programs.
    """
    modes: dict[str, str | None] = {}
    if file.exists():
        modes |= json.loads(file.read_bytes())
    missing = {key: prompt for key, prompt in by_key.items() if key not in modes}
    if not missing:
        return modes

    def run_reference(prompt: Prompt) -> str | None:
        return task.reference_mode(prompt, sandbox=sandbox)

    logger.info("running the reference solutions of up to %d records, for sandbox.tests=auto", len(missing))
    with ThreadPoolExecutor(sandbox.max_concurrent) as pool:
        new_modes = list(pool.map(run_reference, missing.values()))
    modes |= zip(missing, new_modes, strict=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(modes).encode())
    return modes


def _log_modes(modes: Sequence[str | None]) -> None:
    counts = Counter(mode for mode in modes if mode)
    if not counts:
        return
    num_references = counts.total()
    shares = []
    for mode, count in sorted(counts.items()):
        share = count / num_references
        shares.append(f"{share:.1%} {mode}")
    logger.info("tests of %d records with a reference solution: %s", num_references, ", ".join(shares))


def _make_key(prompt: Prompt, task: Task, sandbox: SandboxConfig) -> str:
    content = [task.name, prompt.payload, sandbox.dump_limits()]
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, default=str).encode())
