"""Evaluation of DiffusionBlocks by whole sweeps: what the assembled model is worth, beside what its blocks report.

Owns the quantities of ``SweepReport`` and how they are averaged. Owns no model mathematics: a sweep is the model's.
Every purpose (local noise, starting noise, ablations, leak) has random numbers of its own, derived from one seed;
the global random stream is neither read nor changed.

Shapes: ``B`` sequences, ``T`` bytes per window, ``D`` width, ``K`` draws of the starting noise.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_blocktrain.callbacks.rounds import ReportsRounds
from lightning_blocktrain.edm import sample_sigma
from lightning_blocktrain.errors import explain
from lightning_blocktrain.metrics import bits_per_token
from lightning_blocktrain.models.base import Batch
from lightning_blocktrain.models.diffusion_blocks import P_MEAN, P_STD, DiffusionBlocks, Intervention
from lightning_blocktrain.models.transformer import UNKNOWN

START, LOCAL, FRESH, SCRAMBLE, LEAK = range(5)
"""Purposes of random numbers; each is a stream of its own."""

MAX_POSITIONS = 2**14
"""Draws of a batch run together as long as their positions (K * B * T) stay below this; it bounds memory only."""


Forward = Callable[[Tensor, Tensor], Tensor]
"""Inputs (B, T) and starting noise (B, T, D) to logits (B, T, V)."""


@dataclass(frozen=True)
class SweepReport:
    """What whole sweeps and single blocks pay for held-out bytes, in nats per byte unless said otherwise.

    The context is teacher-forced. ``_k1`` is the mean over the draws of what one sweep pays, ``_k`` the price under
    the mean probability of all ``num_draws`` draws; both use the same starting noise.

    Args:
        num_bytes: Target bytes evaluated.
        num_draws: K.
        local_ce: Per block: cross entropy at noise from its own band, not widened. ``z`` contains the target, so it
            compares with nothing.
        sweep_ce_k1: One sweep from pure noise: a code length, comparable with a causal model's.
        sweep_ce_k: The same with K draws.
        prior_ce_k1: Block 0 alone at the highest noise, where ``z`` carries nothing.
        prior_ce_k: The same with K draws.
        composition_gain: ``prior_ce_k - sweep_ce_k``: what the blocks after the first add; about 0 means nothing.
        z_noise_ce: K draws, what enters the blocks after the first replaced by fresh noise of the right level.
        z_zero_ce: The same, replaced by zeros.
        no_z_ce: One walk without ``z``; what a model pays that was trained for that too (``p_drop_z``).
        context_scrambled_ce: K draws, the inputs permuted within their window.
        span_ce: One sweep that does not know the inputs of the second half, scored on that half.
        leak_accuracy: Accuracy in [0, 1] of reading the target straight off ``z`` at the lowest noise.
    """

    num_bytes: int
    num_draws: int
    local_ce: tuple[float, ...]
    sweep_ce_k1: float
    sweep_ce_k: float
    prior_ce_k1: float
    prior_ce_k: float
    composition_gain: float
    z_noise_ce: float
    z_zero_ce: float
    no_z_ce: float
    context_scrambled_ce: float
    span_ce: float
    leak_accuracy: float

    @property
    def bits_per_byte_k1(self) -> float:
        """``sweep_ce_k1`` in bits per byte."""
        return bits_per_token(self.sweep_ce_k1, 1)

    @property
    def bits_per_byte_k(self) -> float:
        """``sweep_ce_k`` in bits per byte."""
        return bits_per_token(self.sweep_ce_k, 1)

    def metrics(self, stage: str) -> dict[str, float]:
        """Return the values by metric key, ``stage`` (``val`` or ``test``) in front."""
        named = {
            **{f"local_ce/block{b}": value for b, value in enumerate(self.local_ce)},
            "sweep_ce_k1": self.sweep_ce_k1,
            f"sweep_ce_k{self.num_draws}": self.sweep_ce_k,
            "sweep_bits_per_byte": self.bits_per_byte_k,
            "prior_ce_k1": self.prior_ce_k1,
            "prior_ce": self.prior_ce_k,
            "composition_gain": self.composition_gain,
            "leak_accuracy": self.leak_accuracy,
            "span_ce": self.span_ce,
            "ablation/z_noise_ce": self.z_noise_ce,
            "ablation/z_zero_ce": self.z_zero_ce,
            "ablation/no_z_ce": self.no_z_ce,
            "ablation/context_scrambled_ce": self.context_scrambled_ce,
        }
        return {f"{stage}/{name}": value for name, value in named.items()}


@dataclass
class _Sums:
    """Summed values by name and what they were summed over; float64."""

    totals: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, values: Tensor) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + float(values.double().sum())
        self.counts[name] = self.counts.get(name, 0) + values.numel()

    def mean(self, name: str) -> float:
        return self.totals[name] / self.counts[name]


@torch.no_grad()
def evaluate_sweep(
    model: DiffusionBlocks, batches: Iterable[Batch], *, num_draws: int = 16, seed: int = 0
) -> SweepReport:
    """Evaluate sweeps and single blocks on held-out batches; the model's modes and the random stream stay.

    Args:
        model: On any device; evaluated in eval mode.
        batches: Inputs and targets, both int64 (B, T); at least one batch.
        num_draws: K, at least 1; the whole costs about ``3 K`` sweeps.
        seed: Of every random number drawn here, at least 0.

    Raises:
        ValueError: If an argument is out of range or there is no batch.
    """
    if num_draws < 1 or seed < 0:
        rule = "num_draws must be at least 1 and seed at least 0"
        raise ValueError(explain(rule, f"num_draws={num_draws}, seed={seed}", "the usual values are 16 and 0"))
    sums = _Sums()
    with _evaluation_mode(model):
        for batch_idx, (inputs, targets) in enumerate(batches):
            batch = (inputs.to(model.device), targets.to(model.device))
            _add_blocks(sums, model, batch, (seed, batch_idx))
            _add_sweeps(sums, model, batch, num_draws, (seed, batch_idx))
    if not sums.counts:
        raise ValueError(explain("batches must hold at least one batch", "none", "pass a longer split"))
    means = {name: sums.mean(name) for name in sums.totals}
    local_ce = tuple(means.pop(f"local_ce{b}") for b in range(model.num_blocks))
    gain = means["prior_ce_k"] - means["sweep_ce_k"]
    return SweepReport(
        num_bytes=sums.counts["sweep_ce_k"], num_draws=num_draws, local_ce=local_ce, composition_gain=gain, **means
    )


def _add_blocks(sums: _Sums, model: DiffusionBlocks, batch: Batch, key: tuple[int, ...]) -> None:
    """Add what needs no sweep: each block's local cross entropy, and the leak."""
    inputs, targets = batch
    y = model.target_table[targets]  # (B, T, D)
    for block_idx in range(model.num_blocks):
        high, low = model.block_sigma_edges[block_idx : block_idx + 2]
        generator = _generator(*key, LOCAL, block_idx)
        uniform = torch.rand(len(inputs), generator=generator)
        sigma = sample_sigma(uniform, low, high, P_MEAN, P_STD).to(y)
        eps = _normal_like(y, generator)
        hidden = model.features(block_idx, inputs, y, eps)
        logits = model.denoise(block_idx, hidden, y + sigma[:, None, None] * eps, sigma)
        sums.add(f"local_ce{block_idx}", -_target_log_p(logits, targets))
    z = y + model.block_sigma_edges[-1] * _normal_like(y, _generator(*key, LEAK))
    sums.add("leak_accuracy", (z @ model.target_table.T).argmax(-1) == targets)


