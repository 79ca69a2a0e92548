"""Records what OpenAI's Codex CLI sends: `python -m tests.golden.record_codex CODEX`, the program of `@openai/codex`.

`codex exec`, with a home and a folder of its own, talks to a server here, which answers with scripted items. The golden
file has a line a request. In it the user's folders and the system's name are replaced, `authorization`, `host` and
`content-length` are left out, and texts, descriptions and grammars end after `LENGTH_MAX` characters.
"""

import base64
import gzip
import json
import re
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.paths import RECORDINGS

MODEL = "llama"
LENGTH_MAX = 500
CUT_KEYS = frozenset({"text", "description", "definition"})
HEADERS_LEFT_OUT = frozenset({"authorization", "host", "content-length"})
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "status": "completed", **fields}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return item("message", id="msg_1", role="assistant", content=content)


def called(number: int, name: str, arguments: str, **more: str) -> dict[str, Any]:
    return item("function_call", name=name, arguments=arguments, call_id=f"call_{number}", **more)


def custom(number: int, name: str, text: str) -> dict[str, Any]:
    return item("custom_tool_call", name=name, input=text, call_id=f"call_{number}")


class Conversation(NamedTuple):
    """The items of each answer; after them, and to a prompt that resumes the session, the answer is a text."""

    answers: list[list[dict[str, Any]]]
    metadata_of: str = ""
    """The model in Codex' catalogue as which Codex treats `MODEL`; empty: one that it does not know."""
    settings: str = ""
    arguments: tuple[str, ...] = ()
    is_resumed: bool = False


PATCH = "*** Begin Patch\n*** Update File: notes.txt\n@@\n-one\n+two\n*** End Patch\n"
LISTED = called(1, "exec_command", '{"cmd": "ls"}')
CONVERSATIONS = {
    "functions": Conversation(
        [
            [
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [{"type": "summary_text", "text": "Look first."}],
                    "content": [{"type": "reasoning_text", "text": "I list the files."}],
                    "encrypted_content": "gAAAAABo",
                },
                said("I look."),
                LISTED,
            ],
            [
                called(2, "exec_command", '{"cmd": '),
                called(3, "exec_command", json.dumps({"cmd": "printf 'caf\u00e9 \\xff'; false"})),
                item("web_search_call", id="ws_1", action={"type": "search", "query": "x"}),
            ],
            [
                called(4, "view_image", '{"path": "pixel.png"}'),
                item("local_shell_call", id="ls_1", call_id="call_5", action={"type": "exec", "command": ["ls"]}),
            ],
            [called(6, "close_agent", '{"target": "x"}', namespace="multi_agent_v1"), custom(7, "apply_patch", PATCH)],
        ],
        is_resumed=True,
    ),
    "patches": Conversation(
        [
            [custom(1, "apply_patch", PATCH)],
            [item("tool_search_call", call_id="call_2", execution="client", arguments={"query": "agent", "limit": 1})],
        ],
        metadata_of="gpt-5.5",
        settings='web_search = "cached"',
        arguments=("--output-schema", "schema.json"),
    ),
    "code": Conversation(
        [
            [custom(1, "exec", 'const r = await tools.exec_command({cmd: "cat notes.txt"}); text(r.output);')],
            [custom(2, "exec", "text(")],
        ],
        metadata_of="gpt-6.2-sol",
    ),
    "compaction": Conversation(
        [[LISTED], [said("The folder was listed.")]],
        settings="model_auto_compact_token_limit = 10",
        arguments=("-i", "pixel.png"),
    ),
}


