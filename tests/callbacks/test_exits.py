import csv
import math
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_blocktrain import BoundedHorizonStrategy, ByteTransformer, callbacks
from lightning_blocktrain.callbacks.exits import ExitEvaluation, ExitScore, evaluate_exits, exit_sizes


def byte_model(num_layers=4):
    torch.manual_seed(3)
    model = ByteTransformer(num_layers=num_layers, width=16, num_heads=2, window_bytes=8)
    nn.init.normal_(model.readout.unembed.weight, std=0.5)  # exits differ before any training
    return model


def windows(num_windows, seed=0):
    text = torch.randint(256, (num_windows, 9), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(text[:, :-1], text[:, 1:])


def batches_of(*sizes):
    return [windows(size, seed)[:] for seed, size in enumerate(sizes)]


def make_trainer(tmp_path, evaluation, strategy="auto", **options):
    return L.Trainer(
        accelerator="cpu",
        devices=options.pop("devices", 1),
        strategy=strategy,
        max_epochs=1,
        logger=CSVLogger(tmp_path, name="", version="run"),
        callbacks=[evaluation] if evaluation is not None else [],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )


def fit(tmp_path, evaluation, strategy="auto", model=None, **options):
    """Train on 8 batches; validate on 5 windows in batches of 4 and 1."""
    trainer = make_trainer(tmp_path, evaluation, strategy, **options)
    model = model or byte_model()
    trainer.fit(model, DataLoader(windows(32), batch_size=4), DataLoader(windows(5, seed=1), batch_size=4))
    return trainer


class Truncated(nn.Module):
    """A ByteTransformer that ends after ``depth`` layers, by other code than the exits'."""

    def __init__(self, model, depth):
        super().__init__()
        self.model, self.depth = model, depth

    def nats(self, inputs, targets):
        hidden = self.model.stage_embed((inputs, None))
        for layer in self.model.layers[: self.depth]:
            hidden = layer(hidden)
        log_p = self.model.readout(hidden).double().log_softmax(-1)
        return -log_p.gather(-1, targets[..., None]).sum()


def test_exits_are_the_models_cut_off_after_each_stage_weighed_by_tokens():
    model, batches = byte_model(), batches_of(3, 1)
    scores = evaluate_exits(model, batches, [1, 3])
    for score, depth in zip(scores, (1, 4), strict=True):
        with torch.no_grad():
            nats = sum(Truncated(model, depth).nats(*batch) for batch in batches)
        assert (score.num_layers, score.num_tokens) == (depth, 32)
        assert score.nats_per_token == pytest.approx(float(nats) / 32, rel=1e-6)
        assert score.bits_per_token == score.nats_per_token / math.log(2)
    assert scores[0].nats_per_token != pytest.approx(scores[1].nats_per_token, rel=1e-3)


def test_final_exit_of_byte_transformer_is_its_validation_loss(tmp_path):
    model = byte_model()
    trainer = make_trainer(tmp_path, None)
    loader = DataLoader(windows(5, seed=1), batch_size=4)
    (logged,) = trainer.validate(model, loader, verbose=False)
    final = evaluate_exits(model, loader, [2, 2])[-1]
    assert final.nats_per_token == pytest.approx(logged["val/loss"], rel=1e-6)
    assert final.bits_per_token == pytest.approx(logged["val/bits_per_byte"], rel=1e-6)


class OwnNorm(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), scale))

    def forward(self, hidden, readout):
        return readout.unembed(self.scale * hidden)


