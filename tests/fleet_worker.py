"""A worker of a fleet without an engine, for Ray's actors and for those of `fake_ray`."""

import asyncio
import os
from pathlib import Path
from typing import Any

import ray

from actors.fleet.fleet import Fleet
from actors.fleet.meter import EngineStats
from t2g.config import EngineConfig
from t2g.errors import UserError


class Worker:
    """Answers with its name. What it is told to become happens in its next calls."""

    def __init__(self, gate: Path | None = None) -> None:
        """gate: a file without which it does not come to an end of its start."""
        self.gate = gate
        self.name = ""
        self.mood = ""
        self.open = self.most = 0
        self.cache_tokens = 640

    async def start(self) -> int:
        while self.gate is not None and not self.gate.exists():
            await asyncio.sleep(0.05)
        return 42

    async def become(self, name: str, mood: str = "") -> None:
        self.name = name
        self.mood = mood

    async def check_health(self) -> None:
        while self.mood == "deaf":
            await asyncio.sleep(0.05)

    async def measure(self) -> EngineStats:
        await self.check_health()
        return EngineStats(busy_s=2.0, num_generated=100, num_steps=1, cache_tokens=self.cache_tokens)

    async def work(self, seconds: float = 0.0) -> str:
        self.open += 1
        self.most = max(self.most, self.open)
        if self.mood == "mortal":
            self.die()
        await asyncio.sleep(60 if self.mood in ("late", "deaf") else seconds)
        self.open -= 1
        return self.name

    def die(self) -> None:
        os._exit(1)

    async def refuse(self) -> None:
        raise UserError("prompt 7 is rubbish")

    async def stumble(self) -> None:
        raise ValueError(f"{self.name} cannot do it")


class Telling(Worker):
    async def start(self) -> tuple[str, dict[str, str]]:  # type: ignore[override]
        """The node that it is on, and its environment."""
        return ray.get_runtime_context().get_node_id(), dict(os.environ)


class Unwilling(Worker):
    async def start(self) -> int:
        raise UserError("model.policy is no model")


class Rank(Worker):
    """A learner rank, which refuses the model "refused"."""

    def __init__(self, spec: Any, *role: Any) -> None:
        super().__init__()
        self._model = spec.model.policy

    async def address(self) -> tuple[str, int]:
        return "here", 1

    async def start(self, master: tuple[str, int]) -> int:  # type: ignore[override]
        if self._model == "refused":
            raise UserError("model.policy='refused' cannot be loaded")
        return await super().start()


def make_fleet(actor: Any, arguments: dict[str, Any], config: EngineConfig, *, placement_timeout_s: float) -> Fleet:
    """A fleet of these actors."""
    kind = type("TestFleet", (Fleet,), {"role": "test", "actor": actor})
    return kind(arguments, config, placement_timeout_s=placement_timeout_s)
