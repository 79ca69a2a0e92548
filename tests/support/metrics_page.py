"""The page of all metrics, by the commands that show them."""

from collections.abc import Iterator

from tests.support.metric_families import COMMANDS, MadeFamily


def metrics_page() -> str:
    """Return the page of the metrics of all commands, as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield "Made from the code by `make reference`. [RUNBOOKS](../RUNBOOKS.md) says what to look at, and what to do."
    yield ""
    yield "Each process shows its metrics at `/metrics` of its control plane; `worker-agent serve` has one address."
    yield "A name has the unit; that of a counter ends in `_total`. A histogram has samples `_bucket`, `_count` and,"
    yield "unless a value can be negative, `_sum`; a summary has `_sum` and `_count`. The labels `worker` and `dp_rank`"
    yield "name a rank. Some families are shown, or have samples, only where a setting turns on what they count."
    groups: dict[tuple[str, ...], list[MadeFamily]] = {}
    for family in dict.fromkeys(family for families in COMMANDS.values() for family in families.values()):
        commands = tuple(command for command, families in COMMANDS.items() if family.name in families)
        groups.setdefault(commands, []).append(family)
    for commands, own in groups.items():
        yield from _table(commands, own)


def _table(commands: tuple[str, ...], families: list[MadeFamily]) -> Iterator[str]:
    shown_by = "every command" if len(commands) == len(COMMANDS) else ", ".join(f"`{each}`" for each in commands)
    yield f"\n## Shown by {shown_by}\n"
    yield "| metric and labels | type | meaning |"
    yield "|---|---|---|"
    for each in sorted(families, key=lambda family: family.name):
        labels = f"{{{','.join(each.labels)}}}" if each.labels else ""
        yield f"| `{each.name}{labels}` | {each.kind} | {each.meaning} |"