def test_exits_of_their_own_are_read_out_through_and_the_last_is_the_model(monkeypatch):
    model, batches = byte_model(), batches_of(3, 1)
    shared = evaluate_exits(model, batches, [1, 3])
    model.own = nn.ModuleList(OwnNorm(scale) for scale in (0.5, 1.0, 2.0))
    monkeypatch.setattr(model, "stage_exits", lambda: model.own, raising=False)
    first, last = evaluate_exits(model, batches, [1, 3])
    with torch.no_grad():
        hidden = model.layers[0](model.stage_embed((torch.cat([batch[0] for batch in batches]), None)))
        logits = F.linear(0.5 * hidden, model.readout.unembed.weight)
        nats = F.cross_entropy(logits.flatten(0, 1), torch.cat([batch[1] for batch in batches]).flatten())
    assert first.nats_per_token == pytest.approx(float(nats), rel=1e-6)
    assert last == shared[1]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, scale):
        return x + self.dropout(self.linear(x)) * scale, "a layer may return more"


class UserModule(L.LightningModule):
    """A user's module: keywords for the layers, a loss with more beside it, its own count of tokens, noise."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(3))
        self.readout = nn.Linear(4, 2)

    def configure_blocks(self):
        return {"layers": self.layers, "readout": self.readout}

    def stage_embed(self, batch):
        return batch["x"]

    def stage_kwargs(self, batch, hidden):
        return {"scale": batch["scale"]}

    def stage_loss(self, logits, batch):
        keep = batch["y"] >= 0
        return {"loss": F.cross_entropy(logits[keep], batch["y"][keep]), "noise": torch.rand(())}

    def count_tokens(self, batch):
        return int((batch["y"] >= 0).sum())


def user_batch(*targets):
    x = torch.randn(len(targets), 4, generator=torch.Generator().manual_seed(len(targets)))
    return {"x": x, "scale": torch.tensor(2.0), "y": torch.tensor(targets)}


def test_exits_user_module_is_scored_in_eval_mode_and_left_as_it_was():
    module = UserModule().train()
    module.layers[1].eval()
    modes = [part.training for part in module.modules()]
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    stream = torch.get_rng_state()
    batches = [user_batch(0, 1, -1), user_batch(-1, -1), user_batch(1, -1)]
    scores = evaluate_exits(module, batches, [1, 2])
    assert [part.training for part in module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    nats = 0.0
    for batch in batches:
        hidden = batch["x"]
        for layer in module.layers:
            hidden = hidden + 2 * layer.linear(hidden)
        nats += F.cross_entropy(module.readout(hidden), batch["y"], ignore_index=-1, reduction="sum").item()
    assert scores[1] == ExitScore(3, pytest.approx(nats / 3, rel=1e-5), 3)
    assert evaluate_exits(module, batches, [1, 2]) == scores


def test_exits_failing_hook_still_gives_the_modes_back(monkeypatch):
    module = UserModule().train()
    monkeypatch.setattr(module, "stage_loss", lambda logits, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate_exits(module, [user_batch(0)], [3])
    assert all(part.training for part in module.modules())


@pytest.mark.parametrize("batches", [[], [user_batch(-1, -1)]])
def test_exits_without_any_token_raises(batches):
    with pytest.raises(ValueError, match="batches must hold at least one target token"):
        evaluate_exits(UserModule(), batches, [1, 2])


def test_exits_module_without_hooks_raises():
    with pytest.raises(MisconfigurationException, match="Linear without configure_blocks, stage_embed, stage_loss"):
        evaluate_exits(nn.Linear(1, 1), [], [1])


@pytest.mark.parametrize(
    ("sizes", "num_stages", "expected"),
    [
        (None, None, (2, 2, 2)),
        (None, 4, (2, 2, 1, 1)),
        ([1, 5], None, (1, 5)),
        ([1, 5], 2, (1, 5)),
        (None, 6, (1,) * 6),
    ],
)
def test_exit_sizes_of_six_layers(sizes, num_stages, expected):
    assert exit_sizes(6, sizes, num_stages) == expected


@pytest.mark.parametrize(
    ("sizes", "num_stages", "message"),
    [
        ([1, 4], None, r"add up to num_layers; got sizes=\[1, 4\], num_layers=6"),
        ([0, 6], None, r"got sizes=\[0, 6\]"),
        ([], None, r"got sizes=\[\]"),
        ([1, 5], 3, "one number per stage"),
        (None, 7, "got num_stages=7, num_layers=6"),
        (None, 0, "got num_stages=0"),
    ],
)
def test_exit_sizes_that_do_not_fit_raise(sizes, num_stages, message):
    with pytest.raises(ValueError, match=message):
        exit_sizes(6, sizes, num_stages)


@pytest.mark.parametrize(
    "options", [{"num_stages": 0}, {"limit_batches": 0}, {"sizes": [2, 0]}, {"sizes": [1, 1], "num_stages": 3}]
)
def test_exit_evaluation_wrong_argument_raises(options):
    with pytest.raises(ValueError, match=r"; got .*; "):
        ExitEvaluation(**options)


def test_exit_evaluation_rgc_writes_the_exits_of_its_stages(tmp_path):
    evaluation = ExitEvaluation()
    strategy = BoundedHorizonStrategy(stage_split=[1, 3], threads_per_stage=1)
    trainer = fit(tmp_path, evaluation, strategy, val_check_interval=4)
    assert [(score.num_layers, score.num_tokens) for score in evaluation.scores] == [(1, 40), (4, 40)]
    with Path(tmp_path, "run", "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val/loss"]]
    assert len(rows) == 2
    assert "val/loss/exit2" not in rows[0]
    for row in rows:
        assert float(row["val/loss/exit1"]) == pytest.approx(float(row["val/loss"]), rel=1e-6)
        assert float(row["val/bits_per_token/exit1"]) == pytest.approx(float(row["val/bits_per_byte"]), rel=1e-6)
        assert float(row["val/bits_per_token/exit0"]) == float(row["val/loss/exit0"]) / math.log(2)
    assert trainer.callback_metrics["val/loss/exit0"].item() == evaluation.scores[0].nats_per_token
    again = evaluate_exits(trainer.lightning_module, DataLoader(windows(5, seed=1), batch_size=4), [1, 3])
    assert again == evaluation.scores


def test_exit_evaluation_test_after_a_fit_keeps_its_stages(tmp_path):
    evaluation = ExitEvaluation()
    strategy = BoundedHorizonStrategy(num_stages=2, threads_per_stage=1)
    trainer = fit(tmp_path, evaluation, strategy, limit_train_batches=2)
    (logged,) = trainer.test(trainer.lightning_module, DataLoader(windows(6, seed=2), batch_size=4), verbose=False)
    assert logged["test/loss/exit1"] == pytest.approx(logged["test/loss"], rel=1e-6)
    assert [score.num_layers for score in evaluation.scores] == [2, 4]
    assert not any(key.startswith("val/loss/exit") for key in logged)


def test_exit_evaluation_validate_without_a_fit_under_rgc_takes_the_arguments(tmp_path):
    evaluation = ExitEvaluation(num_stages=2)
    trainer = make_trainer(tmp_path, evaluation, "rgc")
    trainer.validate(byte_model(), DataLoader(windows(4), batch_size=4), verbose=False)
    assert [score.num_layers for score in evaluation.scores] == [2, 4]


def test_exit_evaluation_default_strategy_takes_the_arguments(tmp_path):
    evaluation = ExitEvaluation(sizes=[3, 1])
    trainer = fit(tmp_path, evaluation, limit_train_batches=2)
    assert [score.num_layers for score in evaluation.scores] == [3, 4]
    metrics = trainer.callback_metrics
    assert metrics["val/loss/exit1"].item() == pytest.approx(metrics["val/loss"].item(), rel=1e-6)


def test_exit_evaluation_changes_neither_training_nor_validation(tmp_path):
    results = []
    for name, evaluation in (("with", ExitEvaluation()), ("without", None)):
        model = byte_model()
        trainer = fit(tmp_path / name, evaluation, "rgc_serial", model, val_check_interval=2)
        results.append((trainer.callback_metrics["val/loss"], model.state_dict()))
    (loss, weights), (plain_loss, plain_weights) = results
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(tensor, plain_weights[name]) for name, tensor in weights.items())


def test_exit_evaluation_limit_scores_the_first_batches_of_every_pass(tmp_path):
    evaluation = ExitEvaluation(limit_batches=1)
    trainer = fit(tmp_path, evaluation, val_check_interval=4)
    assert {score.num_tokens for score in evaluation.scores} == {4 * 8}
    first = [windows(5, seed=1)[:4]]
    assert evaluation.scores == evaluate_exits(trainer.lightning_module, first, [1, 1, 1, 1])


def test_exit_evaluation_sanity_check_is_passed_over(tmp_path):
    evaluation = ExitEvaluation()
    fit(tmp_path, evaluation, "rgc", num_sanity_val_steps=1, limit_train_batches=1, check_val_every_n_epoch=2)
    assert evaluation.scores == []


def test_exit_evaluation_low_precision_scores_as_validation_does(tmp_path):
    trainer = fit(tmp_path, ExitEvaluation(), precision="bf16-mixed", limit_train_batches=2)
    metrics = trainer.callback_metrics
    with torch.autocast("cpu", enabled=False):
        exact = evaluate_exits(trainer.lightning_module, DataLoader(windows(5, seed=1), batch_size=4), [4])
    assert metrics["val/loss/exit3"].item() == pytest.approx(metrics["val/loss"].item(), rel=1e-6)
    assert metrics["val/loss/exit3"].item() != pytest.approx(exact[0].nats_per_token, rel=1e-7)


def test_exit_evaluation_other_stages_than_the_strategys_warns(tmp_path):
    evaluation = ExitEvaluation(sizes=[1, 3])
    strategy = BoundedHorizonStrategy(num_stages=2, threads_per_stage=1)
    with pytest.warns(UserWarning, match=r"ExitEvaluation uses the strategy's stages \[2, 2\], not \[1, 3\]"):
        fit(tmp_path, evaluation, strategy, limit_train_batches=1)
    assert [score.num_layers for score in evaluation.scores] == [2, 4]


def test_exit_evaluation_sizes_of_another_model_are_refused_before_training(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"got sizes=\[1, 1\], num_layers=4"):
        fit(tmp_path, ExitEvaluation(sizes=[1, 1]))


def test_exit_evaluation_module_without_hooks_is_refused(tmp_path):
    class Plain(L.LightningModule):
        pass

    with pytest.raises(MisconfigurationException, match="Plain without configure_blocks"):
        ExitEvaluation().setup(make_trainer(tmp_path, None), Plain(), "fit")


class SaveScores(ExitEvaluation):
    def __init__(self, folder):
        super().__init__(num_stages=2)
        self.folder = folder

    def on_fit_end(self, trainer, pl_module):
        torch.save([(s.nats_per_token, s.num_tokens) for s in self.scores], self.folder / f"{trainer.global_rank}.pt")
        if trainer.global_rank == 0:
            torch.save(pl_module.state_dict(), self.folder / "weights.pt")

    def teardown(self, trainer, pl_module, stage):
        dist.destroy_process_group()  # a rank that ends with gloo's threads alive may abort


@pytest.mark.slow
def test_exit_evaluation_two_ranks_score_all_tokens(tmp_path):
    trainer = make_trainer(tmp_path, SaveScores(tmp_path), "ddp_spawn", devices=2, limit_train_batches=1)
    validation = DataLoader(windows(6, seed=1), batch_size=2)
    trainer.fit(byte_model(), DataLoader(windows(8), batch_size=2), validation)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    model = byte_model()
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    # The sampler hands every rank whole batches: 3 windows each.
    expected = evaluate_exits(model, validation, [2, 2])
    assert first == second
    assert [num_tokens for _, num_tokens in first] == [48, 48]
    assert [nats for nats, _ in first] == pytest.approx([score.nats_per_token for score in expected], rel=1e-6)


@pytest.mark.parametrize("name", ["loss", "bits_per_token"])
def test_namespace_documents_every_exit_key(name):
    assert f"``val/{name}/exit{{s}}``" in callbacks.__doc__
