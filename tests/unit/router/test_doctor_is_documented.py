"""`docs/DOCTOR.md` is the catalogue, row by row, and names every flag of the command."""

import re

import click

from router.cli.doctor import doctor
from router.doctor.catalogue import CATALOGUE
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "DOCTOR.md").read_text()


def test_every_finding_has_its_row_and_every_row_its_finding() -> None:
    rows = re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \| (\w+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [(check, each.severity, each.why, each.fix) for check, each in CATALOGUE.items()]


def test_every_flag_is_named() -> None:
    flags = {name for option in doctor.params if isinstance(option, click.Option) for name in option.opts}
    assert {flag for flag in flags if f"`{flag}`" not in PAGE} == set()
