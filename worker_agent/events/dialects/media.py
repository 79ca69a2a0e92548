"""Names of media and tiers, as engines spell them. Case counts.

Source: `docs/SOURCES.md` E3.3, E3.4.
"""

from kv_protocol.errors import LimitExceeded
from kv_protocol.events import Tier

TIER_OF_MEDIUM = {
    None: Tier.GPU,
    "GPU": Tier.GPU,
    "DEVICE": Tier.GPU,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.EXTERNAL,
    "NETWORK": Tier.EXTERNAL,
    "REMOTE": Tier.EXTERNAL,
    "SHARED": Tier.EXTERNAL,
}
MEDIA_BEYOND = frozenset({"FS", "OBJ"})
"""Stores behind an offload connector, file systems and object stores: known, and no tier of ours."""
_SHOWN_CHARACTERS_MAX = 32


def tier_of_medium(medium: str | None) -> Tier:
    """Return where blocks on `medium` lie; raise `LimitExceeded` for an unknown spelling."""
    tier = TIER_OF_MEDIUM.get(medium)
    if tier is None:
        shown = str(medium)[:_SHOWN_CHARACTERS_MAX]
        raise LimitExceeded("medium", shown, ", ".join(str(known) for known in TIER_OF_MEDIUM))
    return tier
