"""Pictures of dashboards: what is drawn of an answer, and that a panel without one says so."""

import io

import pytest
from PIL import Image

from tests.system.dashboards.picture import COLUMN_PX, ROW_PX, Series, picture, shown
from tests.system.dashboards.shipped import BOARD_NAMES, board, panels

POINTS = [(0.0, 1.0), (1.0, 3.0), (2.0, 2.0)]


def answers(name: str, *, without: str = "") -> dict[tuple[str, str], list[Series]]:
    """Return an answer of two series for each query of a dashboard, but none for one panel."""
    series = [Series({"worker": "w0", "le": "1.0"}, POINTS), Series({"worker": "w1", "le": "+Inf"}, POINTS)]
    found = ((panel["title"], target["refId"]) for panel in panels(name) for target in panel["targets"])
    return {at: series for at in found if at[0] != without}


def size_of(picture: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(picture)).size


@pytest.mark.slow
@pytest.mark.parametrize("name", BOARD_NAMES)
def test_every_panel_of_every_dashboard_can_be_drawn(name: str) -> None:
    drawn, empty = picture(board(name), answers(name))
    below = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board(name)["panels"])
    assert size_of(drawn) == pytest.approx((24 * COLUMN_PX, (below + 2) * ROW_PX), abs=2)
    assert empty == []


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.125, "percentunit", "12.5 %"),
        (0.0125, "s", "12.5 ms"),
        (3.0, "s", "3 s"),
        (2_500_000.0, "cps", "2.5 M/s"),
        (1200.0, "short", "1.2 k"),
        (0.0, "none", "0"),
        (float("inf"), "s", "∞"),
    ],
)
def test_figures_are_written_as_people_read_them(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text
