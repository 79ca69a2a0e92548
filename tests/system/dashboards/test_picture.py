"""Pictures of dashboards: what is drawn of an answer, and that a panel without one says so."""

import io

import pytest
from PIL import Image

from tests.system.dashboards.picture import COLUMN_PX, ROW_PX, Series, picture
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
