"""Whatever comes, leaves and is taken: nothing is lost or doubled, bounds hold, and no tenant starves.

A queue is compared with plain lists of what waits, and fair shares with the bounds of self-clocked fair queuing.
"""

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from router.queue.config import QueuePolicy, QueueSection
from router.queue.waiting import Place, RequestQueue
from tests.support.amount import examples
from tests.unit.router.samples import route

TENANTS = ("a", "b", "c")


class Small(QueueSection):
    """Bounds that a script of steps reaches."""

    tokens_max = 120
    tenants_max = 3


LIMITS = Small(wait_s=8.0, requests_max=12, tenant_requests_max=8, fair_share_weights={"b": 2.0, "c": 0.5})


class Come(NamedTuple):
    """A request asks."""

    tenant: str
    model: str
    tokens: int
    priority: int
    strict_priority: int
    ttft_target_s: float | None
    lora: str


class Take(NamedTuple):
    """There is room for requests without a LoRA, or with one too."""

    model: str
    has_lora_room: bool


class Leave(NamedTuple):
    """The client of one of those that ever waited left."""

    which: int


class Tick(NamedTuple):
    """Time is looked at."""


comes = st.builds(
    Come,
    st.sampled_from(TENANTS),
    st.sampled_from(["m", "n"]),
    st.sampled_from([0, 1, 5, 9, 10, 25, 60]),
    st.sampled_from([0, 0, 1, 4, -2]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([None, None, 1.0, 30.0]),
    st.sampled_from(["", "", "x"]),
)
steps = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.5, 3.0]),
        st.one_of(
            comes,
            comes,
            st.builds(Take, st.sampled_from(["m", "n"]), st.booleans()),
            st.builds(Leave, st.integers(0, 40)),
            st.builds(Tick),
        ),
    ),
    max_size=80,
)
policies = st.sampled_from(["fcfs", "wspt", "edf"])


def key(place: Place, arrival: int, policy: QueuePolicy) -> tuple[float, float, int]:
    """Return the order that the rules give: strict priority, the policy's key, the arrival."""
    asked, jump = place.request, max(0, place.request.priority)
    match policy:
        case "fcfs":
            its = place.arrived_s - jump
        case "wspt":
            its = -(1 + jump) / place.cost_tokens
        case "edf":
            its = place.arrived_s + (asked.ttft_target_s if asked.ttft_target_s is not None else LIMITS.ttft_default_s)
    return (-asked.strict_priority, its, arrival)


class Lists:
    """A queue, and what must be in it."""

    def __init__(self, queue: RequestQueue, policy: QueuePolicy) -> None:
        self.queue, self.policy, self.now_s = queue, policy, 0.0
        self.ever: list[Place] = []
        self.waits: list[Place] = []

    def step(self, step: Come | Take | Leave | Tick) -> None:
        match step:
            case Come():
                self.come(step)
            case Take(model, has_lora_room):
                self.take(model, has_lora_room=has_lora_room)
            case Leave(which) if which < len(self.ever):
                place = self.ever[which]
                assert self.queue.cancel(place) == (place in self.waits)
                self.over(place)
            case Tick():
                overdue = [place for place in self.waits if self.now_s - place.arrived_s >= LIMITS.wait_s]
                before = list(self.queue.waiting.values())
                self.queue.tick(self.now_s)
                assert [place for place in before if place.arrival not in self.queue.waiting] == overdue
                for place in overdue:
                    self.over(place)
        self.sums()

    def come(self, step: Come) -> None:
        request = route(
            tenant=step.tenant,
            model=step.model,
            priority=step.priority,
            strict_priority=step.strict_priority,
            ttft_target_s=step.ttft_target_s,
            lora=step.lora,
        )
        found = self.queue.offer(request, step.tokens, self.now_s, lambda _: None)
        mine = [place for place in self.waits if place.tenant == step.tenant]
        if len(mine) >= LIMITS.tenant_requests_max:
            assert not isinstance(found, Place)
            assert (found.status, found.code) == (429, "tenant_full")
        elif full(self.waits, max(1, step.tokens), LIMITS.requests_max, LIMITS.tokens_max):
            assert not isinstance(found, Place)
            assert (found.status, found.code) == (503, "queue_full")
        else:
            assert isinstance(found, Place)
            self.ever.append(found)
            self.waits.append(found)

    def take(self, model: str, *, has_lora_room: bool) -> None:
        place = self.queue.take(model, lambda request: has_lora_room or not request.lora, self.now_s)
        heads = []
        for tenant in TENANTS:
            mine = [each for each in self.waits if each.tenant == tenant and each.request.model == model]
            mine = [each for each in mine if has_lora_room or not each.request.lora]
            if mine:
                heads.append(min(mine, key=lambda each: key(each, self.ever.index(each), self.policy)))
        assert (place is None) == (not heads)
        if place is not None:
            assert place in heads
            self.over(place)

    def over(self, place: Place) -> None:
        if place in self.waits:
            self.waits.remove(place)

    def sums(self) -> None:
        assert len(self.queue) == len(self.waits) <= LIMITS.requests_max
        assert self.queue.tokens == sum(place.cost_tokens for place in self.waits)
        assert set(self.queue.models()) == {place.request.model for place in self.waits}


