"""One run of ``benchmarks.pipeline_target``: a method, a corpus and a seed, from the first weights to the scores.

A run computes on one thread. The stages take turns at the lags that they have side by side (``lag="pipeline"``), which
gives the weights of an asynchronous run with ``lag="pinned"`` bit for bit, whatever else the machine does.
"""

import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import torch

from benchmarks.pipeline_corpora import Corpus
from lightning_blocktrain import BoundedHorizonStrategy, ByteDataModule, ByteTransformer

BITS = "bits_per_byte"

METHODS: dict[str, dict[str, Any] | None] = {
    "bp": None,
    "rgc": {},
    "rgc_final": {"consensus_weights": "final"},
    "rgc_private": {},
    "rgc_next": {"credit": "next_stage"},
    "rgc_next_final": {"credit": "next_stage", "consensus_weights": "final"},
    "rgc_next_private": {"credit": "next_stage"},
    "rgc_next_undelayed": {"credit": "next_stage", "lag": "newest"},
    "rgc_then_bp": {"schedule": "local_then_bp"},
    "rgc_next_then_bp": {"credit": "next_stage", "schedule": "local_then_bp"},
}
"""Per method, its options beside those that all have; None: Lightning's default strategy.

``rgc_next_undelayed`` is a control that no pipeline can be: stages take turns and learn from what is newest.
"""


@dataclass(frozen=True)
class Shape:
    """What is trained, and for how long.

    Args:
        num_layers: Layers.
        width: Width.
        num_stages: S.
        window_bytes: Bytes per window.
        batch_size: Windows per step.
        tokens: Tokens of a run, a multiple of those of a step.
        lr: Peak learning rate.
        num_evals: Evaluations on valid, spread evenly over the run; the last comes after it.
        eval_batches: Batches of each but the last.
        switch_frac: Share of the steps that stages learn locally, for the methods that go on with backpropagation.
        score_batches: Batches of the last evaluation on valid, and of test; None: all.
    """

    num_layers: int
    width: int
    num_stages: int
    window_bytes: int
    batch_size: int
    tokens: int
    lr: float
    num_evals: int
    eval_batches: int
    switch_frac: float
    score_batches: int | None = None

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a run."""
        return self.tokens // (self.batch_size * self.window_bytes)


class Curve(L.Callback):
    """Keeps the bits per token of every evaluation of a run.

    Args:
        step_tokens: Tokens of a step.
    """

    def __init__(self, step_tokens: int) -> None:
        self.points: list[tuple[int, float]] = []
        self._step_tokens = step_tokens

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the newest score."""
        bits = float(trainer.callback_metrics[f"val/{BITS}"])
        self.points.append((trainer.global_step * self._step_tokens, bits))


def strategy_options(options: dict[str, Any] | None, shape: Shape) -> dict[str, Any] | None:
    """Return a method's options with those that all have."""
    if options is None:
        return None
    usual: dict[str, Any] = {"method": "rgc", "mode": "serial", "lag": "pipeline", "num_stages": shape.num_stages}
    if "schedule" in options:
        usual["switch_frac"] = shape.switch_frac
    return {**usual, "threads_per_stage": 1, **options}


def strategy_of(options: dict[str, Any] | None, shape: Shape) -> Any:
    """Return the strategy with a method's options."""
    whole = strategy_options(options, shape)
    return "auto" if whole is None else BoundedHorizonStrategy(**whole)


def train(corpus: Corpus, method: str, seed: int, shape: Shape, with_test: bool) -> dict[str, Any]:
    """Train once with a method of ``METHODS`` and return the row of the run; see ``train_with``."""
    exits = "norm" if "private" in method else "shared"
    row = train_with(corpus, METHODS[method], exits, seed, shape, with_test)
    return {**asdict(shape), "corpus": corpus.name, "method": method, "seed": seed, **row}


def train_with(
    corpus: Corpus, options: dict[str, Any] | None, exits: str, seed: int, shape: Shape, with_test: bool
) -> dict[str, Any]:
    """Train once and return what was found: the curve on valid, both scores, seconds of computing.

    Args:
        corpus: The text.
        options: The method's, as in ``METHODS``.
        exits: How stages read out; see ``ByteTransformer``.
        seed: Of the first weights and of the data order; methods of one seed share both.
        shape: The rest.
        with_test: Whether to score test too: the confirmation alone looks at it.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    L.seed_everything(seed, verbose=False)
    module = ByteTransformer(
        exits=exits,  # type: ignore[arg-type]
        num_layers=shape.num_layers,
        width=shape.width,
        num_heads=max(1, shape.width // 32),
        window_bytes=shape.window_bytes,
        lr=shape.lr,
        warmup_steps=min(50, shape.num_steps // 10),
    )
    data = ByteDataModule(window_bytes=shape.window_bytes, batch_size=shape.batch_size, seed=seed, **corpus.options)  # type: ignore[arg-type]
    curve = Curve(shape.batch_size * shape.window_bytes)
    trainer = _trainer(
        strategy=strategy_of(options, shape),
        max_steps=shape.num_steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        callbacks=[curve],
        limit_val_batches=shape.eval_batches,
        val_check_interval=max(1, shape.num_steps // shape.num_evals),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    start = time.process_time()
    trainer.fit(module, data)
    cpu_s = time.process_time() - start
    limit = 1.0 if shape.score_batches is None else shape.score_batches
    scorer = _trainer(limit_val_batches=limit, limit_test_batches=limit)
    [valid] = scorer.validate(module, data, verbose=False)
    tokens = shape.num_steps * shape.batch_size * shape.window_bytes
    points = [point for point in curve.points if point[0] < tokens]
    return {
        "curve": [*points, (tokens, valid[f"val/{BITS}"])],
        "valid": valid[f"val/{BITS}"],
        "test": scorer.test(module, data, verbose=False)[0][f"test/{BITS}"] if with_test else None,
        "cpu_s": cpu_s,
        "corpus_sha256": data.corpus_info.sha256,
    }


def _trainer(**options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
