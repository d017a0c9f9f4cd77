"""Fixtures that watch or replace the denoiser of a ``DiffusionBlocks``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from lightning_blocktrain.models import DiffusionBlocks


class Call(NamedTuple):
    """What one run of a block was given, beside the bytes that were embedded last."""

    block_idx: int
    inputs: Tensor
    hidden: Tensor
    z: Tensor | None
    sigma: Tensor
    shown: Tensor | None


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[DiffusionBlocks], list[Call]]:
    """Return a function that lists every further run of a model's blocks."""

    def start(model: DiffusionBlocks) -> list[Call]:
        calls: list[Call] = []
        embedded: list[Tensor] = []
        embed_bytes, run_noisy = model.embed_bytes, model.run_noisy

        def recorded_bytes(inputs: Tensor) -> Tensor:
            embedded.append(inputs.clone())
            return embed_bytes(inputs)

        def recorded(
            block_idx: int, hidden: Tensor, z: Tensor | None, sigma: Tensor, shown: Any = None, caches: Any = None
        ) -> Any:
            seen = None if z is None else z.detach().clone()
            calls.append(Call(block_idx, embedded[-1], hidden.detach().clone(), seen, sigma.clone(), shown))
            return run_noisy(block_idx, hidden, z, sigma, shown, caches)

        monkeypatch.setattr(model, "embed_bytes", recorded_bytes)
        monkeypatch.setattr(model, "run_noisy", recorded)
        return calls

    return start


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[[DiffusionBlocks, Callable[[Tensor], Tensor]], None]:
    """Return a function that makes every block of a model certain of ``next_byte(inputs)``, whatever z is."""

    def install(model: DiffusionBlocks, next_byte: Callable[[Tensor], Tensor]) -> None:
        def certain(inputs: Tensor) -> Tensor:
            return 1e4 * nn.functional.one_hot(next_byte(inputs), 256).float()

        monkeypatch.setattr(model, "embed_bytes", certain)
        monkeypatch.setattr(model, "run_noisy", lambda block_idx, hidden, *_: (hidden, hidden))
        monkeypatch.setattr(model, "readout", nn.Identity())
        monkeypatch.setattr(model, "new_caches", lambda num_blocks: [])  # no layer runs that would fill them

    return install
