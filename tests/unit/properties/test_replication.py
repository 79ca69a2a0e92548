"""Whatever the network does to messages: a second after the last news the ledgers of all routers are alike."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.ledger import BEAT_S, Expired, Finished
from router.replicas.replication import SILENT_S
from tests.support.amount import examples
from tests.unit.properties.replica_network import Network, apply

AGREED_S = BEAT_S + 0.5
SEEDS = st.integers(0, (1 << 64) - 1)


def assert_alike(network: Network, seed: int) -> None:
    """All ledgers say the same, and that is what the routers' own leases come to."""
    sums = [router.sums() for router in network.alive()]
    assert sums == [sums[0]] * len(sums), f"seed {seed}"
    assert sums[0][1] == sum(len(router.own) for router in network.alive()), f"seed {seed}"


def agree(seed: int, routers: int = 3, steps: int = 30) -> Network:
    network = Network(seed, routers)
    network.busy(steps)
    network.quiet(AGREED_S)
    assert_alike(network, seed)
    return network


def end_all(network: Network) -> None:
    """Every lease ends; after the next beat nothing is left anywhere."""
    for router in network.alive():
        for lease_id in list(router.own):
            router.does(Finished(lease_id=lease_id), network.now_s)
    network.quiet(AGREED_S)
    assert all(router.state.core.is_ledger_empty for router in network.alive())


@given(SEEDS, st.integers(2, 4), st.integers(1, 40))
@settings(max_examples=examples(60))
def test_after_the_next_beat_all_ledgers_are_alike(seed: int, routers: int, steps: int) -> None:
    end_all(agree(seed, routers, steps))


@given(SEEDS, st.integers(0, 2))
@settings(max_examples=examples(30, least=8))
def test_a_router_that_begins_anew_has_none_of_its_former_leases(seed: int, number: int) -> None:
    network = agree(seed)
    network.is_troubled = True
    network.restart(number)
    network.busy(10)
    network.quiet(AGREED_S)
    assert_alike(network, seed)


@given(SEEDS)
@settings(max_examples=examples(20, least=8))
def test_of_a_router_that_is_silent_nothing_is_left(seed: int) -> None:
    network = agree(seed)
    network.die(1)
    network.busy(3)
    network.quiet(SILENT_S + AGREED_S)
    assert_alike(network, seed)
    assert all(len(router.replication.peers) == 1 for router in network.alive())


@given(SEEDS)
@settings(max_examples=examples(20, least=8))
def test_a_later_router_learns_all_open_leases(seed: int) -> None:
    network = Network(seed, 3)
    network.die(2)
    network.busy(20)
    network.restart(2)
    network.quiet(AGREED_S)
    assert_alike(network, seed)


def expire_one(network: Network) -> bool:
    """Every ledger ends, by itself, one lease of another router; return whether there was one."""
    found = False
    for router in network.alive():
        for other in network.alive():
            if other is not router and other.own:
                found, lease_id = True, next(iter(other.own))
                apply(router.state, Expired(lease_id=lease_id), network.now_s)
                router.replication.on_lease_event(Expired(lease_id=lease_id))
                break
    return found


@given(SEEDS)
@settings(max_examples=examples(20, least=8))
def test_a_lease_that_ended_only_here_is_learnt_of_anew(seed: int) -> None:
    network = agree(seed)
    if expire_one(network):
        with pytest.raises(AssertionError):
            assert_alike(network, seed)
        network.quiet(AGREED_S)
        assert_alike(network, seed)


def test_where_nothing_is_lost_nothing_is_asked_for() -> None:
    network = Network(5, 3)
    network.quiet(AGREED_S)  # they have met
    network.busy(40)
    network.quiet(AGREED_S)
    assert_alike(network, 5)
    for router in network.alive():
        assert not (+router.replication.counts).keys() & {"gap", "difference", "asked", "refused"}


def test_where_messages_are_lost_they_were_asked_for_and_the_skew_is_0_again() -> None:
    network = agree(6)
    assert all((+router.replication.counts).keys() >= {"gap", "taken"} for router in network.alive())
    network.quiet(AGREED_S)
    assert {peer.skew for router in network.alive() for peer in router.replication.peers.values()} == {(0, 0, 0)}