class Recorder(ThreadingHTTPServer):
    """Answers the requests of one conversation, and keeps them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.answers: list[list[dict[str, Any]]] = []
        self.requests: list[tuple[str, dict[str, str], bytes]] = []


class _Answering(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.path, headers, self.rfile.read(int(headers["content-length"]))))
        items = self.server.answers.pop(0) if self.server.answers else [said("Done.")]
        response = {"id": f"resp_{len(self.server.requests)}"}
        usage = {"input_tokens": 10, "output_tokens": 1, "total_tokens": 11}
        events: list[dict[str, Any]] = [{"type": "response.created", "response": response}]
        events += [{"type": "response.output_item.done", "output_index": 0, "item": each} for each in items]
        events.append({"type": "response.completed", "response": response | {"usage": usage}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in events))


class Codex:
    """The program, in a home and a folder of its own below `scratch`."""

    def __init__(self, program: str, scratch: Path) -> None:
        self.program = program
        self.home, self.folder = scratch / "home", scratch / "project"
        for each in (self.home, self.folder):
            each.mkdir()
        (self.folder / "notes.txt").write_text("one\n")
        (self.folder / "pixel.png").write_bytes(base64.b64decode(PIXEL))
        (self.folder / "schema.json").write_text(json.dumps(SCHEMA))

    def run(self, *arguments: str) -> str:
        known = {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "CODEX_HOME": str(self.home), "KEY": "none"}
        command = [self.program, *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=known, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
        )
        return done.stdout.decode()

    def converse(self, told: Conversation, port: int) -> None:
        """Hold the conversation with the model of a server at this port."""
        settings = f'model = "{MODEL}"\nmodel_provider = "here"\n{told.settings}\n'
        if told.metadata_of:
            known = json.loads(self.run("debug", "models"))["models"]
            models = [each | {"slug": MODEL} for each in known if each["slug"] == told.metadata_of]
            (self.home / "models.json").write_text(json.dumps({"models": models}))
            settings += f'model_catalog_json = "{self.home}/models.json"\n'
        settings += f'[model_providers.here]\nname = "here"\nbase_url = "http://127.0.0.1:{port}/v1"\n'
        (self.home / "config.toml").write_text(f'{settings}wire_api = "responses"\nenv_key = "KEY"\n')
        unasked = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        self.run("exec", *unasked, "list the files", *told.arguments)
        if told.is_resumed:
            self.run("exec", "resume", "--last", *unasked, "and now?")


def compact(value: Any) -> bytes:
    """Return the JSON as Codex writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def cut(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: cut(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [cut(each) for each in value]
    return value[:LENGTH_MAX] if key in CUT_KEYS and isinstance(value, str) else value


def recorded(name: str, told: Conversation, program: str) -> list[dict[str, Any]]:
    """Return the requests of a conversation."""
    # In a home below /tmp Codex makes no programs for its tools.
    with Recorder() as recorder, tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        threading.Thread(target=recorder.serve_forever).start()
        recorder.answers = list(told.answers)
        codex = Codex(program, Path(scratch))
        try:
            codex.converse(told, recorder.server_port)
        finally:
            recorder.shutdown()
    lines = []
    for path, headers, data in recorder.requests:
        if compact(json.loads(data)) != data:
            raise ValueError(f"{name}: a body is not written as this file writes it")
        text = data.decode().replace(str(codex.home), "/home/user/.codex")
        body = cut(json.loads(text.replace(str(codex.folder), "/home/user/project")))
        kept = {each: value for each, value in headers.items() if each not in HEADERS_LEFT_OUT}
        kept["user-agent"] = re.sub(r"\(\w+ [\d.]+;", "(Linux 6.1.0;", kept["user-agent"])
        lines.append({"conversation": name, "path": path, "headers": kept, "body": body})
    return lines


def main() -> None:
    program = str(Path(sys.argv[1]).absolute())
    lines = [line for name, told in CONVERSATIONS.items() for line in recorded(name, told, program)]
    version = lines[0]["headers"]["user-agent"].split()[0].partition("/")[2]
    data = b"".join(compact(line) + b"\n" for line in lines)
    (RECORDINGS / f"codex-{version}.jsonl.gz").write_bytes(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    main()
