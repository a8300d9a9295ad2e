"""A process of an engine ends with its owner, and with nothing else."""

from collections.abc import Iterator

import psutil
import pytest

from actors.vllm_compat import plugin


class Ended(BaseException):
    """The process has ended."""


def test_an_ancestor_that_ends_during_the_look_ends_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the thread that looks: the engine would outlive its owner."""
    results: Iterator[bool | Exception] = iter([True, psutil.NoSuchProcess(7), True, False])

    def descends_from(owner: int) -> bool:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(plugin, "OWNER_POLL_S", 0)
    monkeypatch.setattr(plugin, "descends_from", descends_from)
    monkeypatch.setattr("os._exit", end)
    with pytest.raises(Ended):
        plugin._end_with_owner(5)
    assert list(results) == []
