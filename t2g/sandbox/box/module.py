"""The module `solution`: its finder and loader, for `import`, `reload`, `inspect.getsource` and `__file__`."""

import importlib.machinery
import importlib.util
import linecache
import os
import sys
import types
from typing import Any

FILE = "solution.py"


def compile_solution(code: str) -> types.CodeType:
    """Compile the code.

    Raises:
        SyntaxError: The code does not compile.
    """
    try:
        return compile(code, FILE, "exec", dont_inherit=True)
    except (ValueError, RecursionError, MemoryError) as error:  # such as null bytes
        raise SyntaxError(str(error), (FILE, 1, 1, "")) from None


class Finder:
    """Finder of the module `solution`, for `sys.meta_path`. A subclass of it loads the module."""

    def __init__(self) -> None:
        self.path = os.path.abspath(FILE)

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != "solution":
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=self.path)
        spec.has_location = True
        spec.cached = None
        return spec

    def create_module(self, spec: object) -> types.ModuleType | None:
        return None


class CodeFinder(Finder):
    """Finder and loader that execute the code in this process."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self._code = code
        self._compiled = compile_solution(code)
        lines = code.splitlines(keepends=True)
        for name in (FILE, self.path):
            linecache.cache[name] = (len(code), None, lines, name)

    def exec_module(self, module: types.ModuleType) -> None:
        exec(self._compiled, module.__dict__)  # noqa: S102 the purpose of this process

    def get_code(self, name: str) -> types.CodeType:
        return self._compiled

    def get_source(self, name: str) -> str:
        return self._code

    def run(self, name: str) -> dict[str, Any]:
        """Run the code as a program and return its public names, without modules."""
        names: dict[str, Any] = {"__name__": name, "__file__": self.path, "__builtins__": __builtins__}
        exec(self._compiled, names)  # noqa: S102
        public = {name: value for name, value in names.items() if not name.startswith("__")}
        return {name: value for name, value in public.items() if not isinstance(value, types.ModuleType)}


def install_finder(finder: Finder) -> None:
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    sys.modules.pop("solution", None)


def write_file(code: str) -> None:
    """Write the code to FILE in the working folder, where programs expect it."""
    with open(FILE, "w", encoding="utf-8", errors="replace", newline="") as file:
        file.write(code)
