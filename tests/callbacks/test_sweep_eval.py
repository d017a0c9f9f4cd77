"""Sweep evaluation against closed forms: stubbed denoisers, known mixtures, recorded noise."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_blocktrain.callbacks import SweepEvaluation, evaluate_sweep, sweep_eval
from lightning_blocktrain.callbacks.sweep_eval import mixture_nats
from lightning_blocktrain.models import ByteTransformer, DiffusionBlocks
from lightning_blocktrain.models.block_model import UNKNOWN
from lightning_blocktrain.models.diffusion_blocks import NoisyObjective

UNIFORM = math.log(256)
Batch = tuple[Tensor, Tensor]


def make_model(**options: Any) -> DiffusionBlocks:
    sizes = {"num_layers": 2, "num_blocks": 2, "width": 16, "num_heads": 2, "window_bytes": 12}
    torch.manual_seed(1)
    return DiffusionBlocks(**{**sizes, **options})


def opinionated(**options: Any) -> DiffusionBlocks:
    """A model whose logits depend on everything it is given: its readout does not start at zero."""
    model = make_model(**options)
    torch.nn.init.normal_(model.readout.unembed.weight, std=0.5)
    return model


def make_batches(*sizes: int, width: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    windows = [torch.randint(256, (size, width + 1), generator=generator) for size in sizes]
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def spy_on_blocks(
    model: DiffusionBlocks, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, Tensor | None, Tensor, Tensor]]:
    """List block, z, noise level and what is read beside z of every further run of a block."""
    calls: list[tuple[int, Tensor | None, Tensor, Tensor]] = []
    real = model.run_noisy

    def spy(block_idx: int, hidden: Tensor, z: Tensor | None, sigma: Tensor, *rest: Any) -> Any:
        calls.append((block_idx, None if z is None else z.clone(), sigma.clone(), hidden.clone()))
        return real(block_idx, hidden, z, sigma, *rest)

    monkeypatch.setattr(model, "run_noisy", spy)
    return calls


def stub_logits(model: DiffusionBlocks, monkeypatch: pytest.MonkeyPatch, logits_of: Callable[[Tensor], Tensor]) -> None:
    """Let every block answer with ``logits_of(inputs)``, whatever z is."""
    monkeypatch.setattr(model, "embed_bytes", logits_of)
    monkeypatch.setattr(model, "run_noisy", lambda block_idx, hidden, *_: (hidden, hidden))
    monkeypatch.setattr(model, "readout", torch.nn.Identity())


def test_report_of_untrained_model_is_uniform_everywhere() -> None:
    report = evaluate_sweep(make_model(), make_batches(3, 2), num_draws=2)
    values = (
        *report.local_ce,
        report.sweep_ce_k1,
        report.sweep_ce_k,
        report.prior_ce_k1,
        report.prior_ce_k,
        report.z_noise_ce,
        report.z_zero_ce,
        report.no_z_ce,
        report.context_scrambled_ce,
        report.span_ce,
    )
    assert values == pytest.approx([UNIFORM] * len(values), abs=1e-5)
    assert report.composition_gain == pytest.approx(0, abs=1e-6)
    assert report.num_bytes == 5 * 12


def test_report_of_stubbed_denoiser_is_cross_entropy_of_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = make_model(), make_batches(3, 1)
    logits = torch.randn(256, generator=torch.Generator().manual_seed(3))
    stub_logits(model, monkeypatch, lambda inputs: logits.expand(*inputs.shape, 256))
    # Batches of 3 and 1 windows: a mean of batch means would not give this.
    expected = float(-logits.log_softmax(0)[torch.cat([targets for _, targets in batches])].mean())
    report = evaluate_sweep(model, batches, num_draws=3)
    assert report.local_ce == pytest.approx((expected, expected), rel=1e-5)
    assert [report.sweep_ce_k1, report.sweep_ce_k] == pytest.approx([expected] * 2, rel=1e-5)
    assert [report.prior_ce_k1, report.z_noise_ce, report.no_z_ce] == pytest.approx([expected] * 3, rel=1e-5)
    assert report.bits_per_byte_k == pytest.approx(expected / math.log(2), rel=1e-5)


def test_mixture_of_two_draws_pays_log_of_mean_probability() -> None:
    log_p = torch.tensor([[0.5, 0.25], [0.1, 0.25]], dtype=torch.float64).log()
    assert mixture_nats(log_p).tolist() == pytest.approx([-math.log(0.3), -math.log(0.25)])


def test_one_draw_cost_equals_average_of_single_sweeps_from_shared_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ((inputs, targets),) = opinionated(), make_batches(3)
    drawn: list[Tensor] = []
    real = model.draw_noise

    def spy(shape: Sequence[int], generator: torch.Generator) -> Tensor:
        drawn.append(real(shape, generator))
        return drawn[-1]

    monkeypatch.setattr(model, "draw_noise", spy)
    report = evaluate_sweep(model, [(inputs, targets)], num_draws=4)
    noises = drawn[:4]

    def cost(noise: Tensor, num_blocks: int | None) -> float:
        logits = model.sweep(inputs, noise, num_blocks)
        return float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))

    assert report.sweep_ce_k1 == pytest.approx(sum(cost(noise, None) for noise in noises) / 4, rel=1e-5)
    assert report.prior_ce_k1 == pytest.approx(sum(cost(noise, 1) for noise in noises) / 4, rel=1e-5)
    # Sweep, prior and three ablations start from the same four draws, the span from the first.
    assert len(drawn) == 5 * 4 + 1
    assert all(torch.equal(noise, drawn[idx % 4]) for idx, noise in enumerate(drawn))
    assert not torch.equal(noises[0], noises[1])


def test_many_draws_never_pay_more_than_one_on_average() -> None:
    report = evaluate_sweep(opinionated(), make_batches(4), num_draws=8)
    assert report.sweep_ce_k < report.sweep_ce_k1
    assert report.prior_ce_k < report.prior_ce_k1
    assert report.composition_gain == report.prior_ce_k - report.sweep_ce_k


def test_composition_gain_of_one_block_is_exactly_zero() -> None:
    report = evaluate_sweep(opinionated(num_blocks=1), make_batches(3), num_draws=3)
    assert report.composition_gain == 0.0
    assert report.z_zero_ce == report.sweep_ce_k  # there is no block after the first to blind


@pytest.mark.parametrize(("sigma_min", "sigma_max", "low", "high"), [(0.001, 0.01, 0.99, 1.0), (10.0, 20.0, 0.0, 0.03)])
def test_leak_accuracy_follows_lowest_noise(sigma_min: float, sigma_max: float, low: float, high: float) -> None:
    # 960 bytes at chance 1/256: 0.03 is ten standard deviations above it.
    model = make_model(sigma_min=sigma_min, sigma_max=sigma_max, width=32)
    assert low <= evaluate_sweep(model, make_batches(80), num_draws=1).leak_accuracy <= high


def test_same_seed_gives_same_report_and_another_seed_another() -> None:
    model, batches = opinionated(), make_batches(3, 2)
    first = evaluate_sweep(model, batches, num_draws=3, seed=7)
    assert evaluate_sweep(model, batches, num_draws=3, seed=7) == first
    assert evaluate_sweep(model, batches, num_draws=3, seed=8).sweep_ce_k1 != first.sweep_ce_k1


@pytest.mark.parametrize("objective", ["denoise", "denoise_features", "mse"])
def test_report_does_not_depend_on_how_many_draws_run_together(
    objective: NoisyObjective, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three blocks: the fresh noise of the second must not depend on when the third asks for its own.
    model, batches = opinionated(num_layers=3, num_blocks=3, objective=objective), make_batches(3)
    together = evaluate_sweep(model, batches, num_draws=5)
    monkeypatch.setattr(sweep_eval, "MAX_POSITIONS", 1)
    apart = evaluate_sweep(model, batches, num_draws=5)
    # Other batch sizes may sum in another order; nothing else may differ.
    assert list(apart.metrics("val").values()) == pytest.approx(list(together.metrics("val").values()), rel=1e-5)


def test_evaluation_leaves_random_stream_modes_and_gradients_alone() -> None:
    model = opinionated().train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    evaluate_sweep(model, make_batches(2), num_draws=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_span_and_scrambled_context_lose_what_the_context_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    inputs = torch.arange(12).repeat(4, 1) + torch.arange(0, 200, 50)[:, None]

    def successor(inputs: Tensor) -> Tensor:
        known = (inputs != UNKNOWN)[..., None]
        return 50.0 * known * F.one_hot((inputs + 1) % 256, 256)

    stub_logits(model, monkeypatch, successor)
    report = evaluate_sweep(model, [(inputs, inputs + 1)], num_draws=2)
    assert report.sweep_ce_k == pytest.approx(0, abs=1e-5)
    assert report.span_ce == pytest.approx(UNIFORM, abs=1e-5)
    # A permuted context names a wrong byte, at 50 nats, at most positions.
    assert report.context_scrambled_ce > 25


@pytest.mark.parametrize("objective", ["denoise", "denoise_features", "mse"])
def test_ablations_equal_sweeps_in_which_every_later_block_is_blinded(objective: NoisyObjective) -> None:
    model, ((inputs, targets),) = opinionated(num_layers=3, num_blocks=3, objective=objective), make_batches(3)
    drawn: list[Tensor] = []
    real = model.draw_noise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "draw_noise", lambda *args: drawn.append(real(*args)) or drawn[-1])
        report = evaluate_sweep(model, [(inputs, targets)], num_draws=1)

    def blinded(block_idx: int, z: Tensor) -> Tensor:
        return z if block_idx == 0 else torch.zeros_like(z)

    for noise, intervene, paid in ((drawn[0], blinded, report.z_zero_ce), (None, None, report.no_z_ce)):
        logits = model.sweep(inputs, noise, intervene=intervene)
        assert paid == pytest.approx(float(F.cross_entropy(logits.flatten(0, 1), targets.flatten())), rel=1e-5)


def test_local_noise_stays_in_band_that_is_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(gamma=0.5)
    calls = spy_on_blocks(model, monkeypatch)
    evaluate_sweep(model, make_batches(64), num_draws=1)
    for block_idx, (called, _, sigma, _) in enumerate(calls[:2]):
        high, low = model.block_sigma_edges[block_idx : block_idx + 2]
        assert called == block_idx
        assert low <= float(sigma.min()) < float(sigma.max()) <= high
        assert sigma.unique().numel() == 64  # one level per sequence


def test_local_evaluation_of_features_reads_the_frozen_walk_of_the_blocks_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = opinionated(objective="denoise_features", num_layers=3, num_blocks=3)
    calls = spy_on_blocks(model, monkeypatch)
    ((inputs, targets),) = batches = make_batches(4)
    evaluate_sweep(model, batches, num_draws=1)
    # Block 0; block 1 after 0; block 2 after 0 and 1.
    assert [block_idx for block_idx, *_ in calls[:6]] == [0, 0, 1, 0, 1, 2]
    levels = [float(sigma.unique()) for _, _, sigma, _ in (calls[1], calls[3], calls[4])]
    assert levels == pytest.approx([model.sweep_sigmas[0], model.sweep_sigmas[0], model.sweep_sigmas[1]])
    y = model.target_table[targets].detach()
    _, z, sigma, read = calls[5]
    assert z is not None
    eps = (z - y) / sigma[:, None, None]
    torch.testing.assert_close(read, model.features(2, inputs, y, eps), rtol=1e-4, atol=1e-4)


def test_ablations_show_later_blocks_noise_of_their_level_and_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    model = opinionated()
    calls = spy_on_blocks(model, monkeypatch)
    evaluate_sweep(model, make_batches(40), num_draws=2)
    # Two local evaluations, a sweep of two blocks, the prior, both ablations of z, and the sweep without it.
    assert [block_idx for block_idx, *_ in calls[:11]] == [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1]
    assert [call[1] for call in calls[9:11]] == [None, None]
    start, walk, noise, zeros = (call[1] for call in (calls[2], calls[3], calls[6], calls[8]))
    assert start is not None and walk is not None and noise is not None and zeros is not None
    assert all(torch.equal(start, calls[idx][1]) for idx in (5, 7))  # type: ignore[arg-type]
    assert all(float(calls[idx][2].unique()) == pytest.approx(model.sweep_sigmas[1]) for idx in (3, 6, 8))
    assert not zeros.any()
    assert float(noise.std()) == pytest.approx(model.sweep_sigmas[1], rel=0.02)
    assert abs(float(torch.corrcoef(torch.stack([noise.flatten(), walk.flatten()]))[0, 1])) < 0.05


@pytest.mark.parametrize("options", [{"num_draws": 0}, {"seed": -1}])
def test_evaluation_with_argument_out_of_range_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        evaluate_sweep(make_model(), make_batches(1), **options)


def test_evaluation_without_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        evaluate_sweep(make_model(), [])


def quiet_trainer(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return L.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=list(callbacks), **silent, **options)


def loader(batches: list[Batch]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def test_callback_logs_report_of_first_batches_in_validation_and_test() -> None:
    model, batches = opinionated(), make_batches(2, 2, 2)
    callback = SweepEvaluation(num_draws=3, max_batches=2)
    trainer = quiet_trainer(callback)
    expected = evaluate_sweep(model, batches[:2], num_draws=3)
    (logged,) = trainer.validate(model, loader(batches), verbose=False)
    for key, value in expected.metrics("val").items():
        assert logged[key] == pytest.approx(value, rel=1e-6), key
    assert "val/sweep_ce_k3" in logged and "val/local_ce/block1" in logged
    (tested,) = trainer.test(model, loader(batches), verbose=False)
    assert tested["test/sweep_ce_k3"] == pytest.approx(expected.sweep_ce_k, rel=1e-6)
    assert callback.report == expected


def test_callback_after_an_interrupted_validation_evaluates_new_batches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = opinionated(), make_batches(2, 2, 2)
    callback = SweepEvaluation(num_draws=1)
    real = model.evaluation_nats

    def interrupted(batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            raise RuntimeError("interrupted")
        return real(batch, batch_idx)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="interrupted"):
        patch.setattr(model, "evaluation_nats", interrupted)
        quiet_trainer(callback).validate(model, loader(batches), verbose=False)
    quiet_trainer(callback).validate(model, loader(batches[2:]), verbose=False)
    assert callback.report == evaluate_sweep(model, batches[2:], num_draws=1)


def test_callback_evaluates_every_nth_validation_and_not_the_sanity_check(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = sweep_eval.evaluate_sweep

    def count(model: DiffusionBlocks, batches: list[Batch], **options: int) -> sweep_eval.SweepReport:
        seen.append(model.global_step)
        return real(model, batches, **options)

    monkeypatch.setattr(sweep_eval, "evaluate_sweep", count)
    callback = SweepEvaluation(num_draws=1, every_n_validations=2)
    trainer = quiet_trainer(callback, max_steps=5, val_check_interval=1, check_val_every_n_epoch=None)
    trainer.fit(make_model(), loader(make_batches(2, 2)), loader(make_batches(2)))
    assert seen == [2, 4]


def test_callback_on_causal_model_is_refused() -> None:
    model = ByteTransformer(num_layers=1, width=16, num_heads=2, window_bytes=12)
    with pytest.raises(MisconfigurationException, match="needs a DiffusionBlocks module"):
        quiet_trainer(SweepEvaluation()).validate(model, loader(make_batches(1)), verbose=False)


@pytest.mark.parametrize("name", ["num_draws", "every_n_validations", "max_batches"])
def test_callback_with_argument_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        SweepEvaluation(**{name: 0})
