"""What the models say before, while and after they learn."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.ids import WorkerRank
from kv_protocol.splitmix import choice_index, unit_interval
from router.fleet.ttft_model import (
    FEATURE_MAX,
    ITL,
    SECONDS_MAX,
    TTFT,
    ItlModel,
    LatencyModel,
    TtftModel,
    prior_variances,
)

A0, A1, B0 = WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0)
Coefficients = tuple[float, ...]
LAWS = [(0.05, 80e-6, 60e-6, 1e-4), (0.002, 1e-6, 2e-6, 1e-5), (0.3, 1e-4, 0.0, 5e-3)]


def features(seed: int, number: int) -> tuple[float, ...]:
    """Return uncached tokens, queued tokens and running requests of one request."""
    draws = [choice_index(seed, limit, 3 * number + at) for at, limit in enumerate((8192, 20_000, 128))]
    return tuple(float(each) for each in draws)


def by_law(law: Coefficients, of: tuple[float, ...]) -> float:
    return law[0] + sum(each * feature for each, feature in zip(law[1:], of, strict=True))


def predicted(model: LatencyModel, of: tuple[float, ...], rank: WorkerRank = A0) -> float:
    return float(model.predict_columns((rank,), of)[0])


def taught(law: Coefficients, *, seed: int = 1, times: int = 1500, noise: float = 0.0) -> TtftModel:
    model = TtftModel()
    teach(model, law, seed=seed, times=times, noise=noise)
    return model


def teach(model: TtftModel, law: Coefficients, *, seed: int, times: int, noise: float = 0.0) -> None:
    for number in range(times):
        of = features(seed, number)
        stray = 1.0 + noise * (2.0 * unit_interval(seed, number) - 1.0)
        model.learn(A0, of, by_law(law, of) * stray)


def worst_error(model: TtftModel, law: Coefficients) -> float:
    asked = [features(99, number) for number in range(50)]
    return max(abs(predicted(model, of) / by_law(law, of) - 1.0) for of in asked)


def test_of_a_rank_that_has_served_nothing_the_prior_speaks() -> None:
    asked = (1000.0, 2000.0, 10.0)
    assert predicted(TtftModel(), asked) == pytest.approx(by_law(TTFT.coefficients, asked))
    assert predicted(ItlModel(), (32.0, 1024.0)) == pytest.approx(by_law(ITL.coefficients, (32.0, 1024.0)))


@pytest.mark.parametrize("law", LAWS)
def test_a_linear_law_is_found(law: Coefficients) -> None:
    assert worst_error(taught(law), law) < 0.01


@pytest.mark.parametrize("law", LAWS)
def test_a_linear_law_is_found_through_noise(law: Coefficients) -> None:
    assert worst_error(taught(law, times=3000, noise=0.2), law) < 0.15


def test_what_was_once_true_is_forgotten() -> None:
    model = taught(LAWS[0])
    slower = tuple(3.0 * each for each in LAWS[0])
    teach(model, slower, seed=2, times=1500)
    assert worst_error(model, slower) < 0.01


def test_features_that_never_vary_do_not_hinder_learning() -> None:
    model = TtftModel()
    for number in range(20_000):
        model.learn(A0, (float(choice_index(1, 8192, number)), 0.0, 0.0), 0.04 if number < 19_000 else 0.08)
    assert predicted(model, (1000.0, 0.0, 0.0)) == pytest.approx(0.08, rel=0.02)


def test_one_stray_measurement_moves_little_and_a_greater_one_no_more() -> None:
    asked, moved = (1000.0, 2000.0, 10.0), []
    for stray_s in (5.0, SECONDS_MAX):
        model = taught(LAWS[0])
        before = predicted(model, asked)
        model.learn(A0, asked, stray_s)
        moved.append(predicted(model, asked) / before)
    assert moved[0] == moved[1] < 1.2


def test_every_rank_learns_by_itself() -> None:
    model, asked = taught(LAWS[0]), (1000.0, 2000.0, 10.0)
    alone, others = taught(LAWS[0]), predicted(TtftModel(), asked)
    model.learn(B0, asked, 0.5)
    assert predicted(model, asked) == predicted(alone, asked)
    assert predicted(model, asked, A1) == others != predicted(model, asked, B0)


def test_a_worker_that_is_forgotten_is_predicted_by_the_prior() -> None:
    model, asked = taught(LAWS[0], times=10), (1000.0, 2000.0, 10.0)
    model.learn(B0, asked, 0.5)
    before = predicted(model, asked, B0)
    model.forget("a")
    assert predicted(model, asked) == predicted(TtftModel(), asked)
    assert predicted(model, asked, B0) == before


def test_columns_are_what_each_rank_is_predicted_with_its_own_features() -> None:
    model = taught(LAWS[0], times=20)
    queued = np.array([100, 200, 300], dtype=np.int64)
    told = model.predict_columns((A0, B0, A0), (1000.0, queued, np.array([1.0, 2.0, 3.0])))
    assert told.tolist() == [
        predicted(model, (1000.0, float(tokens), running), rank)
        for rank, tokens, running in zip((A0, B0, A0), queued, (1.0, 2.0, 3.0), strict=True)
    ]


@pytest.mark.parametrize(
    ("of", "seconds"),
    [
        ((1.0, 1.0, 1.0), 0.0),
        ((1.0, 1.0, 1.0), -1.0),
        ((1.0, 1.0, 1.0), math.nan),
        ((1.0, 1.0, 1.0), math.inf),
        ((1.0, 1.0, 1.0), 2 * SECONDS_MAX),
        ((-1.0, 1.0, 1.0), 0.1),
        ((1.0, math.nan, 1.0), 0.1),
        ((1.0, 1.0, 2 * FEATURE_MAX), 0.1),
        ((1.0, 1.0), 0.1),
    ],
)
def test_what_cannot_be_is_counted_and_not_learnt(of: tuple[float, ...], seconds: float) -> None:
    model = TtftModel()
    model.learn(A0, of, seconds)
    assert model.refused_total == 1
    assert predicted(model, (1.0, 1.0, 1.0)) == predicted(TtftModel(), (1.0, 1.0, 1.0))


amounts = st.floats(0.0, FEATURE_MAX)
measurements = st.lists(st.tuples(amounts, amounts, amounts, st.floats(1e-6, SECONDS_MAX)), max_size=60)
Measurements = list[tuple[float, float, float, float]]


def folded(told: Measurements, *, times: int = 1) -> TtftModel:
    model = TtftModel()
    for *of, seconds in told * times:
        model.learn(A0, tuple(of), seconds)
    return model


@given(measurements, st.tuples(amounts, amounts, amounts))
@settings(deadline=None)
def test_whatever_was_measured_a_prediction_is_a_number_and_never_negative(
    told: Measurements, asked: tuple[float, float, float]
) -> None:
    seconds = predicted(folded(told, times=5), asked)
    assert math.isfinite(seconds)
    assert seconds >= 0.0


@given(measurements)
@settings(deadline=None)
def test_the_same_measurements_give_the_same_bits(told: Measurements) -> None:
    asked = (1000.0, 2000.0, 10.0)
    assert predicted(folded(told), asked).hex() == predicted(folded(told), asked).hex()


@given(measurements)
@settings(deadline=None)
def test_the_covariance_stays_bounded_and_is_one(told: Measurements) -> None:
    model = folded(told, times=5)
    bounds = np.array(prior_variances(TTFT))
    for row in model.rows():
        covariance = np.array(row.covariance)
        assert np.isfinite(covariance).all()
        assert (covariance.diagonal() <= 1.01e4 * bounds).all()
        assert (covariance.diagonal() >= 0.99e-6 * bounds).all()
        scaled = covariance / np.sqrt(np.outer(bounds, bounds))
        assert np.allclose(scaled, scaled.T, rtol=1e-6)
