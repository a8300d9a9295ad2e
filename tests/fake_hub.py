"""A hub on this machine: it keeps what is pushed, and checks each step as the protocol of the Hugging Face hub has it.

Small files come within the commit, others before it through LFS. Nothing of a push is visible without its commit.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

TOKEN = "hf_abcdefghijklmnopqrstuvwx"
INLINE_BYTES = 100_000


def hash_blob(content: bytes) -> str:
    """Return git's hash of a file."""
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content), usedforsecurity=False).hexdigest()


@dataclass
class Repository:
    """The files of a repository by path."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)  # by path: the message of the last commit that changed it
    num_commits: int = 0

    def list_tree(self) -> list[dict[str, Any]]:
        """Return the files with their last commits."""
        entries = []
        for path, content in self.files.items():
            commit = {"id": "0" * 40, "title": self.titles.get(path, "By hand"), "date": "2026-11-27T00:00:00.000Z"}
            oid = hash_blob(content)
            entries.append({"type": "file", "path": path, "size": len(content), "oid": oid, "lastCommit": commit})
        return entries

    def write(self, folder: Path) -> Path:
        """Write the files, as a client that downloads them."""
        folder.mkdir()
        for path, content in self.files.items():
            (folder / path).write_bytes(content)
        return folder


@dataclass
class FakeHub:
    """What the hub holds, and how it fails."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # LFS objects by sha256
    requests: list[str] = field(default_factory=list)
    fail_at: str = ""  # part of a path whose requests fail with 400

    def handle(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and answer of a request with a valid token."""
        self.requests.append(f"{method} {path}")
        if self.fail_at and self.fail_at in path:
            return 400, {"error": f"refused with Bearer {TOKEN}"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.startswith("/lfs/"):
            oid = path.removeprefix("/lfs/")
            assert hashlib.sha256(body).hexdigest() == oid
            self.objects[oid] = body
            return 200, {}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._upload(entry) for entry in json.loads(body)["objects"]]}
        owner, name, *rest = path.removeprefix("/api/models/").split("/")
        repository = self.repositories.get(f"{owner}/{name}")
        if repository is None:
            return 404, {"error": "Repository not found"}
        if rest and rest[0] == "preupload":
            return 200, {"files": [self._mode(file, repository) for file in json.loads(body)["files"]]}
        if rest and rest[0] == "tree":
            return 200, repository.list_tree()
        if rest and rest[0] == "commit":
            return 200, self._commit(f"{owner}/{name}", repository, body)
        return 200, {"id": f"{owner}/{name}", "private": repository.private, "sha": "0" * 40, "siblings": []}

    def _create(self, values: dict[str, Any]) -> tuple[int, Any]:
        name = f"{values['organization']}/{values['name']}"
        url = f"{self.url}/{name}"
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", "url": url}
        is_private = values.get("private") or values.get("visibility") == "private"
        self.repositories[name] = Repository(private=bool(is_private))
        return 200, {"url": url, "name": name}

    def _upload(self, entry: dict[str, Any]) -> dict[str, Any]:
        return entry | {"actions": {"upload": {"href": f"{self.url}/lfs/{entry['oid']}"}}}

    def _mode(self, file: dict[str, Any], repository: Repository) -> dict[str, Any]:
        mode = "lfs" if file["size"] > INLINE_BYTES else "regular"
        values = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
        content = repository.files.get(file["path"])
        if content is not None:
            values["oid"] = hashlib.sha256(content).hexdigest() if mode == "lfs" else hash_blob(content)
        return values

    def _commit(self, name: str, repository: Repository, body: bytes) -> dict[str, Any]:
        entries = [json.loads(line) for line in body.splitlines()]
        title = next(entry["value"]["summary"] for entry in entries if entry["key"] == "header")
        for entry in entries:
            if entry["key"] == "header":
                continue
            value = entry["value"]
            path = value["path"]
            if entry["key"] == "deletedFile":
                del repository.files[path]
                continue
            is_inline = entry["key"] == "file"
            repository.files[path] = base64.b64decode(value["content"]) if is_inline else self.objects[value["oid"]]
            repository.titles[path] = title
        repository.num_commits += 1
        oid = f"{repository.num_commits:040d}"
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{name}/commit/{oid}"}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Yield a hub, which ends with the block."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer()

        do_POST = do_PUT = do_HEAD = do_GET  # noqa: N815 names of the standard library

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status: int = 401
            reply: Any = {"error": "Invalid credentials"}
            is_upload = self.path.startswith("/lfs/")  # signed by its address
            if is_upload or self.headers.get("Authorization") == f"Bearer {TOKEN}":
                status, reply = hub.handle(self.command, self.path.partition("?")[0], body)
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()
