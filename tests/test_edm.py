import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from lightning_blocktrain.edm import (
    coefficients,
    euler_step,
    log_normal_cdf,
    log_normal_icdf,
    sample_sigma,
    weight,
)

P_MEAN, P_STD = -1.2, 1.2
BANDS = [(1.0, 10.0), (0.002, 80.0), (1.3436, 2.0711), (0.002, 0.1796), (0.5050, 80.0)]


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def truncated_cdf(sigma: Tensor, low: float, high: float) -> Tensor:
    """The analytic CDF of the band, from scipy: an implementation that shares no code with ours."""
    below, above = (stats.norm.cdf((math.log(s) - P_MEAN) / P_STD) for s in (low, high))
    at = torch.from_numpy(stats.norm.cdf((sigma.double().log().numpy() - P_MEAN) / P_STD))
    probability: Tensor = (at - below) / (above - below)
    return probability


def test_coefficients_at_sigma_one_have_the_papers_values() -> None:
    c = coefficients(float64(1.0))
    assert [round(float(value), 4) for value in c[:3]] == [0.2, 0.4472, 0.8944]
    assert float(c.c_noise) == 0


@pytest.mark.parametrize("sigma_data", [0.5, 1.0, 2.0])
def test_coefficients_over_a_grid_equal_the_closed_form(sigma_data: float) -> None:
    sigmas = torch.logspace(-3, 2, 11, dtype=torch.float64)
    c = coefficients(sigmas, sigma_data)
    for idx, s in enumerate(sigmas.tolist()):
        total = s * s + sigma_data * sigma_data
        expected = (
            sigma_data**2 / total,
            s * sigma_data / math.sqrt(total),
            1 / math.sqrt(total),
            math.log(s) / 4,
        )
        assert [float(field[idx]) for field in c] == pytest.approx(expected, rel=1e-12)


def test_coefficients_keep_shape_and_dtype() -> None:
    for field in coefficients(torch.rand(3, 1, 1) + 0.1):
        assert field.shape == (3, 1, 1)
        assert field.dtype == torch.float32


@pytest.mark.parametrize(("sigma", "expected", "places"), [(1.0, 5.00, 2), (10.0, 4.01, 2), (0.1, 104.0, 0)])
def test_weight_has_the_papers_check_values(sigma: float, expected: float, places: int) -> None:
    assert round(float(weight(float64(sigma))), places) == expected


def test_weight_times_squared_c_out_is_one() -> None:
    # EDM chooses the weight so that every noise level counts alike after c_out.
    sigmas = torch.logspace(-3, 2, 11, dtype=torch.float64)
    torch.testing.assert_close(weight(sigmas) * coefficients(sigmas).c_out ** 2, torch.ones_like(sigmas))


def test_euler_step_perfect_denoiser_lands_on_the_next_noise_level() -> None:
    y, eps = torch.randn(2, 4, 5, dtype=torch.float64).unbind(0)
    z = y + 10.0 * eps
    for sigma, sigma_next in [(10.0, 1.623), (1.623, 1.0), (1.0, 0.002)]:
        z = euler_step(z, y, sigma, sigma_next)
        torch.testing.assert_close(z, y + sigma_next * eps, rtol=0, atol=1e-13)


def test_euler_step_to_the_same_level_changes_nothing() -> None:
    z = torch.randn(4, 5)
    assert torch.equal(euler_step(z, torch.randn(4, 5), 2.0, 2.0), z)


@pytest.mark.parametrize(("low", "high"), BANDS)
def test_sample_sigma_is_the_inverse_of_the_analytic_cdf(low: float, high: float) -> None:
    uniform = torch.linspace(0, 1, 101, dtype=torch.float64)
    sigma = sample_sigma(uniform, low, high, P_MEAN, P_STD)
    assert sigma.diff().min() > 0
    assert float(sigma[0]) == pytest.approx(low, rel=1e-9)
    # At sigma = 80 one unit in the last place of the probability moves sigma by 1e-10 of itself.
    assert float(sigma[-1]) == pytest.approx(high, rel=1e-8)
    torch.testing.assert_close(truncated_cdf(sigma, low, high), uniform, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("low", "high"), BANDS)
def test_sample_sigma_random_draws_follow_the_band(low: float, high: float) -> None:
    uniform = torch.rand(20_000)
    sigma = sample_sigma(uniform, low, high, P_MEAN, P_STD)
    assert sigma.dtype == torch.float32
    assert sigma.min() >= torch.tensor(low)
    assert sigma.max() <= torch.tensor(high)
    # The seed is fixed; a correct sampler exceeds this Kolmogorov distance once in 1,000 seeds.
    distance = stats.kstest(truncated_cdf(sigma, low, high).numpy(), "uniform").statistic
    assert distance < 1.95 / math.sqrt(20_000)


def test_sample_sigma_largest_float32_uniform_stays_inside() -> None:
    largest = torch.tensor([1 - 2**-24])
    sigma = sample_sigma(largest, 0.002, 80.0, P_MEAN, P_STD)
    assert torch.isfinite(sigma).all()
    assert 1 < float(sigma) <= 80.0


def test_log_normal_icdf_inverts_the_cdf() -> None:
    sigmas = torch.logspace(-2.5, 1.5, 21, dtype=torch.float64)
    back = log_normal_icdf(log_normal_cdf(sigmas, P_MEAN, P_STD), P_MEAN, P_STD)
    torch.testing.assert_close(back, sigmas, rtol=1e-8, atol=0)


def test_log_normal_cdf_at_the_median_is_one_half() -> None:
    assert float(log_normal_cdf(float64(math.exp(P_MEAN)), P_MEAN, P_STD)) == 0.5
