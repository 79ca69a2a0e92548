"""Prometheus rules as data, and the YAML that Prometheus loads: the same content is the same bytes.

Rules that the tests hold: every metric exists, an alert's texts name only labels that its query keeps, its runbook is
the section of docs/RUNBOOKS.md that has its name, and it both fires and stays quiet in `promtool test rules`.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
import yaml

RUNBOOKS = "docs/RUNBOOKS.md"
"""Relative to the repository's root, as the project has no address of its own; Alertmanager templates may prefix it."""
Severity = Literal["critical", "warning"]
"""critical: clients suffer now; warning: a worse answer than necessary, or a protection that is gone."""
_WIDTH = 120
_HEADER = b"# Made from dashboards/alerts.py and dashboards/objectives.py by `python -m dashboards`; do not edit.\n"


class Record(msgspec.Struct, frozen=True):
    """A query whose answer Prometheus stores under a name."""

    name: str
    expr: str


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """A query whose every answer, once it was given for `lasting`, is an alert. Texts may name labels and `$value`."""

    name: str
    expr: str
    lasting: str = "0s"
    severity: Severity = "warning"
    summary: str
    description: str

    @property
    def runbook_url(self) -> str:
        """The section of the runbooks that has the alert's name, as GitHub makes anchors of headings."""
        return f"{RUNBOOKS}#{self.name.lower()}"


class Group(msgspec.Struct, frozen=True):
    """Rules that are evaluated together, in their order. `interval`: other than Prometheus's own."""

    name: str
    rules: tuple[Record | Alert, ...]
    interval: str = ""


def rendered(groups: Iterable[Group]) -> bytes:
    """Return the YAML of a rule file."""
    content = {"groups": [_group(group) for group in groups]}
    return _HEADER + yaml.safe_dump(content, sort_keys=False, width=_WIDTH).encode()


def alerts(groups: Iterable[Group]) -> Iterator[Alert]:
    """Yield the alerts of groups, in their order."""
    yield from (rule for group in groups for rule in group.rules if isinstance(rule, Alert))


def _group(group: Group) -> dict[str, Any]:
    interval = {"interval": group.interval} if group.interval else {}
    return {"name": group.name, **interval, "rules": [_rule(rule) for rule in group.rules]}


def _rule(rule: Record | Alert) -> dict[str, Any]:
    if isinstance(rule, Record):
        return {"record": rule.name, "expr": rule.expr}
    texts = {"summary": rule.summary, "description": rule.description, "runbook_url": rule.runbook_url}
    return {
        "alert": rule.name,
        "expr": rule.expr,
        "for": rule.lasting,
        "labels": {"severity": rule.severity},
        "annotations": texts,
    }
