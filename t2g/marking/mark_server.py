"""Serve the annotation page to one person on this machine: an HTTP server on loopback with a secret in its address.

Any other page in the person's browser can reach a server on loopback. A request therefore needs the secret, which
other pages cannot read; the loopback address as its host, against DNS rebinding; and, if it changes something, this
page as its origin. Data is sent as JSON only, and the page shows it as text.
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
from t2g.text.segments import printable

LOOPBACK = "127.0.0.1"
MAX_BYTES = 1 << 20  # bytes of a request's body
PAGE = {"": ("mark.html", "text/html"), "mark.js": ("mark.js", "text/javascript"), "mark.css": ("mark.css", "text/css")}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
Reply = tuple[str, bytes]  # content type, content


class MarkServer(ThreadingHTTPServer):
    """The server of one person's marks: call `handle_request` until the person has finished.

    Port 0 chooses a free port.

    Raises:
        UserError: The port is in use.
    """

    timeout = 0.2  # s, of handle_request

    def __init__(self, marks: Marks, port: int = 0) -> None:
        self.marks = marks
        self.secret = secrets.token_urlsafe(16)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise UserError(f"--port={port} is not available: {error.strerror}; omit it for a free port") from error
        self.origin = f"http://{LOOPBACK}:{self.server_address[1]}"
        self.url = f"{self.origin}/{self.secret}/"


class _Handler(BaseHTTPRequestHandler):
    server: MarkServer
    timeout = 30  # s that a connection may be idle

    def do_GET(self) -> None:
        self._reply(self._get)

    def do_POST(self) -> None:
        self._reply(self._post)

    def log_message(self, *_: Any) -> None:
        """Log nothing: the address contains the secret."""

    def _reply(self, handle: Callable[[str], Reply]) -> None:
        code = 200
        kind = "text/plain"
        try:
            kind, content = handle(self._resource())
        except ValidationError as error:
            code = 400
            content = format_first_error(error).encode()
        except (PermissionError, LookupError, ValueError) as error:
            code = {PermissionError: 403, LookupError: 404, StaleMark: 409}.get(type(error), 400)
            content = str(error).encode(errors="replace")
        self.send_response(code)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        for name, value in (headers | HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _resource(self) -> str:
        """Return the path behind the secret.

        Raises:
            PermissionError: The request is not from the page of this server.
        """
        own_origin = self.server.origin
        secret = self.path.split("/")[1]
        origin = self.headers.get("Origin", own_origin if self.command == "GET" else "")
        if f"http://{self.headers.get('Host')}" != own_origin or origin != own_origin:
            raise PermissionError(f"requests are accepted from {own_origin} only")
        if not secrets.compare_digest(secret.encode(), self.server.secret.encode()):
            raise PermissionError("use the complete address that t2g mark printed")
        return self.path.partition(f"/{secret}/")[2]

    def _get(self, resource: str) -> Reply:
        marks = self.server.marks
        if resource in PAGE:
            name, kind = PAGE[resource]
            return kind, (Path(__file__).parent / name).read_bytes()
        if resource == "state":
            return _json({"by": marks.by, "finished": marks.finished, "agreements": marks.agreement_messages()})
        index = self._index(resource)
        sample = marks.samples[index]
        texts = {"prompt": printable(sample.prompt.prompt_text), "response": printable(sample.response or "")}
        return _json(texts | marks[index].model_dump())

    def _post(self, resource: str) -> Reply:
        size = int(self.headers.get("Content-Length", 0))
        if self.headers.get("Content-Type") != "application/json" or not 0 < size <= MAX_BYTES:
            raise ValueError(f"the body must be JSON of at most {MAX_BYTES} bytes")
        mark = Mark.model_validate_json(self.rfile.read(size))
        return _json({"version": self.server.marks.put(self._index(resource), mark)})

    def _index(self, resource: str) -> int:
        kind, _, number = resource.partition("/")
        if kind != "item" or not number.isdecimal() or int(number) >= len(self.server.marks.samples):
            raise LookupError("there is no such resource")
        return int(number)


def _json(value: Any) -> Reply:
    return "application/json", to_json(value)