def _add_sweeps(sums: _Sums, model: DiffusionBlocks, batch: Batch, num_draws: int, key: tuple[int, ...]) -> None:
    """Add the sweeps, the prior and the ablations, all from the same starting noise."""
    inputs, targets = batch
    order = torch.rand(inputs.shape, generator=_generator(*key, SCRAMBLE)).argsort(1).to(inputs.device)
    # One stream per block, so that the draws may run together or apart.
    fresh = [_generator(*key, FRESH, block_idx) for block_idx in range(model.num_blocks)]

    def prior(inputs: Tensor, noise: Tensor) -> Tensor:
        return model.sweep(inputs, noise, num_blocks=1)

    def blind(z_of: Intervention) -> Forward:
        def intervene(block_idx: int, z: Tensor) -> Tensor:
            return z if block_idx == 0 else z_of(block_idx, z)

        return lambda inputs, noise: model.sweep(inputs, noise, intervene=intervene)

    def log_p(forward: Forward, context: Tensor) -> Tensor:
        return _log_p_of_draws(model, forward, context, targets, num_draws, key)

    for name, draws in (("sweep_ce", log_p(model.sweep, inputs)), ("prior_ce", log_p(prior, inputs))):
        sums.add(f"{name}_k1", -draws)
        sums.add(f"{name}_k", mixture_nats(draws))
    noise = blind(lambda block_idx, z: model.sweep_sigmas[block_idx] * _normal_like(z, fresh[block_idx]))
    sums.add("z_noise_ce", mixture_nats(log_p(noise, inputs)))
    sums.add("z_zero_ce", mixture_nats(log_p(blind(lambda _, z: torch.zeros_like(z)), inputs)))
    sums.add("no_z_ce", -_target_log_p(model.sweep(inputs, None), targets))
    sums.add("context_scrambled_ce", mixture_nats(log_p(model.sweep, inputs.gather(1, order))))
    half = inputs.shape[1] // 2
    span = inputs.clone()
    span[:, half:] = UNKNOWN
    sums.add("span_ce", -_log_p_of_draws(model, model.sweep, span, targets, 1, key)[..., half:])