def full(waits: list[Place], cost_tokens: int, requests_max: int, tokens_max: int) -> bool:
    tokens = sum(place.cost_tokens for place in waits)
    return len(waits) >= requests_max or (bool(waits) and tokens + cost_tokens > tokens_max)


@given(policies, steps)
@settings(max_examples=examples(200))
def test_a_queue_holds_what_plain_lists_hold_in_their_order(
    policy: QueuePolicy, script: list[tuple[float, Come | Take | Leave | Tick]]
) -> None:
    lists = Lists(RequestQueue(LIMITS.model_copy(update={"policy": policy})), policy)
    for pause_s, step in script:
        lists.now_s += pause_s
        lists.step(step)
    while lists.waits:  # nothing is lost: all that waits can be taken
        for model in ("m", "n"):
            lists.take(model, has_lora_room=True)
    assert lists.queue.models() == ()
    assert (len(lists.queue), lists.queue.tokens) == (0, 0)


# ---------------------------------------------------------------- fair shares

WEIGHTS = (1.0, 4.0, 0.5, 1.0)
costs = st.lists(st.integers(1, 60), min_size=1, max_size=30)
backlogs = st.lists(costs, min_size=2, max_size=4)


def served(waiting: dict[str, list[int]], weights: dict[str, float]) -> list[tuple[str, int]]:
    """Return the requests, as tenant and tokens, in the order in which they are taken."""
    queue = RequestQueue(QueueSection(fair_share_weights=weights))
    for tenant, tokens in waiting.items():
        for each in tokens:
            queue.offer(route(tenant=tenant), each, 0.0, lambda _: None)
    places = iter(lambda: queue.take("m", lambda _: True, 0.0), None)
    return [(place.tenant, place.cost_tokens) for place in places]


@given(backlogs)
def test_no_first_request_waits_for_more_of_another_tenant_than_its_cost_by_weight_and_one(
    waiting: list[list[int]],
) -> None:
    left = {str(number): list(each) for number, each in enumerate(waiting)}
    weights = dict(zip(left, WEIGHTS, strict=False))
    others = {name: dict.fromkeys(left, 0) for name in left}  # tokens served since its first request is the first
    order = served(left, weights)
    assert sorted(order) == sorted((name, cost) for name, each in left.items() for cost in each)
    largest = {name: max(each) for name, each in left.items()}
    for turn, cost in order:
        assert left[turn].pop(0) == cost
        others[turn] = dict.fromkeys(left, 0)
        for name in left.keys() - {turn}:
            others[name][turn] += cost
            if left[name]:
                allowed = left[name][0] * weights[turn] / weights[name] + largest[turn]
                assert others[name][turn] <= allowed + 1e-6


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 40))
def test_tokens_are_served_in_the_ratio_of_the_weights(ratio: int, cost: int, other_cost: int) -> None:
    left, sums = {"heavy": [cost] * 500, "light": [other_cost] * 500}, {"heavy": 0, "light": 0}
    for turn, each in served(left, {"heavy": float(ratio)}):
        sums[turn] += each
        left[turn].pop()
        if not all(left.values()):
            break
        assert abs(sums["heavy"] / ratio - sums["light"]) <= cost / ratio + other_cost + 1e-6
