"""EDM's noise mathematics: coefficients, sampling inside a band, and the sampler's Euler step.

The only owner of these formulas. Knows nothing of blocks, models or training.

Source: Karras et al. 2022 (arXiv 2206.00364), Table 1, with ``sigma_data`` for byte embeddings as in
DiffusionBlocks (arXiv 2506.14202).
"""

from typing import NamedTuple

import torch
from torch import Tensor

SIGMA_DATA = 0.5


class Coefficients(NamedTuple):
    """The preconditioning of one noise level; every field has the shape of ``sigma``."""

    c_skip: Tensor
    c_out: Tensor
    c_in: Tensor
    c_noise: Tensor


def coefficients(sigma: Tensor, sigma_data: float = SIGMA_DATA) -> Coefficients:
    """Return EDM's ``c_skip``, ``c_out``, ``c_in`` and ``c_noise``.

    Args:
        sigma: Noise levels > 0, any shape.
        sigma_data: Standard deviation that the data is taken to have.
    """
    total = sigma**2 + sigma_data**2
    return Coefficients(
        c_skip=sigma_data**2 / total,
        c_out=sigma * sigma_data / total.sqrt(),
        c_in=1 / total.sqrt(),
        c_noise=sigma.log() / 4,
    )


def weight(sigma: Tensor, sigma_data: float = SIGMA_DATA) -> Tensor:
    """Return EDM's loss weight ``(sigma^2 + sigma_data^2) / (sigma * sigma_data)^2``, shape of ``sigma``."""
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


def log_normal_cdf(sigma: Tensor, p_mean: float, p_std: float) -> Tensor:
    """Return P(noise level <= sigma) for ``ln sigma ~ N(p_mean, p_std)``."""
    probability: Tensor = torch.special.ndtr((sigma.log() - p_mean) / p_std)
    return probability


def log_normal_icdf(probability: Tensor, p_mean: float, p_std: float) -> Tensor:
    """Return the noise level below which ``probability`` of ``ln sigma ~ N(p_mean, p_std)`` lies."""
    log_sigma: Tensor = p_mean + p_std * torch.special.ndtri(probability)
    return log_sigma.exp()


def sample_sigma(uniform: Tensor, low: float, high: float, p_mean: float, p_std: float) -> Tensor:
    """Map uniform draws to noise levels of the log-normal, restricted to ``[low, high]``.

    Args:
        uniform: Draws in [0, 1), any shape.
        low: Lower end of the band, > 0.
        high: Upper end of the band, > low.
        p_mean: Mean of ``ln sigma``.
        p_std: Standard deviation of ``ln sigma``.

    Returns:
        Noise levels in ``uniform``'s dtype and shape, increasing with ``uniform``.
    """
    # The normal's tail needs float64: at sigma = 80 the upper probability is 1e-6 below 1.
    bounds = torch.tensor([low, high], dtype=torch.float64, device=uniform.device)
    below, above = log_normal_cdf(bounds, p_mean, p_std)
    sigma = log_normal_icdf(below + uniform.double() * (above - below), p_mean, p_std)
    return sigma.clamp(low, high).to(uniform.dtype)


def euler_step(z: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """Move ``z`` from noise level ``sigma`` to ``sigma_next`` along the probability-flow ODE.

    A perfect denoiser (``denoised == y``) takes ``y + sigma * eps`` to ``y + sigma_next * eps``.

    Source: BlockTrain's printed update adds noise instead of removing it; this is the released code's sign.
    """
    ratio = sigma_next / sigma
    return ratio * z + (1 - ratio) * denoised
