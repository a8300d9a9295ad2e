"""Program that `fork_server` starts: it imports pytest once and forks a sandbox for each request.

`t2g.sandbox` imports pydantic, which is not available here. The package is declared without its `__init__` instead.
"""

import json
import sys
import types
from pathlib import Path

package = types.ModuleType("t2g.sandbox")
package.__path__ = [str(Path(__file__).parent)]
sys.modules["t2g.sandbox"] = package

if __name__ == "__main__":
    paths = json.loads(sys.argv[1])
    sys.path.extend(paths["packages"])
    from t2g.sandbox.box import parent

    sys.path.remove(paths["own_code"])  # invisible to sandboxes; all of `box` is imported now
    parent.serve()
