"""A small causal model with a random part, its data, and a Trainer that prints nothing."""

import multiprocessing
import multiprocessing.forkserver
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_blocktrain  # noqa: F401


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class UserModule(L.LightningModule):
    """A user's module with the contract: plain dict layout, every block reads the embedded input alone."""

    def __init__(self, num_layers: int = 4, width: int = 6, lr: float = 0.05, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Residual(width) for _ in range(num_layers))
        self.readout = nn.Linear(width, 16)
        self.dropout = dropout
        self.lr = lr

    def configure_blocks(self) -> Mapping[str, Any]:
        return {"layers": self.layers, "readout": self.readout}

    def _loss(self, batch: list[Tensor], layers: nn.ModuleList) -> Tensor:
        inputs, targets = batch
        hidden = F.dropout(self.embed(inputs), self.dropout, self.training)
        for layer in layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.readout(hidden).flatten(0, -2), targets.flatten())

    def block_training_step(self, batch: list[Tensor], batch_idx: int, block_idx: int) -> Tensor:
        size = len(self.layers) // self.hparams.get("blocks", 2)
        loss = self._loss(batch, self.layers[block_idx * size : (block_idx + 1) * size])
        self.log("local", loss)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch, self.layers)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch, self.layers))

    def stage_embed(self, batch: list[Tensor]) -> Tensor:
        return F.dropout(self.embed(batch[0]), self.dropout, self.training)

    def stage_loss(self, logits: Tensor, batch: list[Tensor]) -> Any:
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8),
                "interval": "step",
            },
        }


class OneBlock(UserModule):
    """The same with all layers in one block, so that the block loss is the whole model's."""

    def configure_blocks(self) -> Mapping[str, Any]:
        return {"layers": self.layers, "readout": self.readout, "num_blocks": 1}

    def block_training_step(self, batch: list[Tensor], batch_idx: int, block_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


class TwoBlocks(UserModule):
    """Four layers in two blocks."""

    def configure_blocks(self) -> Mapping[str, Any]:
        return {"layers": self.layers, "readout": self.readout, "num_blocks": 2}


class DropoutLayers(UserModule):
    """Every layer is random: each stage draws numbers of its own."""

    def __init__(self, num_layers: int = 4, width: int = 6, lr: float = 0.05, dropout: float = 0.2) -> None:
        super().__init__(num_layers, width, lr, 0.0)
        self.layers = nn.ModuleList(nn.Sequential(Residual(width), nn.Dropout(dropout)) for _ in range(num_layers))


class RecordingLogger(Logger):
    """Keeps every row that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        pass

    def of(self, name: str) -> list[tuple[int | None, float]]:
        return [(step, row[name]) for step, row in self.rows if name in row]


def tokens(num_sequences: int = 48, length: int = 5, seed: int = 0) -> TensorDataset:
    text = torch.randint(16, (num_sequences, length + 1), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(text[:, :-1], text[:, 1:])


def loader(num_sequences: int = 48, batch_size: int = 2, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(tokens(num_sequences), batch_size=batch_size, shuffle=shuffle)


@pytest.fixture
def make_trainer(tmp_path) -> Callable[..., L.Trainer]:
    def make(strategy: Any = "blocktrain", **options: Any) -> L.Trainer:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        defaults = {**quiet, "accelerator": "cpu", "max_epochs": 1, "default_root_dir": tmp_path}
        return L.Trainer(strategy=strategy, **{**defaults, "enable_checkpointing": False, **options})

    return make


BACKENDS = ["threads", pytest.param("processes", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", autouse=True)
def fork_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start one fork server for the slow tests of a module that ``STARTS_PROCESSES``: its start is slow."""
    slow = any(item.module is request.module and item.get_closest_marker("slow") for item in request.session.items)
    if not (slow and getattr(request.module, "STARTS_PROCESSES", False)):
        yield
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(["lightning_blocktrain.pipeline.preload"])
    multiprocessing.forkserver.ensure_running()
    yield
    multiprocessing.forkserver._forkserver._stop()


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def adam_steps(trainer: L.Trainer) -> set[float]:
    """Return the step counters in the optimizer's state, which the fit has gathered."""
    return {float(state["step"]) for state in trainer.optimizers[0].state.values()}


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    differing = [name for name in left if not torch.equal(left[name], right[name])]
    assert not differing


def fit(module: L.LightningModule, trainer: L.Trainer, train: Any = None, **options: Any) -> dict[str, Tensor]:
    L.seed_everything(5, verbose=False)
    trainer.fit(module, loader() if train is None else train, **options)
    return weights(module)


def seeded(make: Any, *args: Any, **options: Any) -> L.LightningModule:
    L.seed_everything(3, verbose=False)
    return make(*args, **options)
