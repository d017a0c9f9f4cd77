import hashlib
import random

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningArgumentParser

from lightning_blocktrain.data import NAMED_CORPORA, ByteDataModule, CorpusInfo
from lightning_blocktrain.errors import CorpusError

CONTENT = bytes((7 * i + i // 251) % 256 for i in range(20_000))


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "c.bin").write_bytes(CONTENT)
    return str(tmp_path / "c.bin")


@pytest.fixture
def make(corpus, tmp_path):
    def build(**options):
        defaults = {"corpus": corpus, "window_bytes": 16, "batch_size": 4, "cache_dir": str(tmp_path / "cache")}
        return ByteDataModule(**{**defaults, **options})

    return build


def epoch_of(loader, epoch):
    loader.sampler.set_epoch(epoch)
    return [torch.cat(batch, dim=1).tolist() for batch in loader]


def test_corpus_info_reports_sizes_and_the_digest_of_all_splits(make):
    digest = hashlib.sha256(CONTENT).hexdigest()  # the splits are cut in order, so together they are the file
    assert make().corpus_info == CorpusInfo("c.bin", digest, {"train": 18_000, "val": 1000, "test": 1000})


def test_val_and_test_batches_come_from_their_own_splits_in_order(make):
    data = make()
    for loader, start in ((data.val_dataloader(), 18_000), (data.test_dataloader(), 19_000)):
        inputs = torch.cat([batch[0].flatten() for batch in loader])
        targets = torch.cat([batch[1].flatten() for batch in loader])
        num_bytes = 999 // 16 * 16
        assert bytes(inputs.tolist()) == CONTENT[start : start + num_bytes]
        assert bytes(targets.tolist()) == CONTENT[start + 1 : start + 1 + num_bytes]


def test_train_batches_are_int64_full_and_from_the_train_split(make):
    batches = list(make().train_dataloader())
    assert len(batches) == (18_000 // 16 - 1) // 4
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (4, 16)
        assert inputs.dtype == targets.dtype == torch.int64
        for row, target in zip(inputs, targets, strict=True):
            assert bytes([*row.tolist(), int(target[-1])]) in CONTENT[:18_000]


def test_train_order_same_seed_and_epoch_repeats_and_others_differ(make):
    first, again, other = make().train_dataloader(), make().train_dataloader(), make(seed=1).train_dataloader()
    assert epoch_of(first, 0) == epoch_of(again, 0)
    assert epoch_of(first, 3) == epoch_of(again, 3) != epoch_of(first, 0)
    assert epoch_of(other, 0) != epoch_of(first, 0)
    assert len(epoch_of(first, 1)) == len(epoch_of(first, 2))


def test_train_shards_together_are_the_unsharded_epoch(make):
    whole = epoch_of(make().train_dataloader(), 2)
    shards = [epoch_of(make(worker_idx=i, num_shards=3).train_dataloader(), 2) for i in range(3)]
    assert {len(shard) for shard in shards} == {len(whole) // 3}
    for j in range(len(whole) // 3 * 3):
        assert shards[j % 3][j // 3] == whole[j]


def test_train_loader_processes_give_the_same_batches(make):
    assert epoch_of(make(num_workers=2).train_dataloader(), 1) == epoch_of(make().train_dataloader(), 1)


def test_iterating_leaves_the_global_random_states_alone(make):
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    data = make()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        assert len(list(loader)) > 0
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()


def test_order_does_not_depend_on_the_global_seed(make):
    torch.manual_seed(1)
    first = epoch_of(make().train_dataloader(), 0)
    torch.manual_seed(2)
    assert first == epoch_of(make().train_dataloader(), 0)


class Recorder(L.LightningModule):
    """Remembers the windows it was given; one parameter, so that there is something to optimise."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = {"train": [], "val": [], "test": []}

    def step(self, split, batch):
        self.seen[split].append(torch.cat(batch, dim=1).tolist())
        return (self.weight * batch[0].float().mean()).sum()

    def training_step(self, batch, batch_idx):
        return self.step("train", batch)

    def validation_step(self, batch, batch_idx):
        self.step("val", batch)

    def test_step(self, batch, batch_idx):
        self.step("test", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def quiet_trainer(tmp_path, **options):
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )


def test_trainer_follows_the_epoch_order_and_runs_all_loops(make, tmp_path):
    model, data = Recorder(), make()
    trainer = quiet_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data, verbose=False)
    loader = make().train_dataloader()
    assert model.seen["train"] == epoch_of(loader, 0) + epoch_of(loader, 1)
    assert len(model.seen["val"]) == 2 * len(make().val_dataloader())
    assert len(model.seen["test"]) == len(make().test_dataloader())


def test_trainer_without_a_val_split_skips_validation(make, tmp_path):
    model = Recorder()
    quiet_trainer(tmp_path, max_steps=2).fit(model, datamodule=make(val_fraction=0.0))
    assert len(model.seen["train"]) == 2 and not model.seen["val"]


def test_trainer_overfitting_one_batch_repeats_it(make, tmp_path):
    model = Recorder()
    with pytest.warns(UserWarning, match="overfit"):
        quiet_trainer(tmp_path, max_epochs=2, overfit_batches=1).fit(model, datamodule=make())
    assert len(model.seen["train"]) == 2 and model.seen["train"][0] == model.seen["train"][1]


def test_trainer_test_without_a_test_split_is_one_clear_error(make, tmp_path):
    with pytest.raises(CorpusError, match=r"the test split of 'c\.bin'"):
        quiet_trainer(tmp_path).test(Recorder(), datamodule=make(test_fraction=0.0), verbose=False)


def test_checkpoint_holds_no_path_of_the_corpus(make, tmp_path):
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(Recorder(), datamodule=make())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert str(tmp_path).encode() not in (tmp_path / "last.ckpt").read_bytes()


def test_changed_file_is_noticed_and_an_unchanged_one_is_read_from_the_cache(make, corpus, tmp_path):
    first = make().corpus_info
    assert make().corpus_info == first
    assert len(list((tmp_path / "cache").iterdir())) == 1
    with open(corpus, "ab") as file:  # noqa: PTH123
        file.write(b"more")
    assert make().corpus_info.sha256 == hashlib.sha256(CONTENT + b"more").hexdigest()


def test_cache_dir_default_follows_the_environment(monkeypatch, corpus, tmp_path):
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "elsewhere"))
    ByteDataModule(corpus, 16, 4).prepare_data()
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_embedded_corpus_needs_no_argument(embedded):
    embedded.setup("fit")
    inputs, _ = next(iter(embedded.train_dataloader()))
    assert inputs.shape == (16, 256)
    assert embedded.corpus_info.name == "python-docs" == NAMED_CORPORA[0]
    assert embedded.corpus_info.split_bytes["train"] > 1_000_000


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("window_bytes", 0),
        ("batch_size", 0),
        ("eval_batch_size", 0),
        ("seed", -1),
        ("num_workers", -1),
        ("num_shards", 0),
    ],
)
def test_number_out_of_range_is_refused_at_construction(make, option, value):
    with pytest.raises(CorpusError, match=rf"{option} must be at least \d; got {option}={value}"):
        make(**{option: value})


def test_shard_out_of_range_is_refused_at_construction(make):
    with pytest.raises(ValueError, match="worker_idx=2, num_shards=2"):
        make(worker_idx=2, num_shards=2)


def test_empty_corpus_is_one_clear_error(make, corpus):
    with open(corpus, "wb"):  # noqa: PTH123
        pass
    with pytest.raises(CorpusError, match=r"train split of 'c\.bin'.*0 bytes = 0 windows"):
        make().setup("fit")


def test_train_split_shorter_than_a_batch_names_what_is_needed(make):
    make(val_fraction=0.0, test_fraction=0.0, batch_size=1249).setup("fit")
    with pytest.raises(CorpusError, match=r"20000 bytes = 1249 windows.*pass at least 20016 bytes"):
        make(val_fraction=0.0, test_fraction=0.0, batch_size=1250).setup("fit")


def test_val_split_shorter_than_a_window_is_refused(make):
    make(window_bytes=999).setup("fit")
    with pytest.raises(CorpusError, match=r"the val split of 'c\.bin' must hold one window.*got 1000 bytes"):
        make(window_bytes=1000).setup("fit")


def test_command_line_parses_paths_and_lists(corpus, tmp_path):
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(ByteDataModule, "data")
    parsed = parser.parse_args(
        [f"--data.train=[{corpus}]", "--data.val_fraction=0.1", f"--data.cache_dir={tmp_path}", "--data.seed=3"]
    )
    data = parser.instantiate_classes(parsed).data
    assert data.seed == 3
    assert data.corpus_info.split_bytes == {"train": 17_000, "val": 2000, "test": 1000}
