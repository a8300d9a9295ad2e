"""The limits of a sandbox. Imports pydantic only: the sandbox knows nothing of t2g."""

import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class SandboxConfig(BaseModel):
    """Limits of one run of generated code with its tests."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    timeout_s: float = Field(10, gt=0, description="wall clock")
    cpu_s: int = Field(10, ge=1, description="processor time of each process")
    memory_mib: int = Field(512, ge=64, description="address space of each process, and what all hold together")
    max_processes: int = Field(16, ge=1)
    max_file_mib: int = Field(8, ge=1, description="each file that is written")
    max_output_kib: int = Field(64, ge=1, description="kept of what is printed")
    tests: Literal["separate", "together", "auto"] = Field(
        "auto",
        description="separate: the solution has a process of its own; together: it shares that of the tests, can be "
        "patched by them, and can forge its verdict; auto: separate, or together for a record whose reference solution "
        "passes only there",
    )
    # The annotation of `t2g.config.field_annotations.ResumeMutable`.
    concurrency: Annotated[int | None, "can change on resume"] = Field(
        None, ge=1, description="sandboxes at once, in evaluation as well; none: one for each core"
    )
    require: tuple[Literal["processes", "files", "network"], ...] = Field(
        ("processes", "files", "network"), description="isolated from the machine's own, or nothing runs"
    )

    @property
    def max_concurrent(self) -> int:
        """Return how many sandboxes run at once."""
        return self.concurrency or len(os.sched_getaffinity(0))

    def dump_limits(self) -> dict[str, Any]:
        """Return the fields that can change a verdict."""
        return self.model_dump(exclude={"concurrency"})
