"""The environment of the tiny world of tools: a table and a calculator, and conversations that a base policy learns."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from t2g.config import WorldConfig
from t2g.environments.toolbox import find_problem
from t2g.environments.tools import read_tools
from t2g.tasks.tiny import lookups
from t2g.tasks.tiny.lookups import Table, TableQuestion
from t2g.text.tokenizer import Message
from t2g.text.tool_calls import ToolCall, read_hermes_calls
from t2g.types import Prompt

KEY = "environment=tiny_tools"
MAX_ATTEMPTS = 3  # at calls that a tool refuses, in a conversation that the base policy learns


class TinyTools:
    """The tools lookup and calculate. A turn without calls is the answer."""

    def __init__(self) -> None:
        self.tools = [self.lookup, self.calculate]

    async def lookup(self, item: str, field: str, prompt: Prompt) -> str:
        """Return a number of the table.

        Args:
            item: A thing.
            field: What the number says of it.
        """
        return str(lookups.look_up(prompt.payload["table"], item, field))

    async def calculate(self, left: int, operator: str, right: int) -> str:
        """Return left operator right.

        Args:
            left: A number.
            operator: One of + - *.
            right: A number.
        """
        return str(lookups.calculate(left, operator, right))


def list_schemas() -> list[dict[str, Any]]:
    """Return the schemas of the tools."""
    return [tool.schema for tool in read_tools(TinyTools(), KEY)]


def make_conversations(world: WorldConfig) -> Iterator[dict[str, Any]]:
    """Yield `world.num_repairs` rows with a question, messages, and the next turn, which the base policy learns."""
    rng = np.random.default_rng([world.seed, 2])
    writer = _ConversationWriter(world, rng)
    number = 0
    while number < world.num_repairs:
        question = lookups.sample_question(rng, heldout=False)
        table = lookups.sample_table(rng)
        messages = writer.write(question, table)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if len(turns) < 2:
            continue
        number += 1
        turn = int(rng.choice(turns[1:]))
        yield {
            "question_id": f"tiny-tools-turn-{world.seed}-{number}",
            "question": str(question),
            "table": table,
            "messages": messages[:turn],
            "turn": messages[turn]["content"],
        }


class _ConversationWriter:
    """Writes conversations with planted faults; the results are those that a policy sees."""

    def __init__(self, world: WorldConfig, rng: np.random.Generator) -> None:
        self._world = world
        self._rng = rng
        self._tools = {tool.name: tool for tool in read_tools(TinyTools(), KEY)}

    def write(self, question: TableQuestion, table: Table) -> list[Message]:
        """Return the turns and the results of a conversation; it ends without an answer after MAX_ATTEMPTS."""
        messages: list[Message] = []
        operands = self._retry(messages, table, lambda: lookups.make_lookups(question, self._world, self._rng))
        if operands is None:
            return messages
        left, right = operands
        results = self._retry(
            messages, table, lambda: lookups.make_calculation(question, left, right, self._world, self._rng)
        )
        if results is not None:
            (answer,) = results
            messages.append({"role": "assistant", "content": str(answer)})
        return messages

    def _retry(self, messages: list[Message], table: Table, write_turn: Callable[[], str]) -> list[int] | None:
        """Append turns and their results until the tools accept all calls of a turn; return its results, or None."""
        for _ in range(MAX_ATTEMPTS):
            turn = write_turn()
            results = [self._run(call, table) for call in read_hermes_calls(turn)]
            messages.append({"role": "assistant", "content": turn})
            messages += [{"role": "tool", "content": result} for result in results]
            if not any(result.startswith("Error") for result in results):
                return [*map(int, results)]
        return None

    def _run(self, call: ToolCall, table: Table) -> str:
        problem = find_problem(call, self._tools)
        if problem:
            return f"Error: {problem}"
        try:
            if call.name == lookups.LOOKUP:
                return str(lookups.look_up(table, **call.arguments))
            return str(lookups.calculate(**call.arguments))
        except ValueError as error:
            return f"Error: ValueError: {error}"
