"""The demo, run once at its smallest budget, and the arithmetic of its report."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from lightning_blocktrain import demo
from lightning_blocktrain.callbacks import SweepReport
from lightning_blocktrain.data import ByteDataModule
from lightning_blocktrain.demo import arms, curves, report
from lightning_blocktrain.demo.recipe import BUDGETS, Recipe, recipe_of
from lightning_blocktrain.models import DiffusionBlocks
from lightning_blocktrain.models.loading import load_model
from lightning_blocktrain.partition import partition
from lightning_blocktrain.rounds.average import move_average

MODELS = ["diffusion_blocks", "byte_transformer", "causal_full", "causal_block"]
TINY = BUDGETS["tiny"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    lines = (f"Line {i} says that {i * i} is the square of {i}.\n" for i in range(1200))
    path.write_text("".join(lines), encoding="ascii")
    return str(path)


@pytest.fixture(scope="module")
def finished(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of one finished demo, its report as written, and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "out"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKTRAIN_CACHE", str(out.parent / "cache"))
        demo.run_demo("tiny", corpus, out, seed=3, console=Console(file=printed, width=80))
    return out, json.loads((out / "report.json").read_text(encoding="utf-8")), printed.getvalue()


def test_demo_writes_its_files_and_no_partial_ones(finished: Any) -> None:
    out, _, _ = finished
    names = {path.name for path in out.iterdir()}
    assert names == {"report.json", "metrics.csv", "curves.png", "runs", *(f"{name}.ckpt" for name in MODELS)}
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_demo_report_has_documented_keys(finished: Any) -> None:
    _, written, _ = finished
    documented = [line for line in (demo.__doc__ or "").splitlines() if line.startswith("| ``")]
    for key in written:
        assert any(f"``{key}``" in line for line in documented), key
    assert set(written["bits_per_byte"]) == {*MODELS, "diffusion_blocks_k16"}
    assert written["seeds"] == [3]
    assert written["corpus"]["name"] == "text.txt" and len(written["corpus"]["sha256"]) == 64


def test_demo_gives_every_block_and_control_equal_tokens(finished: Any) -> None:
    _, written, _ = finished
    total = TINY.steps * TINY.batch_size * TINY.window_bytes
    assert TINY.tokens_per_block == total
    for name, model in written["models"].items():
        workers = TINY.num_blocks if name in written["participation"] else 1
        assert (model["tokens_per_block"], model["total_tokens"]) == (total, total * workers)
    assert written["participation"] == {"diffusion_blocks": 1.0, "byte_transformer": 1.0}
    assert written["network"] == {"name": "lockstep", "simulated": True}


def test_demo_report_numbers_agree_with_each_other(finished: Any) -> None:
    _, written, _ = finished
    bits = written["bits_per_byte"]
    assert bits["diffusion_blocks"] == pytest.approx(written["sweep_ce_k1"] / math.log(2))
    assert bits["diffusion_blocks_k16"] == pytest.approx(written["sweep_ce_k16"] / math.log(2))
    assert written["composition_gain"] == pytest.approx(written["prior_ce"] - written["sweep_ce_k16"])
    gap = written["gaps"]["byte_transformer"]["causal_full"]
    assert gap["bits_per_byte"] == pytest.approx(bits["byte_transformer"] - bits["causal_full"])
    assert len(written["local_ce"]) == TINY.num_blocks
    assert set(written["ablations"]) == {"z_noise_ce", "z_zero_ce", "no_z_ce", "context_scrambled_ce"}
    # Learned something: an untrained model pays 8 bits.
    assert all(4 < value < 8 for value in bits.values())
    assert all(value > 0 for value in written["tokens_per_s"].values())


def test_demo_optimizer_bytes_are_two_moments_and_a_step_per_parameter(finished: Any) -> None:
    out, written, _ = finished
    for name in MODELS:
        model = load_model(out / f"{name}.ckpt")
        whole = sum(8 * p.numel() + 4 for p in model.parameters())
        worker = whole
        if name in written["participation"]:
            # The largest worker's block is the first: it owns what runs before the layers, where somebody does.
            named, cut = dict(model.named_parameters()), partition(model, model.configure_blocks())
            worker -= sum(8 * named[n].numel() + 4 for names in cut.block_names[1:] for n in names if n in named)
        assert written["optimizer_bytes"][name] == {"per_worker": worker, "whole_model": whole}


def test_demo_metrics_are_one_long_table_with_tokens(finished: Any) -> None:
    out, written, _ = finished
    with (out / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["model", "step", "tokens", "key", "value"]
    for name in MODELS:
        points = [row for row in rows if (row["model"], row["key"]) == (name, "val/bits_per_byte")]
        assert [int(row["step"]) for row in points] == [9, 19]
        assert int(points[-1]["tokens"]) == TINY.tokens_per_block
    (sweep,) = [row for row in rows if row["key"] == "test/sweep_ce_k16"]
    assert float(sweep["value"]) == pytest.approx(written["sweep_ce_k16"])
    assert int(sweep["tokens"]) == TINY.tokens_per_block
    assert not [row for row in rows if row["key"].startswith("val/sweep_ce")]


def test_demo_prints_table_sentences_and_samples(finished: Any) -> None:
    _, written, printed = finished
    flat = " ".join(printed.split())
    for sentence in written["summary"]:
        assert " ".join(sentence.split()) in flat
    for name in MODELS:
        assert f"{written['bits_per_byte'][name]:.3f}" in printed
    assert "local_ce" in printed and "sweep_ce, K=1" in printed and "simulated" in printed
    assert set(written["samples"]) == {"diffusion_blocks", "byte_transformer"}
    assert max(cell_len(line) for line in printed.splitlines()) <= 80  # a sample may hold signs of no width


def test_demo_checkpoints_are_the_models_that_were_tested(finished: Any, corpus: str, tmp_path: Path) -> None:
    out, written, _ = finished
    data = ByteDataModule(corpus, TINY.window_bytes, TINY.batch_size, cache_dir=str(tmp_path))
    nats, sweep = arms.evaluate_module(load_model(out / "diffusion_blocks.ckpt"), data, TINY, seed=3)
    assert sweep is not None and sweep.sweep_ce_k == pytest.approx(written["sweep_ce_k16"], rel=1e-6)
    nats, sweep = arms.evaluate_module(load_model(out / "causal_full.ckpt"), data, TINY, seed=3)
    assert sweep is None and nats == pytest.approx(written["models"]["causal_full"]["nats_per_byte"], rel=1e-5)


def test_run_arm_with_same_seed_is_the_same_run_and_replicas_keep_tokens_equal(corpus: str, tmp_path: Path) -> None:
    recipe = replace(TINY, steps=4, validate_every=2, sync_every=1, test_windows=8, replicas=2)
    data = ByteDataModule(corpus, recipe.window_bytes, recipe.batch_size, cache_dir=str(tmp_path / "cache"))
    arm = arms.byte_transformer(recipe)
    first, second = (arms.run_arm(arm, recipe, data, 1, tmp_path) for _ in range(2))
    assert first.nats_per_byte == second.nats_per_byte
    assert arms.run_arm(arm, recipe, data, 2, tmp_path).nats_per_byte != first.nats_per_byte
    assert first.steps == 2
    assert first.tokens_per_block == recipe.tokens_per_block
    assert first.total_tokens == recipe.tokens_per_block * recipe.num_blocks
    rows = curves.read_rows(first.metrics_path, "a", first.tokens_per_step, first.steps)
    assert curves.points_by_model(rows)["a"][-1][0] == recipe.tokens_per_block


def test_spaced_batches_cover_the_split_evenly_and_skip_a_partial_batch(tmp_path: Path) -> None:
    path = tmp_path / "split.u8"
    path.write_bytes(bytes(range(256)) * 2)
    dataset = arms.ByteBatches(path, window_bytes=8, batch_size=4, seed=None)
    assert len(dataset) == 16 and len(dataset[15][0]) == 3
    assert arms.spaced_batches(dataset, 12, 4).indices == [0, 5, 10]
    assert list(arms.spaced_batches(dataset, 1000, 4).indices) == list(range(15))
    assert arms.spaced_batches(dataset, 1, 4).indices == [0]


def test_mean_exit_nats_weighs_bytes_not_batches() -> None:
    torch.manual_seed(0)
    model = DiffusionBlocks(num_layers=2, num_blocks=2, width=16, num_heads=2, window_bytes=8).eval()
    torch.nn.init.normal_(model.readout.unembed.weight, std=0.5)
    batches = [(torch.randint(256, (size, 8)), torch.randint(256, (size, 8))) for size in (3, 1)]
    means, num_bytes = arms.mean_exit_nats(model, batches)
    exits = torch.cat([model.exit_nats(batch, idx).double().flatten(1) for idx, batch in enumerate(batches)], dim=1)
    assert num_bytes == 32 and means == pytest.approx(exits.mean(1).tolist(), rel=1e-12)
    assert means[0] != means[1]


def test_budget_number_scales_steps_in_whole_rounds() -> None:
    assert recipe_of("small") == Recipe()
    for text in ("0.01", "0.5", "1", "7.3"):
        recipe = recipe_of(text)
        assert recipe.steps % recipe.validate_every == 0 and recipe.validate_every % recipe.sync_every == 0
        assert replace(recipe, steps=150, validate_every=30, warmup_steps=20) == Recipe()
    assert recipe_of("1").steps == 150
    assert recipe_of("7.3").steps == pytest.approx(1095, rel=0.1)


@pytest.mark.parametrize("budget", ["huge", "0", "-1", "nan", "inf", ""])
def test_unknown_budget_is_refused(budget: str) -> None:
    with pytest.raises(ValueError, match="budget must be tiny, small, medium or a number"):
        recipe_of(budget)


def test_replicas_that_do_not_divide_the_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="replicas must divide steps"):
        Recipe(steps=10, replicas=3)


def sweep_report(**values: float) -> SweepReport:
    names = ("sweep_ce_k1", "sweep_ce_k", "prior_ce_k1", "prior_ce_k", "composition_gain", "z_noise_ce", "z_zero_ce")
    rest = dict.fromkeys((*names, "no_z_ce", "context_scrambled_ce", "span_ce", "leak_accuracy"), 2.0)
    return SweepReport(num_bytes=1024, num_draws=16, local_ce=(1.0, 0.5, 0.1), **{**rest, **values})


def test_summary_says_in_words_who_is_behind_and_that_blocks_add_nothing() -> None:
    bits = {"diffusion_blocks": 2.9, "byte_transformer": 2.4, "causal_full": 2.5, "causal_block": 2.4}
    gaps = report.gaps_to_controls(bits)
    sentences = report.summary(bits, gaps, sweep_report(composition_gain=-0.004), Recipe())
    assert sentences[0] == (
        "DiffusionBlocks (one sweep) at 2.900 bits per byte is 0.40 bits per byte (16.0%) behind causal L=6 and "
        "0.50 bits per byte (20.8%) behind causal L=2."
    )
    assert "0.10 bits per byte (4.0%) ahead of causal L=6 and level with causal L=2" in sentences[1]
    assert sentences[2] == "Composition gain -0.004 nats per byte: the blocks after the first add nothing."
    assert "1,024 test bytes" in sentences[3]


@pytest.mark.parametrize(("gain", "words"), [(0.2, "help"), (-0.2, "make it worse"), (0.001, "add nothing")])
def test_composition_gain_in_words_follows_its_sign(gain: float, words: str) -> None:
    assert report.gain_in_words(gain).endswith(f"{words}.")


def test_out_that_is_a_file_or_lies_in_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.write_text("keep", encoding="ascii")
    for out in (path, path / "below"):
        with pytest.raises(ValueError, match="out must be a directory that can be written"):
            demo.prepare_out(out)
    assert path.read_text(encoding="ascii") == "keep"


def test_write_whole_that_fails_keeps_old_content_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    curves.write_whole(path, b"old")

    def full(self: Path, target: Path) -> Path:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        curves.write_whole(path, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    assert path.read_bytes() == b"old"


def test_files_without_matplotlib_lack_the_picture_of_an_earlier_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "curves.png").write_bytes(b"of earlier runs")
    monkeypatch.setattr(curves.importlib.util, "find_spec", lambda name: None)
    assert demo.write_files({}, [], tmp_path) is False
    assert not (tmp_path / "curves.png").exists()
    assert (tmp_path / "metrics.csv").read_bytes() == b"model,step,tokens,key,value\n"


def test_printable_shows_no_control_characters() -> None:
    assert demo.printable(b"a\x1b[31m\tb\r\n\xff\x00") == "a\ufffd[31m\tb\ufffd\n\ufffd\ufffd"


def test_interrupted_demo_leaves_an_earlier_result_as_it_was(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_arm(arm: Any, *args: Any) -> Any:
        if arm.name == "byte_transformer":
            raise SystemExit(1)  # how Lightning ends an interrupted fit
        return arms.run_arm(arm, *args)

    earlier = {name: name.encode() for name in ("report.json", "curves.png", "diffusion_blocks.ckpt")}
    for name, content in earlier.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(demo, "run_arm", run_arm)
    with pytest.raises(KeyboardInterrupt):
        demo.run_demo("tiny", corpus, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in earlier} == earlier


def test_controls_end_as_the_running_average_of_their_rounds(tmp_path: Path) -> None:
    recipe, live = replace(BUDGETS["tiny"], val_batches=0), []

    class Live(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
            if trainer.global_step % recipe.sync_every == 0:
                live.append({name: tensor.detach().clone() for name, tensor in pl_module.named_parameters()})

    arm = arms.causal_block(recipe)
    module = arm.make_module()
    data = ByteDataModule(window_bytes=recipe.window_bytes, batch_size=recipe.batch_size)
    arms.fit_trainer(arm, recipe, [Live()], arms.fresh_logger(tmp_path, "log")).fit(module, datamodule=data)
    average = live[0]
    for num_rounds, newest in enumerate(live[1:], start=2):
        average = move_average(average, newest, num_rounds, recipe.average_decay)
    assert len(live) == 4 and not torch.equal(average["embed.weight"], live[-1]["embed.weight"])
    for name, tensor in module.named_parameters():
        torch.testing.assert_close(tensor.detach(), average[name])
