"""The rules, judged by one start of Prometheus's own tool: every alert fires when it should and only then."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.demo.monitoring import PROMETHEUS, program
from dashboards.command import RULES
from tests.support.paths import ROOT
from tests.system.dashboards.rule_cases import CASES, Case
from tests.system.dashboards.rules import ALERTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first test waits for all

WRONG = [
    case._replace(fires=1 - case.fires, what=f"{case.what}, said wrongly")
    for case in CASES
    if str(case) in {"KvRouterAgentDown: up", "KvRouterAgentDown: for minutes"}
]


def asked(case: Case) -> dict[str, Any]:
    """Return what promtool is asked of a case."""
    labels = f'alertname="{case.alert}",alertstate="firing",severity="{case.severity}"'
    expected = [{"labels": "{}", "value": case.fires}] if case.fires else []
    test = {
        "interval": case.interval,
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "promql_expr_test": [{"expr": f"count(ALERTS{{{labels}}})", "eval_time": case.at, "exp_samples": expected}],
    }
    rules = str(ROOT / "dashboards" / RULES)
    return {"rule_files": [rules], "evaluation_interval": case.interval, "tests": [test]}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what promtool says of each case; that the rules cannot be loaded, it says of all."""
    files = {tmp_path_factory.mktemp("cases") / "case.yaml": case for case in (*CASES, *WRONG)}
    for file, case in files.items():
        file.write_text(yaml.safe_dump(asked(case)))
    command: list[str | Path] = [program("promtool", PROMETHEUS), "test", "rules", *files]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    said = re.split(r"^Unit Testing:\s+(\S+)$", ran.stdout, flags=re.MULTILINE)[1:]
    return {str(files[Path(file)]): verdict.strip() for file, verdict in zip(said[::2], said[1::2], strict=True)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_alert_fires_when_it_should_and_only_then(case: Case, verdicts: dict[str, str]) -> None:
    assert verdicts[str(case)] == "SUCCESS"


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_a_case_that_is_wrong_is_found(case: Case, verdicts: dict[str, str]) -> None:
    assert verdicts[str(case)].startswith("FAILED")


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    every = {(alert.alert, alert.severity) for alert in ALERTS}
    assert {(case.alert, case.severity) for case in CASES if case.fires} == every
    assert {(case.alert, case.severity) for case in CASES if not case.fires} == every
