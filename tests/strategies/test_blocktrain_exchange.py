"""blocktrain: codecs and what becomes of work that is late, in the simulation and as a worker on a line."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_blocktrain import BlockTrainStrategy, Codec
from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.rounds import OuterSGD
from tests.strategies.conftest import OneBlock, TwoBlocks, fit, loader, seeded, weights
from tests.transport.lines import RUN, TOKEN, served


def trained(make_trainer: Any, **options: Any) -> tuple[dict[str, torch.Tensor], BlockTrainStrategy]:
    module = seeded(TwoBlocks)
    strategy = BlockTrainStrategy(**{"sync_every": 2, "replicas": 2, **options})
    fit(module, make_trainer(strategy), loader(96))
    return weights(module), strategy


class TestCodecs:
    @pytest.mark.parametrize(
        ("codec", "most"), [("bf16", 0.51), (Codec("int8", block=64), 0.32), (Codec("topk", top_frac=0.1), 0.35)]
    )
    def test_lossy_codecs_send_fewer_bytes_and_end_near_the_exact_run(self, make_trainer, codec, most):
        exact, plain = trained(make_trainer)
        lossy, strategy = trained(make_trainer, codec=codec)
        assert 0 < strategy.sent_bytes <= most * plain.sent_bytes
        assert strategy.accepted_tokens == plain.accepted_tokens
        start = weights(seeded(TwoBlocks))
        moved, apart = (
            sum(float(((a[name] - b[name]) ** 2).sum()) for name in exact) ** 0.5
            for a, b in ((exact, start), (lossy, exact))
        )
        assert 0 < apart < (0.8 if "topk" in str(codec) else 0.1) * moved

    @pytest.mark.parametrize("codec", ["zip", 8])
    def test_an_unknown_codec_is_refused_at_construction(self, codec):
        with pytest.raises(ValueError, match="codec"):
            BlockTrainStrategy(codec=codec)


class TestTerms:
    def test_a_run_that_a_worker_founds_has_the_terms_of_its_strategy(self, make_trainer, monkeypatch):
        monkeypatch.setattr(rank_zero_only, "rank", 0)  # given back afterwards: whoever joins is not rank 0
        monkeypatch.setenv("BLOCKTRAIN_TOKEN", TOKEN)
        monkeypatch.setenv("BLOCKTRAIN_RUN_ID", RUN)
        desk = Desk(RUN, TOKEN)
        options = {"late": "stale_weighted", "max_staleness": 3, "deadline_quantile": 0.8, "deadline_s": 50.0}
        with served(desk) as server:
            strategy = BlockTrainStrategy(
                sync_every=2,
                coordinator=server.url,
                codec=Codec("int8", block=64),
                local_steps="until_deadline",
                on_missing_block="fail",
                outer_optimizer=OuterSGD(0.9, 0.5),
                **options,
            )
            fit(seeded(OneBlock), make_trainer(strategy, max_steps=4))
            terms = desk.service.terms
        assert {name: getattr(terms.rules, name) for name in options} == options
        assert (terms.codec, terms.local_steps) == (Codec("int8", block=64), "until_deadline")
        assert (terms.on_missing_block, terms.outer, terms.sync_every) == ("fail", OuterSGD(0.9, 0.5), 2)
        assert desk.service.versions["block0"] == 2


class TestLateWork:
    def test_stale_weighted_merges_what_drop_loses(self, make_trainer):
        _, drop = trained(make_trainer, network="wan")
        _, stale = trained(make_trainer, network="wan", late="stale_weighted")
        assert drop.worker_tokens == stale.worker_tokens
        assert stale.accepted_tokens > drop.accepted_tokens

    def test_until_deadline_takes_fewer_steps_and_loses_fewer(self, make_trainer):
        _, fixed = trained(make_trainer, network="wan", sync_every=4)
        _, timely = trained(make_trainer, network="wan", sync_every=4, local_steps="until_deadline")
        assert timely.worker_steps < fixed.worker_steps
        assert timely.accepted_tokens / timely.worker_tokens > fixed.accepted_tokens / fixed.worker_tokens
        assert timely.num_rounds_closed == fixed.num_rounds_closed

    def test_until_deadline_in_lockstep_is_the_same_run(self, make_trainer):
        fixed, _ = trained(make_trainer)
        timely, _ = trained(make_trainer, local_steps="until_deadline")
        assert all(torch.equal(tensor, fixed[name]) for name, tensor in timely.items())

    def test_until_deadline_where_no_worker_learns_still_steps_schedules_and_counts(self, make_trainer):
        module = seeded(TwoBlocks)
        strategy = BlockTrainStrategy(sync_every=4, network="offline", deadline_s=1e-6, local_steps="until_deadline")
        trainer: L.Trainer = make_trainer(strategy, max_steps=8)
        fit(module, trainer)
        assert trainer.global_step == 8
        assert strategy.worker_steps == 2 * 2  # one step of each of two workers in each of two rounds
        assert strategy.worker_tokens == strategy.worker_steps * 10

    def test_an_adaptive_deadline_shortens_the_rounds(self, make_trainer):
        _, fixed = trained(make_trainer, network="mild", sync_every=1)
        _, adaptive = trained(make_trainer, network="mild", sync_every=1, deadline_quantile=0.5)
        ends = [strategy.round_reports[0].closed_at for strategy in (fixed, adaptive)]
        assert ends[1] < ends[0]

    def test_an_unknown_rule_is_refused_at_construction(self):
        with pytest.raises(ValueError, match="local_steps must be 'fixed' or 'until_deadline'"):
            BlockTrainStrategy(local_steps="some")
        with pytest.raises(ValueError, match="late must be known"):
            BlockTrainStrategy(late="keep")
