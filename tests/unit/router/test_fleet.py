"""Every row of the fleet's table, and parity."""

from typing import Any

import pytest

from kv_protocol.fleet import WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.hashing import EAGLE_HASH_SCHEME, Hashing, canary
from kv_protocol.images import FixedTokens, ImageRule, rule_text
from router.fleet import registry as fleet_module
from router.fleet.registry import SILENT_S, Fleet, Worker
from router.fleet.trust import PARITY_FIELDS
from tests.unit.router.samples import BLOCK_SIZE, TEXT, registered

IMAGES = ImageRule(placeholder="<image>", image_token_id=5, tokens=FixedTokens(576))


def fleet(*registrations: WorkerRegistered, heard_at_s: float | None = 0.0) -> Fleet:
    """Return a fleet of workers that were heard once."""
    folded = Fleet(TEXT)
    for each in registrations:
        folded.apply(each)
        if heard_at_s is not None:
            folded.on_heartbeat(each.worker_id, each.instance, heard_at_s)
    return folded


def known(folded: Fleet, worker_id: str = "w0") -> Worker:
    worker = folded.worker(worker_id)
    assert worker is not None
    return worker


def unfit(folded: Fleet, now_s: float, worker_id: str = "w0") -> str:
    return folded.unfit(known(folded, worker_id), now_s)


# ---------------------------------------------------------------- registered


def test_a_registered_worker_is_known_and_unfit_until_it_is_heard() -> None:
    folded = fleet(registered(), heard_at_s=None)
    assert known(folded).registration == registered()
    assert unfit(folded, 0.0) == "no heartbeat yet"
    folded.on_heartbeat("w0", "w0-1", 3.0)
    assert unfit(folded, 3.0) == ""


def test_workers_come_eldest_first_and_a_model_has_all_its_names_each_once() -> None:
    folded = fleet(registered("w2"), registered("w0"), registered("w1", served_names=("other", "m0")))
    assert [each.registration.worker_id for each in folded.workers()] == ["w2", "w0", "w1"]
    assert [each.registration.worker_id for each in folded.serving("m")] == ["w2", "w0"]
    assert folded.models() == ("m", "other", "m0")
    assert [each.registration.worker_id for each in folded.serving("m0")] == ["w1"]


def test_the_same_instance_again_changes_what_it_says_and_nothing_else() -> None:
    folded = fleet(registered(), registered("w1"))
    folded.apply(WorkerDraining(worker_id="w0", instance="w0-1"))
    folded.apply(registered(served_names=("m", "n")))
    worker = known(folded)
    assert worker.registration.served_names == ("m", "n")
    assert (worker.draining, worker.heard_at_s) == (True, 0.0)
    assert [each.registration.worker_id for each in folded.workers()] == ["w0", "w1"]


def test_of_a_new_instances_former_life_nothing_counts() -> None:
    folded = fleet(registered(), registered("w1"))
    folded.apply(WorkerDraining(worker_id="w0", instance="w0-1"))
    reborn = registered(instance="w0-2", block_size=32)
    folded.apply(reborn)
    assert known(folded) == Worker(registration=reborn, canary=canary(32))
    assert unfit(folded, 0.0) == "no heartbeat yet"
    assert [each.registration.worker_id for each in folded.workers()] == ["w1", "w0"], "its age neither"


def test_beyond_the_bound_workers_are_refused_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "WORKERS_MAX", 2)
    folded = fleet(registered("w0"), registered("w1"))
    folded.apply(registered("w2"))
    folded.apply(registered("w1", instance="w1-2"))
    assert [each.registration.instance for each in folded.workers()] == ["w0-1", "w1-2"]
    assert folded.refused_total == 1


