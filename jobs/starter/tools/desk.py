"""Tools to start from, and the reward for a right answer."""

import re

from t2g.types import Prompt

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
LAST_TURN = "\n\n[assistant]\n"  # before each further turn of a transcript


class Desk:
    """The policy may call these methods. A turn without calls is its answer."""

    def __init__(self) -> None:
        self.tools = [self.price, self.add]

    async def price(self, order: int, prompt: Prompt) -> float:
        """Return the price of an order.

        Args:
            order: The number of the order.
        """
        orders = prompt.payload["orders"]
        if str(order) not in orders:
            raise ValueError(f"`order` is {order}; there is no such order")
        return orders[str(order)]

    async def add(self, numbers: list[float]) -> float:
        """Return a sum.

        Args:
            numbers: The numbers to add.
        """
        return round(sum(numbers), 2)


def answered(prompts: list, completions: list, answer: list, **fields: list) -> list[float]:
    """Return 1 for each transcript whose last turn has the right number as its last number, else 0."""
    rewards = []
    for transcript, right in zip(completions, answer, strict=True):
        numbers = NUMBER.findall(transcript.rpartition(LAST_TURN)[2])
        rewards.append(float(bool(numbers) and float(numbers[-1]) == right))
    return rewards
