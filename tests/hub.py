"""A stand-in for the Hugging Face Hub on loopback: the HTTP calls that huggingface_hub makes to publish and to load.

It keeps repositories in memory: commits, tags, LFS objects. Large files go the real way: preupload says which they
are, the LFS batch which of them are missing, a PUT brings them, a commit names them. `calls` lists what was asked.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "standin" * 5
LARGE = (".safetensors", ".parquet")
"""Names of files that go through LFS."""

Files = dict[str, bytes]


@dataclass
class Repo:
    """Versions of its files; `commits` maps each commit to all files as they were then."""

    private: bool
    files: Files = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    head: str = "0" * 40
    commits: dict[str, Files] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Files) -> str:
        content = f"{len(self.commits)}{sorted((k, _sha1(v)) for k, v in files.items())}"
        self.files, self.head = files, hashlib.sha1(content.encode()).hexdigest()
        self.commits[self.head] = files
        return self.head

    def at(self, revision: str) -> tuple[str, Files] | None:
        """(commit, its files) of a branch, tag or commit."""
        commit = {**self.tags, "main": self.head}.get(revision, revision)
        return (commit, self.commits[commit]) if commit in self.commits else None


class Hub:
    """What the server knows. `refuse` are paths (method and a part of the URL) that get an error instead."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.objects: dict[str, bytes] = {}  # LFS, by sha256
        self.calls: list[str] = []
        self.refuse: dict[tuple[str, str], int] = {}
        self.hold_back: str | None = None  # sha256 of the LFS object whose upload never ends
        self.url = ""

    def sent(self, method: str, part: str) -> list[str]:
        return [call for call in self.calls if call.startswith(method) and part in call]


@contextmanager
def serving() -> Iterator[Hub]:
    """The running stand-in; `hub.url` is what HF_ENDPOINT takes."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub: Hub, home: Any) -> dict[str, str]:
    """Variables under which a command talks to the stand-in, with its token and an empty cache."""
    return {
        "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, parts = self.state, urlsplit(self.path)
        path = unquote(parts.path)
        size = int(self.headers.get("Content-Length") or 0)
        hub.calls.append(f"{self.command} {path}")
        if self.command == "PUT" and hub.hold_back and path.endswith(hub.hold_back):
            self.rfile.read(size // 2)
            threading.Event().wait(60)  # the sender is killed meanwhile
            return
        body = self.rfile.read(size)
        for (method, part), code in hub.refuse.items():
            if self.command == method and part in path:
                self._send(code, {"error": "refused by the stand-in"})
                return
        if self.command != "PUT" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid credentials"})
            return
        try:
            self._route(path, parse_qs(parts.query), body)
        except KeyError:
            self._send(404, {"error": "not found"}, {"X-Error-Code": "EntryNotFound"})

    def _route(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        hub, method = self.state, self.command
        words = path.strip("/").split("/")
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/whoami-v2":
            self._send(200, {"type": "user", "name": "me", "orgs": []})
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif method == "PUT" and words[0] == "objects":
            assert hashlib.sha256(body).hexdigest() == words[1], "an object was damaged on its way"
            hub.objects[words[1]] = body
            self._send(200, {})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif words[0] == "api":
            self._api(words, query, body)
        else:
            self._download(words)

    def _create(self, asked: dict[str, Any]) -> None:
        kind = asked.get("type") or "model"
        owner = asked.get("organization") or "me"
        name = f"{owner}/{asked['name']}"
        url = f"{self.state.url}/{'datasets/' if kind == 'dataset' else ''}{name}"
        if (kind, name) in self.state.repos:
            self._send(409, {"error": "You already created this repo", "url": url})
            return
        repo = self.state.repos[kind, name] = Repo(asked.get("visibility") == "private")
        repo.commit(repo.files)
        self._send(200, {"url": url, "name": name, "id": name})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for entry in asked["objects"]:
            upload = {"href": f"{self.state.url}/objects/{entry['oid']}"}
            known = entry["oid"] in self.state.objects
            objects.append(entry if known else {**entry, "actions": {"upload": upload}})
        self._send(200, {"transfer": "basic", "objects": objects})

    def _api(self, words: list[str], query: dict[str, list[str]], body: bytes) -> None:
        kind, name, *rest = words[1].removesuffix("s"), "/".join(words[2:4]), *words[4:]
        repo = self.state.repos[kind, name]
        if rest[:1] == ["preupload"]:
            files = [_upload_mode(repo, file) for file in json.loads(body)["files"]]
            self._send(200, {"files": files, "commitOid": repo.head})
        elif rest[:1] == ["commit"]:
            oid = repo.commit(_apply(repo.files, body, self.state.objects))
            url = f"{self.state.url}/{name}/commit/{oid}"
            self._send(200, {"success": True, "commitOid": oid, "commitUrl": url})
        elif rest[:1] == ["tag"]:
            repo.tags[json.loads(body)["tag"]] = repo.head if rest[1] == "main" else rest[1]
            self._send(200, {})
        elif rest[:1] == ["refs"]:
            tags = [
                {"name": t, "ref": f"refs/tags/{t}", "targetCommit": c}
                for t, c in repo.tags.items()
            ]
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repo.head}
            self._send(200, {"branches": [main], "converts": [], "tags": tags})
        elif rest[:1] == ["tree"]:
            self._send(
                200,
                [_entry(path, data) for path, data in repo.commits[_commit(repo, rest[1])].items()],
            )
        elif rest == [] or rest[:1] == ["revision"]:
            commit = _commit(repo, rest[1] if rest else "main")
            siblings = [{"rfilename": path} for path in repo.commits[commit]]
            info = {
                "id": name, "sha": commit, "private": repo.private, "siblings": siblings,
                "tags": [],
            }  # fmt: skip
            self._send(200, info)
        else:
            raise KeyError(rest)

    def _download(self, words: list[str]) -> None:
        kind = "dataset" if words[0] == "datasets" else "model"
        words = words[1:] if kind == "dataset" else words
        name, (_, revision, *path) = "/".join(words[:2]), words[2:]
        commit = _commit(repo := self.state.repos[kind, name], revision)
        data = repo.commits[commit]["/".join(path)]
        self._send(200, data, {"ETag": f'"{_oid("/".join(path), data)}"', "X-Repo-Commit": commit})

    def _send(self, code: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _commit(repo: Repo, revision: str) -> str:
    found = repo.at(revision)
    if found is None:
        raise KeyError(revision)
    return found[0]


def _upload_mode(repo: Repo, file: dict[str, Any]) -> dict[str, Any]:
    path = file["path"]
    oid = _oid(path, repo.files[path]) if path in repo.files else None
    mode = "lfs" if path.endswith(LARGE) else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}


def _apply(files: Files, body: bytes, objects: dict[str, bytes]) -> Files:
    """The files after a commit, given as one JSON a line."""
    files = dict(files)
    for line in body.decode().splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif entry["key"] == "lfsFile":
            files[value["path"]] = objects[value["oid"]]  # a commit of what never came is an error
        elif entry["key"] == "deletedFile":
            del files[value["path"]]
    return files


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "file", "path": path, "size": len(data), "oid": _oid(path, data),
    }  # fmt: skip
    if path.endswith(LARGE):
        entry["lfs"] = {
            "oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134,
        }  # fmt: skip
    return entry


def _oid(path: str, data: bytes) -> str:
    """Of LFS files the sha256, of others git's own name."""
    if path.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
