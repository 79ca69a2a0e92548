"""The rules name what there is: metrics, labels, each other's records, and sections of the runbooks."""

import re
from collections.abc import Iterator

import promql_parser
import pytest

from dashboards.alerts import GROUPS
from dashboards.objectives import FIRST_TOKEN_S, TOKEN_INTERVAL_S
from dashboards.rules import RUNBOOKS, Alert, Record, alerts
from tests.support.paths import ROOT
from tests.system.dashboards.shipped import bounds, every_sample, selectors

OF_EVERY_SCRAPE = {"job", "instance"}
OF_PROMETHEUS = {"up": set[str]()}
"""What Prometheus itself says of a scrape."""
RULES = [rule for group in GROUPS for rule in group.rules]
RECORDED = {rule.name for rule in RULES if isinstance(rule, Record)}


def name_of(rule: Record | Alert) -> str:
    return rule.name if isinstance(rule, Record) else f"{rule.name}, {rule.severity}"


def check_names(rule: Record | Alert) -> None:
    samples = every_sample() | OF_PROMETHEUS
    found = [each for each in selectors(rule.expr) if each.name not in RECORDED]
    for selector in found:
        assert selector.name in samples, rule.name
        wanted = {matcher.name for matcher in selector.matchers.matchers}
        assert wanted <= samples[str(selector.name)] | OF_EVERY_SCRAPE, (rule.name, selector.name)
    labels = set().union(*(samples[str(each.name)] for each in found)) | OF_EVERY_SCRAPE
    by = {label for listed in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule.expr) for label in listed.split(", ")}
    assert by <= labels, rule.name


def test_a_rule_names_only_metrics_and_labels_that_there_are() -> None:
    for rule in RULES:
        check_names(rule)


def test_a_record_stands_before_what_reads_it() -> None:
    known: set[str] = set()
    for rule in RULES:
        assert {str(each.name) for each in selectors(rule.expr) if ":" in str(each.name)} <= known, rule.name
        if isinstance(rule, Record):
            assert rule.name not in known
            known.add(rule.name)


def kept_labels(alert: Alert) -> set[str]:
    """Return the labels of what an alert's query answers."""
    first = re.search(r"\bby \(([^)]*)\)", alert.expr)
    if first is not None:
        return set(first[1].split(", "))
    names = {str(each.name) for each in selectors(alert.expr)}
    return OF_EVERY_SCRAPE.union(*(every_sample().get(name, set()) for name in names))


@pytest.mark.parametrize("alert", list(alerts(GROUPS)), ids=name_of)
def test_the_texts_of_an_alert_name_labels_that_it_has(alert: Alert) -> None:
    named = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.description))
    assert named <= kept_labels(alert)
    assert "\n" not in alert.summary
    assert len(alert.summary) < len(alert.description)


def anchors() -> Iterator[str]:
    """Yield the anchors of the runbooks' headings, as GitHub makes them."""
    for heading in re.findall(r"^#+ (.*)$", (ROOT / RUNBOOKS).read_text(), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    linked = {alert.runbook_url for alert in alerts(GROUPS)}
    assert linked == {f"{RUNBOOKS}#{anchor}" for anchor in anchors() if anchor.startswith("kvrouter")}


def test_objectives_of_time_are_bounds_of_their_histograms() -> None:
    assert FIRST_TOKEN_S in bounds("kvrouter_time_to_first_token_seconds")
    assert TOKEN_INTERVAL_S in bounds("kvrouter_inter_token_latency_seconds")


def test_a_metric_that_is_not_there_is_found() -> None:
    planted = Record("kvrouter:planted", "sum(rate(kvrouter_no_such_total[5m]))")
    with pytest.raises(AssertionError):
        check_names(planted)
    assert isinstance(promql_parser.parse(planted.expr), promql_parser.AggregateExpr)
