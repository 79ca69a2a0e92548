"""The supported TensorRT-LLM versions, and the changes between them.

    version        what changed                                                            source
    ------------   ---------------------------------------------------------------------   --------------------------
    1.3.0rc1       a context-only request is taken while the overlap scheduler is on       PR #10755, release notes
    1.3.0rc27      `moe_config.backend` has no `WIDEEP`                                    PR #17797, page `MoeConfig`
    1.4.0rc0       `kv_cache_config.kv_events_config` is refused at start                  `docs/source/features/
                                                                                           kvcache.md` @ 0076e939

Every version in the range takes module and classes of a KV connector; named presets are newer (PR #12626). The full
table is in `docs/TENSORRT_LLM.md`, "Versions". The range is that of the extra `trtllm` in `pyproject.toml`.
"""

import re
from typing import NamedTuple

_RELEASE = 1 << 30
"""The candidate number of a final release: it comes after every candidate."""
_PATTERN = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?:rc(\d{1,6}))?(?:\.post(\d{1,6}))?(?:\+[\w.]+)?")


class Version(NamedTuple):
    """A version as PEP 440 orders it; without development releases, which sort as unknown."""

    major: int
    minor: int
    patch: int
    candidate: int
    post: int = 0


OLDEST = Version(1, 3, 0, 0)
NEXT_LINE = (1, 5)
"""The first line of versions that is not supported, its release candidates included."""
SUPPORTED = "1.3.0rc0 or later, below 1.5"
CONTEXT_WITH_OVERLAP = Version(1, 3, 0, 1)


def parse_version(text: str) -> Version | None:
    """Return the version that `text` names; None if it is empty or of another form (a development build)."""
    found = _PATTERN.fullmatch(text)
    if found is None:
        return None
    major, minor, patch, candidate, post = found.groups()
    return Version(
        int(major), int(minor), int(patch or 0), _RELEASE if candidate is None else int(candidate), int(post or 0)
    )


def is_supported(text: str) -> bool:
    """Return whether the version that `text` names is in the range `SUPPORTED`; a text of another form is not."""
    version = parse_version(text)
    return version is not None and version >= OLDEST and version[:2] < NEXT_LINE


def is_before(text: str, other: Version) -> bool:
    """Return whether `text` names a version that is older than `other`; False if it names none."""
    version = parse_version(text)
    return version is not None and version < other
