"""Links of the documentation lead to files of the site. `make site` finds those that lead nowhere."""

from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.site_pages import linked


@pytest.mark.parametrize(
    ("folder", "link", "led"),
    [
        ("docs", "[a](../README.md#install)", "[a](index.md#install)"),
        ("docs", "[a](../configs/nats/nats.conf)", "[a](files/configs/nats/nats.conf)"),
        ("docs/reference", "[a](../WIRE.md#x)", "[a](../WIRE.md#x)"),
        ("docs/reference", "[a](../../CHANGELOG.md)", "[a](../CHANGELOG.md)"),
        ("docs", "[a](adr/)", "[a](adr/README.md)"),
        (".", "[a](docs/adr/)", "[a](adr/README.md)"),
        (".", '<img src="docs/figures/a.png">', '<img src="figures/a.png">'),
        ("docs", "[a](NOWHERE.md)", "[a](NOWHERE.md)"),
        ("docs", "[a](../../outside.md)", "[a](../../outside.md)"),
        ("docs", "[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
    ],
)
def test_a_link_leads_to_where_the_site_has_the_file(folder: str, link: str, led: str) -> None:
    assert linked(link, ROOT / Path(folder)) == led
