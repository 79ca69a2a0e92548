"""The local time at which `renderings.json` was made."""

from datetime import datetime

DAY = datetime(2026, 3, 1, 12, 30)  # noqa: DTZ001 - local, as engines take it
