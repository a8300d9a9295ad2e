"""The program that `run` starts in a sandbox, with the standard library alone.

The door of this room imports pydantic, which is not to be had there and would cost a tenth of a second: so the package
is declared here without its door.
"""

import json
import sys
import types
from pathlib import Path

room = types.ModuleType("t2g.sandbox")
room.__path__ = [str(Path(__file__).parent)]
sys.modules["t2g.sandbox"] = room

from t2g.sandbox.box import supervisor  # noqa: E402

if __name__ == "__main__":
    supervisor.main(json.loads(sys.argv[1]))
