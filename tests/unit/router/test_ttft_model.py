"""What the models of latency say before, while and after they learn."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.ids import WorkerRank
from kv_protocol.splitmix import choice_index, unit_interval
from tests.reference.forecasts import FEATURE_MAX, SECONDS_MAX, TTFT, VARIANCE_MAX, VARIANCE_MIN, LatencyModel

A0, A1, B0 = WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0)
Coefficients = tuple[float, ...]
LAWS = [(0.05, 80e-6, 60e-6, 1e-4), (0.002, 1e-6, 2e-6, 1e-5), (0.3, 1e-4, 0.0, 5e-3)]
ASKED = (1000.0, 2000.0, 10.0)


def features(seed: int, number: int) -> tuple[float, ...]:
    """Return uncached tokens, queued tokens and running requests of one request."""
    draws = [choice_index(seed, limit, 3 * number + at) for at, limit in enumerate((8192, 20_000, 128))]
    return tuple(float(each) for each in draws)


def by_law(law: Coefficients, of: tuple[float, ...]) -> float:
    return law[0] + sum(each * feature for each, feature in zip(law[1:], of, strict=True))


def taught(law: Coefficients, *, times: int = 1500, noise: float = 0.0) -> LatencyModel:
    model = LatencyModel(TTFT)
    teach(model, law, seed=1, times=times, noise=noise)
    return model


def teach(model: LatencyModel, law: Coefficients, *, seed: int, times: int, noise: float = 0.0) -> None:
    for number in range(times):
        of = features(seed, number)
        stray = 1.0 + noise * (2.0 * unit_interval(seed, number) - 1.0)
        model.learn(A0, of, by_law(law, of) * stray)


def worst_error(model: LatencyModel, law: Coefficients) -> float:
    asked = [features(99, number) for number in range(50)]
    return max(abs(model.predict(A0, of) / by_law(law, of) - 1.0) for of in asked)


@pytest.mark.parametrize("law", LAWS)
def test_a_linear_law_is_found_through_noise(law: Coefficients) -> None:
    assert worst_error(taught(law, times=3000, noise=0.2), law) < 0.15


def test_what_was_once_true_is_forgotten() -> None:
    model = taught(LAWS[0])
    slower = tuple(3.0 * each for each in LAWS[0])
    teach(model, slower, seed=2, times=1500)
    assert worst_error(model, slower) < 0.01


def test_features_that_never_vary_do_not_hinder_learning() -> None:
    model = LatencyModel(TTFT)
    for number in range(20_000):
        model.learn(A0, (float(choice_index(1, 8192, number)), 0.0, 0.0), 0.04 if number < 19_000 else 0.08)
    assert model.predict(A0, (1000.0, 0.0, 0.0)) == pytest.approx(0.08, rel=0.02)


def test_one_stray_measurement_moves_little_and_a_greater_one_no_more() -> None:
    moved = []
    for stray_s in (5.0, SECONDS_MAX):
        model = taught(LAWS[0])
        before = model.predict(A0, ASKED)
        model.learn(A0, ASKED, stray_s)
        moved.append(model.predict(A0, ASKED) / before)
    assert moved[0] == moved[1] < 1.2


amounts = st.floats(0.0, FEATURE_MAX)
Measurements = list[tuple[float, float, float, float]]


@given(
    st.lists(st.tuples(amounts, amounts, amounts, st.floats(1e-6, SECONDS_MAX)), max_size=60),
    st.tuples(amounts, amounts, amounts),
)
def test_whatever_was_measured_a_prediction_is_a_number_and_never_negative_and_variances_stay_bounded(
    told: Measurements, asked: tuple[float, float, float]
) -> None:
    model = LatencyModel(TTFT)
    for *of, seconds in told * 5:
        model.learn(A0, tuple(of), seconds)
    assert 0.0 <= model.predict(A0, asked) < math.inf
    for fit in model.fits.values():
        for at, prior in enumerate(model.variances):
            assert 0.99 * VARIANCE_MIN * prior <= fit.covariance[at][at] <= 1.01 * VARIANCE_MAX * prior