def mixture_nats(log_p: Tensor) -> Tensor:
    """Return ``-log mean_k p_k``; log probabilities (K, ...) to nats (...)."""
    return math.log(len(log_p)) - log_p.logsumexp(0)


def _log_p_of_draws(
    model: DiffusionBlocks,
    forward: Forward,
    inputs: Tensor,
    targets: Tensor,
    num_draws: int,
    key: tuple[int, ...],
) -> Tensor:
    """Return the log probability that ``forward`` gives each target byte under each draw, float64 (K, B, T).

    The draws are stacked into the batch dimension, as many at a time as ``MAX_POSITIONS`` allows.
    """
    per_pass = max(1, MAX_POSITIONS // inputs.numel())
    parts = []
    for first in range(0, num_draws, per_pass):
        draws = range(first, min(first + per_pass, num_draws))
        noise = torch.cat([model.draw_noise(inputs.shape, _generator(*key, START, draw)) for draw in draws])
        stacked = inputs.repeat(len(draws), 1)  # (draws * B, T)
        log_p = _target_log_p(forward(stacked, noise), targets.repeat(len(draws), 1))
        parts.append(log_p.view(len(draws), *targets.shape))
    return torch.cat(parts)


def _target_log_p(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log probability of each target; (B, T, V) and (B, T) to float64 (B, T)."""
    return -F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).double()


def _seed_of(*key: int) -> int:
    """Return a seed below 2^63 that no other key shares in practice."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


def _generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(_seed_of(*key))


def _normal_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard normal noise, drawn on the CPU so that every device sees the same."""
    return torch.randn(tensor.shape, generator=generator).to(tensor)


@contextmanager
def _evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put every submodule into eval mode, and back into its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


class SweepEvaluation(L.Callback):
    """Log the sweep evaluation of ``DiffusionBlocks`` at the end of validation and of testing.

    It evaluates the first ``max_batches`` batches that the loop itself has seen, always with the same seed, so that
    two validations of the same data differ by the model alone. The sanity check is passed over.

    Args:
        num_draws: K, at least 1.
        every_n_validations: Evaluate every n-th validation, at least 1; testing is always evaluated.
        max_batches: Batches to evaluate, at least 1; None: all of them, kept in memory meanwhile.
        seed: Of the evaluation's random numbers, at least 0.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self, num_draws: int = 16, every_n_validations: int = 1, max_batches: int | None = 8, seed: int = 0
    ) -> None:
        at_least_1 = {"num_draws": num_draws, "every_n_validations": every_n_validations, "max_batches": max_batches}
        for name, value in at_least_1.items():
            if value is not None and value < 1:
                raise ValueError(explain(f"{name} must be at least 1", f"{name}={value}", "use 1 or more"))
        if seed < 0:
            raise ValueError(explain("seed must be at least 0", f"seed={seed}", "use 0 or more"))
        self.num_draws = num_draws
        self.every_n_validations = every_n_validations
        self.max_batches = max_batches
        self.seed = seed
        self.report: SweepReport | None = None
        self._num_validations = 0
        self._batches: list[Batch] = []

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a module without sweeps, count validations anew and forget the batches of an interrupted loop."""
        if not isinstance(pl_module, DiffusionBlocks):
            rule = "SweepEvaluation needs a DiffusionBlocks module"
            got = f"module={type(pl_module).__name__}"
            raise MisconfigurationException(explain(rule, got, "leave the callback out"))
        self._num_validations = 0
        self._batches = []

    @override
    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the batch if it is one of those to evaluate."""
        if not trainer.sanity_checking and (self._num_validations + 1) % self.every_n_validations == 0:
            self._keep(batch)

    @override
    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the batch if it is one of those to evaluate."""
        self._keep(batch)

    @override
    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate and log under ``val/``, if it is this validation's turn."""
        if not trainer.sanity_checking:
            self._num_validations += 1
            self._log(trainer, pl_module, "val")

    @override
    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate and log under ``test/``."""
        self._log(trainer, pl_module, "test")

    def _keep(self, batch: Batch) -> None:
        if self.max_batches is None or len(self._batches) < self.max_batches:
            self._batches.append(batch)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Literal["val", "test"]) -> None:
        batches, self._batches = self._batches, []
        if not batches:
            return
        assert isinstance(pl_module, DiffusionBlocks)
        self.report = evaluate_sweep(pl_module, batches, num_draws=self.num_draws, seed=self.seed)
        # Every rank evaluates its own shard; workers that train in rounds are evaluated in one place.
        several = trainer.world_size > 1 and not isinstance(trainer.strategy, ReportsRounds)
        for name, value in self.report.metrics(stage).items():
            exact = torch.tensor(value, dtype=torch.float64)
            pl_module.log(name, exact, on_step=False, on_epoch=True, sync_dist=several)