def test_beyond_the_bound_of_all_ranks_a_registration_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "RANKS_MAX", 5)
    folded = fleet(registered("w0", dp_ranks=(0, 1, 2)), registered("w1", dp_ranks=(0, 1)))
    for refused in (registered("w2"), registered("w1", instance="w1-2", dp_ranks=(0, 1, 2))):
        refusal = folded.refusal(refused)
        assert refusal == ("no_room", "ranks of all workers: found 6, allowed 5")
        folded.apply(refused)
    assert [each.registration.instance for each in folded.workers()] == ["w0-1", "w1-1"]
    assert folded.refused_total == 2
    folded.apply(registered("w0", dp_ranks=(0,)))
    folded.apply(registered("w2", dp_ranks=(0, 1)))
    folded.apply(WorkerLeft(worker_id="w1", instance="w1-1"))
    folded.apply(registered("w3", dp_ranks=(0, 1)))
    assert [each.registration.worker_id for each in folded.workers()] == ["w0", "w2", "w3"]
    restored = Fleet(TEXT)
    for each in folded.workers():
        restored.restore(each)
    assert restored.refusal(registered("w4")) is not None


@pytest.mark.parametrize("kind", [WorkerDraining, WorkerLeft])
def test_an_event_of_another_instance_or_of_an_unregistered_worker_is_refused_and_changes_nothing(kind: Any) -> None:
    folded = fleet(registered())
    assert folded.refusal(kind(worker_id="w0", instance="w0-1")) is None
    refusal = folded.refusal(kind(worker_id="w0", instance="w0-0"))
    assert refusal == ("instance", "instance: found w0-0, allowed w0-1, the registered one")
    refusal = folded.refusal(kind(worker_id="w1", instance="w1-1"))
    assert refusal == ("unregistered", "worker_id: found w1, allowed a registered worker")
    before = list(folded.workers())
    for worker_id, instance in (("w0", "w0-0"), ("w1", "w1-1")):
        folded.apply(kind(worker_id=worker_id, instance=instance))
    assert list(folded.workers()) == before


# ---------------------------------------------------------------- heartbeats


def heard_beside(*registrations: WorkerRegistered, heard_until_s: float) -> Fleet:
    """Return a fleet of workers that were heard once, at 0, and of `w7`, which is heard until a time."""
    folded = fleet(*registrations, registered("w7"))
    folded.on_heartbeat("w7", "w7-1", heard_until_s)
    return folded


def test_a_worker_that_is_silent_for_five_periods_while_another_is_heard_is_unfit() -> None:
    folded = heard_beside(registered(), heard_until_s=4.5)
    assert SILENT_S == 5.0
    assert unfit(folded, 4.999) == ""
    assert unfit(folded, 5.0) == "silent for 5 s or longer"
    folded.on_heartbeat("w0", "w0-1", 60.0)
    assert unfit(folded, 60.0) == ""


def test_while_no_worker_is_heard_silence_says_nothing_of_one_and_the_first_that_is_makes_the_others_silent() -> None:
    folded = heard_beside(registered(), heard_until_s=3.0)
    assert unfit(folded, 7.999) == "silent for 5 s or longer"
    assert (unfit(folded, 8.0), unfit(folded, 8.0, "w7"), unfit(folded, 60.0)) == ("", "", "")
    changes = folded.changes
    folded.on_heartbeat("w7", "w7-1", 60.0)
    assert unfit(folded, 60.0) == "silent for 5 s or longer"
    assert folded.changes > changes


@pytest.mark.parametrize("registration", [None, registered("w7", instance="w7-2")])
def test_heartbeats_of_an_instance_that_left_say_nothing_of_others(registration: WorkerRegistered | None) -> None:
    folded = heard_beside(registered(), heard_until_s=6.0)
    assert unfit(folded, 7.0) == "silent for 5 s or longer"
    folded.apply(registration or WorkerLeft(worker_id="w7", instance="w7-1", reason="stopped"))
    assert unfit(folded, 7.0) == ""


@pytest.mark.parametrize(("worker_id", "instance"), [("w0", "w0-0"), ("w9", "w0-1")])
def test_a_heartbeat_of_another_instance_or_an_unknown_worker_does_not_count(worker_id: str, instance: str) -> None:
    folded = heard_beside(registered(), heard_until_s=4.5)
    folded.on_heartbeat(worker_id, instance, 4.0)
    assert unfit(folded, 5.0) == "silent for 5 s or longer"
    assert folded.worker("w9") is None


