"""A function to start from: it finds the pieces of a response of which the next message speaks."""

import re

QUOTED = re.compile(r"""(["'`])(.+?)\1""")
LINE = re.compile(r"\bline (\d+)")
PRAISE = re.compile(r"\b(tests passed|thanks|thank you|perfect)\b", re.IGNORECASE)


def locate(prompt: str, response: str, critique: str) -> tuple[str, list, list]:
    """Return the critique, the good pieces and the poor pieces of the response.

    The whole response is good if it is praised. Otherwise what the critique quotes is poor, else the lines it numbers.
    """
    if PRAISE.search(critique):
        return critique, [response], []
    program = response.split("```python\n")[-1].splitlines()
    quoted = [quote for _, quote in QUOTED.findall(critique) if quote in response]
    numbers = [int(number) for number in LINE.findall(critique)]
    numbered = [program[number - 1] for number in numbers if 0 < number <= len(program)]
    return critique, [], quoted or numbered
