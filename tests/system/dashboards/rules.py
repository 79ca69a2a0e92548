"""The committed rules as Prometheus reads them."""

import msgspec

from dashboards.command import rules

RUNBOOKS = "docs/RUNBOOKS.md"


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"lasting": "for"}):
    """A query whose answer is stored under a name (`record`), or is an alert."""

    expr: str
    record: str = ""
    alert: str = ""
    lasting: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @property
    def severity(self) -> str:
        return self.labels["severity"]

    def __str__(self) -> str:
        return self.record or f"{self.alert}, {self.severity}"


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    rules: tuple[Rule, ...]
    interval: str = ""


GROUPS = msgspec.yaml.decode(rules(), type=dict[str, tuple[Group, ...]])["groups"]
RULES = [rule for group in GROUPS for rule in group.rules]
ALERTS = [rule for rule in RULES if rule.alert]
