"""The rules, judged by Prometheus's own tool: they load, and every alert fires when it should and only then."""

import subprocess
from pathlib import Path

import pytest
import yaml

from bench.demo.monitoring import PROMETHEUS, program
from dashboards.alerts import GROUPS
from dashboards.files import RULES
from dashboards.rules import alerts
from tests.support.paths import ROOT
from tests.system.dashboards.rule_cases import CASES, Case

pytestmark = pytest.mark.slow

COMMITTED = ROOT / "dashboards" / RULES


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool", PROMETHEUS), *arguments], capture_output=True, text=True, check=False)


def judged(case: Case, directory: Path) -> subprocess.CompletedProcess[str]:
    """Return what promtool says of a case."""
    labels = f'alertname="{case.alert}",alertstate="firing",severity="{case.severity}"'
    expected = [{"labels": "{}", "value": case.fires}] if case.fires else []
    test = {
        "interval": case.interval,
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "promql_expr_test": [{"expr": f"count(ALERTS{{{labels}}})", "eval_time": case.at, "exp_samples": expected}],
    }
    written = directory / "case.yaml"
    content = {"rule_files": [str(COMMITTED)], "evaluation_interval": case.interval, "tests": [test]}
    written.write_text(yaml.safe_dump(content))
    return promtool("test", "rules", written)


def test_prometheus_can_load_the_rules() -> None:
    checked = promtool("check", "rules", COMMITTED)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_alert_fires_when_it_should_and_only_then(case: Case, tmp_path: Path) -> None:
    result = judged(case, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    every = {(alert.name, alert.severity) for alert in alerts(GROUPS)}
    assert {(case.alert, case.severity) for case in CASES if case.fires} == every
    assert {(case.alert, case.severity) for case in CASES if not case.fires} == every


@pytest.mark.parametrize("fires", [0, 1])
def test_a_case_that_is_wrong_is_found(fires: int, tmp_path: Path) -> None:
    (right,) = [case for case in CASES if str(case) == f"KvRouterAgentDown: {'up' if fires else 'for minutes'}"]
    assert judged(right._replace(fires=fires), tmp_path).returncode != 0