def test_while_the_log_is_away_silence_says_nothing_and_then_every_worker_has_the_full_time() -> None:
    folded = fleet(registered(), registered("w1"))
    folded.on_log_connection(connected=False, now_s=1.0)
    assert unfit(folded, 999.0) == ""
    folded.on_log_connection(connected=True, now_s=1000.0)
    assert unfit(folded, 1004.999) == ""
    folded.on_heartbeat("w1", "w1-1", 1004.0)
    assert (unfit(folded, 1005.0), unfit(folded, 1005.0, "w1")) == ("silent for 5 s or longer", "")


def test_a_log_that_was_not_lost_gives_no_more_time_and_a_reconnection_none_to_a_worker_without_heartbeats() -> None:
    folded = heard_beside(registered(), heard_until_s=4.5)
    folded.on_log_connection(connected=True, now_s=4.0)
    assert unfit(folded, 5.0) == "silent for 5 s or longer"
    folded = fleet(registered(), heard_at_s=None)
    for connected, now_s in ((False, 1.0), (True, 3.0)):
        folded.on_log_connection(connected=connected, now_s=now_s)
        assert unfit(folded, now_s) == "no heartbeat yet"


# ---------------------------------------------------------------- draining, leaving


def test_a_draining_worker_takes_no_new_work_is_still_known_and_forgotten_once_it_left() -> None:
    folded = heard_beside(registered(), heard_until_s=6.5)
    assert unfit(folded, 7.0) == "silent for 5 s or longer"
    folded.apply(WorkerDraining(worker_id="w0", instance="w0-1"))
    assert unfit(folded, 7.0) == "draining", "of several reasons the lasting one"
    assert len(folded.serving("m")) == 2
    for worker_id in ("w0", "w7"):
        folded.apply(WorkerLeft(worker_id=worker_id, instance=f"{worker_id}-1"))
    assert folded.worker("w0") is None
    assert folded.models() == ()


# ---------------------------------------------------------------- parity


def test_a_worker_that_agrees_differs_in_nothing_whatever_other_fields_say() -> None:
    other: dict[str, Any] = {"total_kv_blocks": 9, "version": "2", "event_source": "vllm", "max_seq_len": 1}
    for changed in ({}, other):
        folded = fleet(registered(**changed))
        assert folded.disparities(known(folded), Hashing(BLOCK_SIZE)) == (), changed


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"block_size": 32}, "block_size: found 32, allowed 16"),
        ({"hash_scheme": "sha256"}, "hash_scheme: found 'sha256', allowed 'xxh3-1337'"),
        ({"canary": 1}, f"canary: found 1, allowed {canary(BLOCK_SIZE)}"),
        ({"tokenizer_digest": "x"}, "tokenizer_digest: found 'x', allowed 'tokenizer-1'"),
        ({"template_digest": "x"}, "template_digest: found 'x', allowed 'template-1'"),
        ({"images": IMAGES}, f"images: found {rule_text(IMAGES)!r}, allowed 'none'"),
    ],
)
def test_the_field_that_differs_is_named(changed: dict[str, Any], difference: str) -> None:
    folded = fleet(registered(**changed))
    (found,) = folded.disparities(known(folded), Hashing(BLOCK_SIZE))
    assert (found.field, str(found)) == (difference.partition(":")[0], difference)


def test_of_a_worker_that_differs_in_everything_every_field_is_named() -> None:
    every: dict[str, Any] = {
        "block_size": 32,
        "hash_scheme": "sha256",
        "canary": 1,
        "tokenizer_digest": "x",
        "template_digest": "y",
        "images": IMAGES,
        "event_source": "none",
    }
    folded = fleet(registered(**every))
    found = folded.disparities(known(folded), Hashing(BLOCK_SIZE))
    assert tuple(each.field for each in found) == PARITY_FIELDS == tuple(every)
    assert [each.found for each in found] == [*list(every.values())[:-2], rule_text(IMAGES), "none"]


def test_the_canary_must_be_that_of_the_stated_hashing_and_a_registration_that_is_told_again_is_judged_anew() -> None:
    folded = fleet(registered(block_size=32, canary=canary(BLOCK_SIZE)))
    found = folded.disparities(known(folded), Hashing(BLOCK_SIZE))
    assert [each.field for each in found] == ["block_size", "canary"]
    assert found[1].allowed == canary(32)
    folded.apply(registered(block_size=32))
    assert [each.field for each in folded.disparities(known(folded), Hashing(BLOCK_SIZE))] == ["block_size"]


