"""How a module is cut, when the cut moves, and what a pipeline that starts again keeps."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_blocktrain.pipeline.settings
import lightning_blocktrain.strategies.pipeline_run as pipeline_run
from lightning_blocktrain import BoundedHorizonStrategy
from tests.strategies.conftest import (
    BACKENDS,
    RecordingLogger,
    UserModule,
    adam_steps,
    assert_same,
    fit,
    seeded,
    weights,
)

STARTS_PROCESSES = True


class CutSizes(L.Callback):
    """Keeps every new cut."""

    def __init__(self, seen: list[tuple[int, ...]]) -> None:
        self.seen = seen

    def on_train_batch_end(self, trainer, *args):
        if self.seen[-1:] != [trainer.strategy.cut.sizes]:
            self.seen.append(trainer.strategy.cut.sizes)


class Repeated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(60):
            x = x + torch.tanh(self.linear(x))
        return x / 60


class Heavy(UserModule):
    def __init__(self) -> None:
        super().__init__(num_layers=6, width=16)
        self.layers[-1] = Repeated(16)


class TestSplits:
    def test_a_list_says_how_many_layers_each_stage_has(self, make_trainer):
        cuts: list[tuple[int, ...]] = []

        class Watch(L.Callback):
            def on_train_start(self, trainer, pl_module):
                cuts.append(trainer.strategy.cut.sizes)

        for options in ({"stage_split": [1, 3]}, {"stage_split": (2, 1, 1), "lag": "pinned"}, {"num_stages": 2}, {}):
            fit(
                seeded(UserModule),
                make_trainer(BoundedHorizonStrategy(**options), max_steps=3, callbacks=[Watch()]),
            )
        assert cuts == [(1, 3), (2, 1, 1), (2, 2), (1, 1, 1, 1)]

    def test_devices_count_stages_and_change_no_world_size(self, make_trainer):
        strategy = BoundedHorizonStrategy()
        trainer = make_trainer(strategy, max_steps=2, devices=2)
        sizes = []
        trainer.callbacks.append(CutSizes(sizes))
        fit(seeded(UserModule), trainer)
        assert sizes == [(2, 2)] and trainer.world_size == 1

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_auto_moves_layers_off_the_heavy_stage_logs_it_and_loses_no_batch(self, make_trainer, backend, monkeypatch):
        """The last layer repeats its work 60 times: its stage measures about all work, spread over three layers."""

        said: list[str] = []
        monkeypatch.setattr(pipeline_run, "rank_zero_info", said.append)
        monkeypatch.setattr(pipeline_run, "SETTLE_STEPS", 2)
        monkeypatch.setattr(pipeline_run, "BALANCE_STEPS", 6)

        def run(split: Any) -> tuple[list[tuple[int, ...]], list[int | None]]:
            sizes, logger = CutSizes([]), RecordingLogger()
            strategy = BoundedHorizonStrategy(
                num_stages=2 if split == "auto" else None, backend=backend, stage_split=split, threads_per_stage=1
            )
            trainer = make_trainer(
                strategy, max_steps=40, max_epochs=-1, callbacks=[sizes], logger=logger, log_every_n_steps=1
            )
            fit(seeded(Heavy), trainer)
            assert adam_steps(trainer) == {40.0}
            return sizes.seen, [step for step, _ in logger.of("train/loss")]

        sizes, steps = run("auto")
        assert sizes == [(3, 3), (4, 2)]
        assert steps == list(range(40))
        assert len(said) == 1 and "stage_split=[4, 2] starts a run with this cut" in said[0]
        assert run([4, 2]) == ([(4, 2)], list(range(40)))

    def test_more_stages_than_cores_warn_once_and_threads_are_capped(self, make_trainer, monkeypatch):
        for where in (lightning_blocktrain.pipeline.settings, pipeline_run):
            monkeypatch.setattr(where, "num_cores", lambda: 3)
        strategy = BoundedHorizonStrategy(num_stages=4, threads_per_stage=2)
        threads: set[int] = set()

        class Watch(UserModule):
            def stage_loss(self, logits, batch):
                threads.add(torch.get_num_threads())
                return super().stage_loss(logits, batch)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(seeded(Watch), make_trainer(strategy, max_steps=3))
        texts = [str(warning.message) for warning in caught]
        assert sum("4 stages share 3 cores" in text for text in texts) == 1
        assert sum("threads_per_stage=2, 4 at the same time on 3 cores: using 1" in text for text in texts) == 1
        assert threads == {1}


@pytest.mark.slow
class TestGrowingBatches:
    def test_a_batch_that_outgrows_the_rings_of_processes_loses_neither_gradients_nor_reports(self, make_trainer):
        """Oracle: the same in threads, whose queues hold batches of any size."""
        texts = [
            torch.randint(16, (2, length + 1), generator=torch.Generator().manual_seed(length))
            for length in (3, 4, 4, 9, 2, 12, 12, 5)
        ]
        batches = [[text[:, :-1], text[:, 1:]] for text in texts]

        def run(backend: str) -> tuple[dict[str, Tensor], list[tuple[int | None, float]]]:
            logger = RecordingLogger()
            strategy = BoundedHorizonStrategy(num_stages=2, mode="serial", backend=backend, threads_per_stage=1)
            trainer = make_trainer(strategy, accumulate_grad_batches=2, logger=logger, log_every_n_steps=1)
            fit(seeded(UserModule), trainer, torch.utils.data.DataLoader(batches, batch_size=None))
            return weights(trainer.lightning_module), logger.of("train/loss")

        threads, processes = run("threads"), run("processes")
        assert_same(processes[0], threads[0])
        assert processes[1] == threads[1]
