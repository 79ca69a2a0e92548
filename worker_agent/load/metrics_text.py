"""Parses Prometheus text: only the lines with requested names.

An engine has thousands of lines. A skipped line costs a comparison of its first characters, and cannot make the rest
unreadable.
"""

from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from kv_protocol.errors import MalformedMessage
from worker_agent.load.engine_metrics import Sample


def samples_in(body: bytes, names: Iterable[str]) -> list[Sample]:
    """Return the samples of `names` in Prometheus text; raise `MalformedMessage` for an unreadable one."""
    openings = tuple(f"{name}{after}" for name in names for after in "{ \t")
    text = body.decode("utf-8", errors="replace")
    selected = [line for line in text.splitlines() if line.startswith(openings)]
    try:
        families = list(text_string_to_metric_families("\n".join([*selected, ""])))
    except (ValueError, LookupError) as error:
        raise MalformedMessage(0, f"metrics: {error}") from error
    return [Sample(each.name, each.labels, float(each.value)) for family in families for each in family.samples]
