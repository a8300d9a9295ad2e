"""Jobs that end as if they were killed, in the process of the test."""

import gc
from collections.abc import Callable
from typing import Any

import pytest


def run_until_killed(job: Callable[..., Any], *args: Any) -> None:
    """Run a job whose fake raises KeyboardInterrupt, and collect the asyncio tasks that it leaves unfinished.

    asyncio logs such a task with a traceback when the task is collected, and formatting a traceback calls `ast.parse`.
    Inside an `ast.parse` of a later test, Python before 3.11.8 answers with a SystemError (python/cpython#106905).
    """
    with pytest.raises(KeyboardInterrupt):
        job(*args)
    gc.collect()
