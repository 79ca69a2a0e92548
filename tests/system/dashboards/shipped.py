"""The committed dashboards and rules as Grafana and Prometheus read them, and the samples that our processes show.

That real processes show the same is what `test_prometheus.py` proves, query by query.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
import promql_parser
from prometheus_client import CollectorRegistry

from dashboards.boards import CONTENT
from dashboards.command import rules
from router.metrics import RequestMetrics
from tests.support.metric_families import COMMANDS, MadeFamily
from tests.unit.router.test_routing import Bench

BOARD_NAMES = tuple(CONTENT.boards)


class Shown(NamedTuple):
    """One query, and where it stands."""

    board: str
    panel: str
    ref_id: str
    expr: str
    is_range: bool
    has_exemplars: bool = False

    def __str__(self) -> str:
        return f"{self.board}, {self.panel}, {self.ref_id}"


def board(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(files("dashboards").joinpath("grafana", f"{name}.json").read_bytes())
    return loaded


def panels(name: str) -> list[dict[str, Any]]:
    """Return the panels that show figures."""
    return [panel for panel in board(name)["panels"] if panel["type"] != "row"]


def panel_queries() -> list[Shown]:
    return [
        Shown(
            name,
            panel["title"],
            target["refId"],
            target["expr"],
            bool(target.get("range")),
            bool(target.get("exemplar")),
        )
        for name in BOARD_NAMES
        for panel in panels(name)
        for target in panel["targets"]
    ]


def annotation_queries() -> list[Shown]:
    return [
        Shown(name, each["name"], each["target"]["refId"], each["target"]["expr"], is_range=True)
        for name in BOARD_NAMES
        for each in board(name)["annotations"]["list"]
    ]


class LabelValues(NamedTuple):
    """A variable: the values of a label of a metric."""

    board: str
    name: str
    metric: str
    label: str


def variables() -> list[LabelValues]:
    """Return those that ask for values; the one of the data source does not."""
    return [
        LabelValues(name, each["name"], *_arguments(each["query"]["query"]))
        for name in BOARD_NAMES
        for each in board(name)["templating"]["list"]
        if each["type"] == "query"
    ]


def _arguments(query: str) -> tuple[str, str]:
    assert query.startswith("label_values(")
    metric, label = query.removeprefix("label_values(").removesuffix(")").split(", ")
    return metric, label


def substituted(expr: str, *, interval: str, window: str) -> str:
    """Return the PromQL that Grafana sends: All is chosen of every variable."""
    values = {"$__rate_interval": interval, "$__range": window, "$model": ".*", "$worker": ".*"}
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


def selectors(expr: str) -> Iterator[promql_parser.VectorSelector]:
    """Yield every selector of series in a query; raise `ValueError` where it is no PromQL."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(substituted(expr, interval="1m", window="1h")), visit)
    yield from found


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


SampleLabels = dict[str, set[str]]
"""By the name of a sample, the labels that it has."""
_SUFFIXES = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
    "summary": ("_sum", "_count"),
}
OF_EVERY_SCRAPE = {"job", "instance"}
_BELOW_0 = {"kvrouter_prediction_error_tokens"}
"""Histograms of what can be negative: they have no sum."""
OF_ENGINES = (
    *("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:num_preemptions_total"),
    *("vllm:time_to_first_token_seconds_bucket", "vllm:request_queue_time_seconds_bucket"),
    *("vllm:inter_token_latency_seconds_bucket", "vllm:time_per_output_token_seconds_bucket"),
    *("sglang:time_to_first_token_seconds_bucket", "sglang:queue_time_seconds_bucket"),
    *("sglang:inter_token_latency_seconds_bucket", "sglang:cache_hit_rate", "sglang:num_retracted_requests_total"),
    *("trtllm_time_to_first_token_seconds_bucket", "trtllm_request_queue_time_seconds_bucket"),
    *("trtllm_time_per_output_token_seconds_bucket", "trtllm_kv_cache_hit_rate"),
)
"""Engines' own samples that panels ask for. Agents show them with two more labels. Sources: `docs/ATTACH.md`."""


@cache
def every_sample() -> SampleLabels:
    """Return the samples of every command, as `docs/reference/metrics.md` lists their families."""
    found: SampleLabels = {}
    for family in (family for families in COMMANDS.values() for family in families.values()):
        for suffix in _suffixes(family):
            found[family.name + suffix] = {*family.labels, *(("le",) if suffix == "_bucket" else ())}
    for name in OF_ENGINES:
        found[name] = {"worker", "model", *(("le",) if name.endswith("_bucket") else ())}
    return found


def check_names(expr: str, where: object, also: SampleLabels | None = None) -> None:
    """Fail where a query names a metric or a label that no process shows, nor `also`."""
    samples = every_sample() | (also or {})
    found = list(selectors(expr))
    for selector in found:
        assert selector.name in samples, f"{where}: no metric {selector.name}"
        wanted = {matcher.name for matcher in selector.matchers.matchers}
        assert wanted <= samples[str(selector.name)] | OF_EVERY_SCRAPE, f"{where}: {selector.name} has no such labels"
    labels = set().union(*(samples[str(each.name)] for each in found)) | OF_EVERY_SCRAPE
    by = {label for listed in re.findall(r"\b(?:by|on) \(([^)]*)\)", expr) for label in listed.split(", ") if label}
    assert by <= labels, where


def bounds(histogram: str) -> set[float]:
    """Return the upper bounds of a histogram of requests."""
    registry = CollectorRegistry()
    RequestMetrics(registry, Bench().routing)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {float(sample.labels["le"]) for sample in samples if sample.name == f"{histogram}_bucket"}


def _suffixes(family: MadeFamily) -> tuple[str, ...]:
    return tuple(each for each in _SUFFIXES[family.kind] if each != "_sum" or family.name not in _BELOW_0)
