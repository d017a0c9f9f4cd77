"""Fixtures that watch or replace the denoiser of a ``DiffusionBlocks``."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from lightning_blocktrain.models import DiffusionBlocks

Call = tuple[int, Tensor, Tensor, Tensor]
"""The arguments of one call of ``denoise``: block_idx, inputs, z, sigma."""


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[DiffusionBlocks], list[Call]]:
    """Return a function that lists every further call of a model's ``denoise``."""

    def start(model: DiffusionBlocks) -> list[Call]:
        calls: list[Call] = []
        denoise = model.denoise

        def recorded(block_idx: int, inputs: Tensor, z: Tensor, sigma: Tensor) -> Tensor:
            calls.append((block_idx, inputs.clone(), z.detach().clone(), sigma.clone()))
            return denoise(block_idx, inputs, z, sigma)

        monkeypatch.setattr(model, "denoise", recorded)
        return calls

    return start


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[[DiffusionBlocks, Callable[[Tensor], Tensor]], None]:
    """Return a function that makes a model certain of ``next_byte(inputs)``, whatever z is."""

    def install(model: DiffusionBlocks, next_byte: Callable[[Tensor], Tensor]) -> None:
        def denoise(block_idx: int, inputs: Tensor, z: Tensor, sigma: Tensor) -> Tensor:
            return 1e4 * nn.functional.one_hot(next_byte(inputs), 256).float()

        monkeypatch.setattr(model, "denoise", denoise)

    return install
