"""The reference page of request options: what each may be, and what agents and routers do with it."""

from collections.abc import Iterator

import msgspec

from kv_protocol.openai.errors import allowed_at
from kv_protocol.openai.option_table import KEPT, LEFT_OUT, NO_EFFECT, PASSED, Unsupported
from kv_protocol.openai.requests import MARKS, ChatRequest, CompletionRequest

ROUTERS_OWN = frozenset({"kv_prompt_ids", "kv_continue", "disaggregated_params", "prompt_token_ids"})
"""Keys that the router sets."""
KINDS: dict[str, type[msgspec.Struct]] = {"chat": ChatRequest, "completion": CompletionRequest}


def options_page() -> str:
    """Return the page of all options of chats and completions, as Markdown."""
    head = [
        "# Request options",
        "",
        "Made from the code by `make reference`. A router passes every option on, these and others. An agent with an",
        "engine in its process takes these ([WIRE](../WIRE.md#an-agents-address)), and refuses others by name. Last",
        "column: whether a stream with the option, neither null nor false, can resume on another attached engine.",
        "",
        "| option | of | allowed | agent with an engine in its process | can resume |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *_rows(), ""])


def _rows() -> Iterator[str]:
    of: dict[tuple[str, str], list[str]] = {}
    for endpoint, kind in KINDS.items():
        for name in sorted({field.encode_name for field in msgspec.structs.fields(kind)} - ROUTERS_OWN):
            of.setdefault((name, allowed_at(kind, name)), []).append(endpoint)
    for (name, allowed), endpoints in sorted(of.items()):
        marks = MARKS[name]
        unsupported = [mark for mark in marks if isinstance(mark, Unsupported)]
        taken = "passed to the engine" if PASSED in marks else "without effect" if NO_EFFECT in marks else ""
        for neutral in (mark.neutral for mark in unsupported):
            taken = "refused" if neutral is None else f"only `{msgspec.json.encode(neutral).decode()}`"
        resumes = "yes" if KEPT in marks or LEFT_OUT in marks else "no"
        yield f"| `{name}` | {', '.join(endpoints)} | {allowed} | {taken} | {resumes} |"