def test_a_model_is_hashed_as_its_eldest_fit_worker_states_unless_the_scheme_is_unknown() -> None:
    folded = fleet(registered(hash_scheme=EAGLE_HASH_SCHEME, canary=canary(BLOCK_SIZE, EAGLE_HASH_SCHEME)))
    hashing = Hashing(BLOCK_SIZE, EAGLE_HASH_SCHEME)
    assert folded.hashing("m", 0.0) == hashing
    assert folded.disparities(known(folded), hashing) == ()
    assert fleet(registered(hash_scheme="sha256")).hashing("m", 0.0) == Hashing(BLOCK_SIZE)


def test_parity_is_judged_by_how_the_eldest_fit_worker_has_prompts_hashed() -> None:
    folded = fleet(registered("w0"), registered("w1", block_size=32))
    fields = {worker_id: [each.field for each in found] for worker_id, found in folded.parity(0.0).items()}
    assert fields == {"w0": [], "w1": ["block_size"]}
    folded.on_heartbeat("w1", "w1-1", 9.0)  # and w0 is silent
    fields = {worker_id: [each.field for each in found] for worker_id, found in folded.parity(9.0).items()}
    assert fields == {"w0": ["block_size"], "w1": []}


def test_the_image_rule_is_the_eldest_fit_worker_s_and_others_differ() -> None:
    others = ImageRule(placeholder="<image>", image_token_id=5, tokens=FixedTokens(577))
    folded = fleet(registered("w0", images=IMAGES), registered("w1", images=others), registered("w2"))
    assert folded.images("m", 0.0) == IMAGES
    assert {name: [each.field for each in found] for name, found in folded.parity(0.0).items()} == {
        "w0": [],
        "w1": ["images"],
        "w2": ["images"],
    }
    folded.on_heartbeat("w1", "w1-1", 9.0)  # and the others are silent
    assert folded.images("m", 9.0) == others
    assert folded.parity(9.0)["w1"] == ()
    assert folded.images("unknown", 9.0) is None


def test_an_encoder_however_old_does_not_say_how_prompts_are_hashed() -> None:
    folded = fleet(registered("w0", role="encode", block_size=64), registered("w1", images=IMAGES))
    assert (folded.hashing("m", 0.0), folded.images("m", 0.0)) == (Hashing(BLOCK_SIZE), IMAGES)
    assert folded.parity(0.0)["w1"] == ()
    alone = fleet(registered("w0", role="encode", block_size=64))
    assert alone.hashing("m", 0.0) == Hashing(64)


def test_a_worker_of_several_models_is_told_every_difference_once() -> None:
    folded = fleet(
        registered("w0"),
        registered("w1", served_names=("n",), hash_scheme=EAGLE_HASH_SCHEME, canary=canary(16, EAGLE_HASH_SCHEME)),
        registered("w2", served_names=("m", "n"), tokenizer_digest="x"),
    )
    found = folded.differences([known(folded, "w2")], 0.0)["w2"]
    assert [each.field for each in found] == ["tokenizer_digest", "hash_scheme"]
    assert folded.parity(0.0) == {"w0": (), "w1": (), "w2": found}


def silences(folded: Fleet) -> list[str]:
    return [folded.silence(known(folded, each)) for each in ("w0", "w1")]


def test_a_worker_is_silent_while_others_are_heard_and_not_when_all_fall_silent() -> None:
    folded = fleet(registered("w0"), registered("w1"), heard_at_s=10.0)
    folded.on_heartbeat("w1", "w1-1", 10.0 + SILENT_S - 0.1)  # then no heartbeat comes any more
    assert silences(folded) == ["", ""]
    folded.on_heartbeat("w1", "w1-1", 100.0)
    assert silences(folded) == ["silent for 5 s or longer", ""]
    folded.on_log_connection(connected=False, now_s=101.0)
    assert silences(folded) == ["", ""]
