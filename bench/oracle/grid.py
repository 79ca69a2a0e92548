"""The grid on which cost functions are compared, and the flip of a choice. Standard library only.

Two ranks: the first holds more of a prompt, the second less or nothing. The first is given k blocks of extra load, all
else stays; its cost grows by at least one block with each, so there is one k at which the choice flips to the second:

    flip    the least k at which the second wins; `is_tie`: the first may win there too
    none    the first still wins at k = LOAD_MAX

Weights are given to the peer by its environment. A block has 16 tokens. Extra load comes as one request of k blocks:

    prefill  its tokens still wait for their first token; all are uncached
    decode   it is past its first token; `shared` of its blocks are the prompt's first ones
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

BLOCK_SIZE = 16
LOAD_MAX = 255
TAINT = "slow"
"""A taint of the first worker; the preference of a prompt for it multiplies that worker's cost."""


class Weights(NamedTuple):
    """The weights of the terms, with a display name. Defaults are the peer's."""

    name: str
    overlap_credit: float = 1.0
    decay: float = 0.0
    host: float = 0.75
    disk: float = 0.25
    prefill_scale: float = 1.0
    request: float = 0.0

    @property
    def environment(self) -> dict[str, str]:
        """The same, as the peer reads it when its service is made."""
        return {
            "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": str(self.overlap_credit),
            "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": str(self.decay),
            "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT": str(self.host),
            "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT": str(self.disk),
            "DYN_ROUTER_PREFILL_LOAD_SCALE": str(self.prefill_scale),
            "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT": str(self.request),
        }


class Held(NamedTuple):
    """Blocks of a prompt at one rank: on the device, then on the host, then on disk."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def depths(self) -> tuple[int, int, int, int]:
        """Leading blocks on the tiers 0..t."""
        host = self.device + self.host
        return self.device, host, host + self.disk, host + self.disk


class OraclePrompt(NamedTuple):
    """A request: so many full blocks and `tail` tokens, and what both ranks hold of it."""

    blocks: int
    tail: int
    first: Held
    second: Held = Held()
    preferred: float = 0.0
    """How much the first rank's taint is preferred: negative, and it is shunned."""

    @property
    def tokens(self) -> int:
        """Its length."""
        return self.blocks * BLOCK_SIZE + self.tail

    @property
    def name(self) -> str:
        """The display name."""
        held = " | ".join("+".join(map(str, each)) for each in (self.first, self.second))
        taint = f", preferred {self.preferred:g}" if self.preferred else ""
        return f"{self.blocks}{f'+{self.tail}t' if self.tail else ''}: {held}{taint}"


class OracleLoad(NamedTuple):
    """How the first rank is loaded (`kind`), and what the second carries all along."""

    kind: str
    shared: int = 0
    second_blocks: int = 0
    tail: int = 0
    """Tokens of one block more, which is not full."""

    @property
    def name(self) -> str:
        """The display name."""
        shared = f", {self.shared} shared" if self.shared else ""
        second = f", second {self.second_blocks}" if self.second_blocks else ""
        return f"{self.kind}{f' +{self.tail}t' if self.tail else ''}{shared}{second}"


class OracleCell(NamedTuple):
    """One point of the grid."""

    weights: Weights
    prompt: OraclePrompt
    load: OracleLoad

    @property
    def name(self) -> str:
        """The display name, equal in every run."""
        return f"{self.weights.name} / {self.prompt.name} / {self.load.name}"


class Outcome(NamedTuple):
    """The winners of repeated selections at one extra load; costs are None where they are not visible."""

    first_wins: bool
    second_wins: bool
    first_cost: float | None = None
    second_cost: float | None = None


class Flip(NamedTuple):
    """Where the choice flips: the least k at which the second rank wins, and whether it ties there; costs at that k."""

    load: int | None
    is_tie: bool = False
    first_cost: float | None = None
    second_cost: float | None = None

    @property
    def name(self) -> str:
        """The display name."""
        return "none" if self.load is None else f"{self.load}{' (tie)' if self.is_tie else ''}"


def flip(outcome: Callable[[int], Outcome]) -> Flip:
    """Return where the choice flips, from what happens at some loads of 0..LOAD_MAX."""
    seen: dict[int, Outcome] = {}

    def second_wins(load: int) -> bool:
        seen[load] = outcome(load)
        return seen[load].second_wins

    if not second_wins(LOAD_MAX):
        return Flip(None)
    low, high = -1, LOAD_MAX  # the second does not win at `low`, and does at `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if second_wins(middle) else (middle, high)
    return Flip(high, seen[high].first_wins, seen[high].first_cost, seen[high].second_cost)


WEIGHTS = (
    Weights("default"),
    Weights("credit 0", overlap_credit=0.0),
    Weights("credit 0.5", overlap_credit=0.5),
    Weights("credit 2", overlap_credit=2.0),
    Weights("decay 0.5", decay=0.5),
    Weights("decay 1", decay=1.0),
    Weights("decay 4", decay=4.0),
    Weights("host 0.5, disk 0.125", host=0.5, disk=0.125),
    Weights("host 1, disk 1", host=1.0, disk=1.0),
    Weights("scale 0.5", prefill_scale=0.5),
    Weights("scale 2", prefill_scale=2.0),
    Weights("scale 4", prefill_scale=4.0),
    Weights("request 5", request=5.0),
    Weights("credit 0.5, scale 2, request 5", overlap_credit=0.5, prefill_scale=2.0, request=5.0),
    Weights("decay 1, scale 2, request 16", decay=1.0, prefill_scale=2.0, request=16.0),
)
PROMPTS = (
    OraclePrompt(32, 7, Held(4)),
    OraclePrompt(32, 7, Held(12)),
    OraclePrompt(32, 7, Held(20)),
    OraclePrompt(32, 7, Held(32)),
    OraclePrompt(32, 7, Held(20), Held(6)),
    OraclePrompt(32, 7, Held(20), Held(0, 12, 0)),
    OraclePrompt(32, 7, Held(12, 8, 0)),
    OraclePrompt(32, 7, Held(8, 8, 8)),
    OraclePrompt(32, 7, Held(0, 16, 0)),
    OraclePrompt(32, 7, Held(0, 0, 16)),
    OraclePrompt(32, 0, Held(20)),
    OraclePrompt(128, 1, Held(96)),
    OraclePrompt(8, 15, Held(7)),
    OraclePrompt(32, 0, Held(20), preferred=0.5),
    OraclePrompt(32, 0, Held(20), preferred=-0.25),
)
LOADS = (
    OracleLoad("prefill"),
    OracleLoad("decode"),
    OracleLoad("decode", shared=4),
    OracleLoad("prefill", second_blocks=8),
)
BY_DESIGN = (
    (
        "a prompt of whole blocks, all held: the last token is computed anyway, so its block is never credited here",
        OracleCell(Weights("default"), OraclePrompt(32, 0, Held(32)), OracleLoad("prefill")),
    ),
    (
        "a running request that ends within a block: that block is counted here, and not by the peer",
        OracleCell(Weights("default"), OraclePrompt(32, 7, Held(20)), OracleLoad("decode", tail=5)),
    ),
)
"""Where the two are meant to differ, and why; shown, not judged."""


def grid(*, is_small: bool = False) -> Iterator[OracleCell]:
    """Yield the cells, those of the same weights together."""
    for weights in WEIGHTS[:: 4 if is_small else 1]:
        for prompt in PROMPTS[:: 5 if is_small else 1]:
            for load in LOADS[: 2 if is_small else None]:
                yield OracleCell(weights, prompt, load)
