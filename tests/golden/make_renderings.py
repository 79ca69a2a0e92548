"""Writes digests of renderings: `python -m tests.golden.make_renderings FOLDER`, where transformers is installed.

FOLDER has the templates, the chats and the reference (`tests/support/paths.py`), which renders them with transformers
at a fixed local time. A template has a digest for each chat, in the order of `chats`; it is empty for a chat that the
template refuses.
"""

import json
import runpy
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from transformers.utils import chat_template_utils  # type: ignore[import-not-found]  # it is no dependency

from kv_runtime.text.chat_messages import digest_of
from tests.support.paths import RECORDINGS

DAY = "2026-03-01T12:30"


class _Day(datetime):
    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]  # noqa: ARG003
        return datetime.fromisoformat(DAY)


def _digest(text: str) -> str:
    return "" if text.startswith("ERR ") else digest_of(text.encode())[:12]


def main() -> None:
    folder = Path(sys.argv[1])
    chat_template_utils.datetime = _Day
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        sys.argv = ["reference.py", str(folder), str(out)]
        runpy.run_path(str(folder / "reference.py"), run_name="__main__")
        rendered = json.loads(out.read_text())
    chats = sorted(next(iter(rendered.values())))
    rows = [f"{json.dumps(name)}: {json.dumps([_digest(rendered[name][chat]) for chat in chats])}" for name in rendered]
    digests = "{\n" + ",\n".join(sorted(rows)) + "\n}"
    text = f'{{\n"day": "{DAY}",\n"chats": {json.dumps(chats)},\n"digests": {digests}\n}}\n'
    (RECORDINGS / "renderings.json").write_text(text)


if __name__ == "__main__":
    main()
