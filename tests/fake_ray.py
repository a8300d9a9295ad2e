"""Ray as a fleet sees it, in this process: actors are plain objects, and their calls run on one event loop in a thread.

What it is not: processes, places, an object store. Where those matter a test has the real one.
"""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from actors.cluster import placement
from actors.fleet import fleet as fleet_module
from actors.fleet import fleet_worker as fleet_worker_module
from t2g.config import ProcessConfig


class Died(BaseException):
    """Raised in an actor: its process ends."""


class Ref:
    def __init__(self) -> None:
        self._future: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self._future

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        with suppress(InvalidStateError):  # cancelled, or dead
            if error is None:
                self._future.set_result(value)
            else:
                self._future.set_exception(error)


class Handle:
    """Of one actor: `handle.method.remote(...)` gives a `Ref`."""

    def __init__(self, ray: "FakeRay", instance: Any) -> None:
        self.ray = ray
        self.instance = instance
        self.dead = False
        self.open = set[Ref]()

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *args: self.submit(name, *args))

    def submit(self, name: str, *args: Any) -> Ref:
        ref = Ref()
        self.open.add(ref)
        if self.dead:
            ref.settle(error=ActorDiedError())
        else:
            asyncio.run_coroutine_threadsafe(self._run(ref, getattr(self.instance, name)(*args)), self.ray.loop)
        return ref

    async def _run(self, ref: Ref, call: Coroutine[Any, Any, Any]) -> None:
        try:
            ref.settle(await call)
        except Died:
            self.die()
        except RayError as error:  # of Ray, not of the method
            ref.settle(error=error)
        except Exception as error:  # noqa: BLE001 - all that a method raises
            ref.settle(error=RayTaskError("call", f"{type(error).__name__}: {error}", error))
        self.open.discard(ref)

    def die(self) -> None:
        self.dead = True
        for ref in [*self.open]:
            ref.settle(error=ActorDiedError())


class ActorClass:
    def __init__(self, ray: "FakeRay", plain: type[Any]) -> None:
        self._ray = ray
        self._plain = plain

    def options(self, **options: Any) -> "ActorClass":
        return self

    def remote(self, **arguments: Any) -> Handle:
        return Handle(self._ray, self._plain(**arguments))


def reserve(roles: Mapping[str, ProcessConfig], timeout_s: float) -> list[Any]:
    """A placement group for each process, at once."""
    return [object() for role in roles.values() for _ in range(role.num_processes)]


class FakeRay:
    """The functions of `ray` and of `placement` that fleet and worker call; every place is there at once."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        async def end() -> None:
            calls = asyncio.all_tasks() - {asyncio.current_task()}
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(timeout=20)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=20)
        self.loop.close()

    def actor(self, plain: type[Any]) -> ActorClass:
        return ActorClass(self, plain)

    def get(self, ref: Ref) -> Any:
        return ref.future().result(timeout=20)

    def wait(self, refs: Sequence[Ref], timeout: float) -> tuple[list[Ref], list[Ref]]:
        assert timeout == 0, "a fleet waits for nobody"
        return [ref for ref in refs if ref.future().done()], [ref for ref in refs if not ref.future().done()]

    def cancel(self, ref: Ref) -> None:
        ref.future().cancel()

    def kill(self, handle: Handle, no_restart: bool = True) -> None:
        handle.die()

    def take_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of Ray, for fleets and their workers."""
        self.removed: list[Any] = []  # placement groups
        self.places = SimpleNamespace(
            reserve=reserve,
            request_placement=lambda config, section: object(),
            may_grow=lambda: False,
            is_ready=lambda place: True,
            actor_options=lambda config, place: {},
            describe_requirements=placement.describe_requirements,
        )
        for module in (fleet_module, fleet_worker_module):
            monkeypatch.setattr(module, "placement", self.places)
            monkeypatch.setattr(module, "ray", self)
        monkeypatch.setattr(fleet_worker_module, "remove_placement_group", self.removed.append)
