"""The page to mark on, for one person at this machine: a server on loopback, behind a secret in its address.

Every other page in the person's browser can reach a server on loopback, too. So a request needs the secret (which no
other page can read), our own name as its host (a name that was made to point here is another) and, where it changes
something, our own page as its origin. What the data holds goes out as JSON alone; the page shows it as text.
"""

import secrets
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from t2g.config.validation_errors import format_first_error
from t2g.errors import UserError
from t2g.marking.marks import Mark, Marks, StaleMark
from t2g.report.segments import printable

LOOPBACK = "127.0.0.1"
MAX_BYTES = 1 << 20  # of a request
PAGE = {"": ("mark.html", "text/html"), "mark.js": ("mark.js", "text/javascript"), "mark.css": ("mark.css", "text/css")}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
Answer = tuple[str, bytes]  # type of the content, content


class MarkServer(ThreadingHTTPServer):
    """`handle_request` until the person has done; port 0 takes a free one. UserError for one that is taken."""

    timeout = 0.2  # s that handle_request waits

    def __init__(self, marks: Marks, port: int = 0) -> None:
        self.marks, self.secret = marks, secrets.token_urlsafe(16)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise UserError(f"--port={port} cannot be had: {error.strerror}; leave it out for a free one") from error
        self.origin = f"http://{LOOPBACK}:{self.server_address[1]}"
        self.url = f"{self.origin}/{self.secret}/"


class _Handler(BaseHTTPRequestHandler):
    server: MarkServer
    timeout = 30  # s that a connection may be silent

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, *_: Any) -> None:
        """The address has the secret in it."""

    def _answer(self, handle: Callable[[str], Answer]) -> None:
        code, answer = 200, ("text/plain", b"")
        try:
            answer = handle(self._asked())
        except ValidationError as error:
            code, answer = 400, ("text/plain", format_first_error(error).encode())
        except (PermissionError, LookupError, ValueError) as error:
            code = {PermissionError: 403, LookupError: 404, StaleMark: 409}.get(type(error), 400)
            answer = "text/plain", str(error).encode(errors="replace")
        self.send_response(code)
        headers = {"Content-Type": f"{answer[0]}; charset=utf-8", "Content-Length": str(len(answer[1]))}
        for name, value in (headers | HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer[1])

    def _asked(self) -> str:
        """What stands behind the secret. PermissionError for whoever is not our page."""
        origin, secret = self.server.origin, self.path.split("/")[1]
        asked_by = self.headers.get("Origin", origin if self.command == "GET" else "")
        if f"http://{self.headers.get('Host')}" != origin or asked_by != origin:
            raise PermissionError(f"only {origin} itself may ask")
        if not secrets.compare_digest(secret.encode(), self.server.secret.encode()):
            raise PermissionError("take the whole address that t2g mark printed")
        return self.path.partition(f"/{secret}/")[2]

    def _get(self, asked: str) -> Answer:
        marks = self.server.marks
        if asked in PAGE:
            name, kind = PAGE[asked]
            return kind, (Path(__file__).parent / name).read_bytes()
        if asked == "state":
            return _json({"by": marks.by, "finished": marks.finished, "agreements": marks.agreement_messages()})
        place = self._place(asked)
        sample = marks.samples[place]
        texts = {"prompt": printable(sample.prompt.prompt_text), "response": printable(sample.response or "")}
        return _json(texts | marks[place].model_dump())

    def _post(self, asked: str) -> Answer:
        size = int(self.headers.get("Content-Length", 0))
        if self.headers.get("Content-Type") != "application/json" or not 0 < size <= MAX_BYTES:
            raise ValueError(f"JSON of at most {MAX_BYTES} bytes is needed")
        mark = Mark.model_validate_json(self.rfile.read(size))
        return _json({"version": self.server.marks.put(self._place(asked), mark)})

    def _place(self, asked: str) -> int:
        kind, _, number = asked.partition("/")
        if kind != "item" or not number.isdecimal() or int(number) >= len(self.server.marks.samples):
            raise LookupError("there is nothing here")
        return int(number)


def _json(value: Any) -> Answer:
    return "application/json", to_json(value)
