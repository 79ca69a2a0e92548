"""Writes digests of renderings: `python -m tests.golden.make_renderings FOLDER`, where transformers is installed.

FOLDER has the templates, the chats and the reference (`tests/support/paths.py`), which renders them with transformers,
on a fixed day. Of a chat that a template refuses the digest is empty.
"""

import json
import runpy
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from transformers.utils import chat_template_utils  # type: ignore[import-not-found]  # it is no dependency

from kv_runtime.text.chat_messages import digest_of
from tests.golden.renderings_day import DAY
from tests.support.paths import RECORDINGS


class _Day(datetime):
    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]  # noqa: ARG003
        return DAY


def main() -> None:
    folder = Path(sys.argv[1])
    chat_template_utils.datetime = _Day
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        sys.argv = ["reference.py", str(folder), str(out)]
        runpy.run_path(str(folder / "reference.py"), run_name="__main__")
        rendered = json.loads(out.read_text())
    digests = {
        template: {
            name: "" if text.startswith("ERR ") else digest_of(text.encode())[:12] for name, text in chats.items()
        }
        for template, chats in rendered.items()
    }
    (RECORDINGS / "renderings.json").write_text(json.dumps(digests, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
