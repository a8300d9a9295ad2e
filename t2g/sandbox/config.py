"""The limits of a sandbox. Imports pydantic only: the sandbox knows nothing of t2g."""

from typing import Literal

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
    require: tuple[Literal["processes", "files", "network"], ...] = Field(
        ("processes", "files", "network"), description="isolated from the machine's own, or nothing runs"
    )
