"""Tokens per second of training time: what was processed, and what was accepted into the model.

Owns the clock, the window and the formula. Refuses to multiply one rank's rate by the number of ranks, and to
count work that a merge refused: a strategy that trains in rounds is asked for its own totals (``ReportsRounds``),
under any other the target tokens of every batch are counted and summed over ranks.

What the clock covers: every batch from ``on_train_batch_start`` to ``on_train_batch_end`` and the gaps between
them (waiting for data, other callbacks, the end of an epoch). A gap in which validation ran or a checkpoint was
saved is left out whole. Not seen by a callback, and so counted as training: the saving of a weights-only
checkpoint, and of any checkpoint inside a batch. The time is that of this process: with simulated workers, which
take turns in it, the rates say how fast the simulation runs, not how fast that many machines would be.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import torch
from typing_extensions import override

from lightning_blocktrain.callbacks.rounds import ReportsRounds
from lightning_blocktrain.errors import explain
from lightning_blocktrain.metrics import count_tokens


class Mark(NamedTuple):
    """Cumulative counters at one moment of training time.

    Args:
        train_s: Seconds of training so far.
        steps: Lightning optimizer steps.
        worker_tokens: Tokens processed, summed over workers.
        accepted_tokens: Tokens of accepted updates, summed over workers.
    """

    train_s: float
    steps: int
    worker_tokens: int
    accepted_tokens: int


RATES = ("steps", "worker_tokens", "accepted_tokens")


def per_second(first: Mark, last: Mark) -> dict[str, float]:
    """Return the rates between two marks as ``steps_per_s`` and so on; nan if no time passed between them."""
    span_s = last.train_s - first.train_s
    if span_s <= 0:
        return {f"{name}_per_s": float("nan") for name in RATES}
    return {f"{name}_per_s": (getattr(last, name) - getattr(first, name)) / span_s for name in RATES}


@dataclass
class TrainClock:
    """Seconds of training, told by its owner what happens when; it reads no clock itself.

    Args:
        seconds: Training time so far.
    """

    seconds: float = 0.0
    _since: float = 0.0
    _interrupted: bool = False

    def start(self, now: float) -> None:
        """Begin at zero: a gap is open from ``now`` until the first batch."""
        self.seconds, self._since, self._interrupted = 0.0, now, False

    def batch_start(self, now: float) -> None:
        """Close a gap; it counts unless it was interrupted."""
        if not self._interrupted:
            self.seconds += now - self._since
        self._since = now

    def batch_end(self, now: float) -> None:
        """Close a batch, which always counts, and open a gap."""
        self.seconds += now - self._since
        self._since, self._interrupted = now, False

    def interrupt(self) -> None:
        """Leave the open gap out: something other than training runs in it."""
        self._interrupted = True


class Window:
    """Rates over the newest steps; accepted tokens only between the ends of rounds.

    Accepted tokens jump when a round ends. Cut anywhere else, a window holds a fraction of a round's time and all
    or none of its tokens.

    Args:
        window_steps: Steps that the window spans, at least 1; it reaches back further where rounds are longer.
        first: Counters at the start.
    """

    def __init__(self, window_steps: int, first: Mark) -> None:
        self.window_steps = window_steps
        self._steps: deque[Mark] = deque([first])
        self._rounds: deque[Mark] = deque([first])

    def add(self, mark: Mark, round_ended: bool) -> None:
        """Add the counters after a step, and say whether a round ended in it."""
        for marks in (self._steps, self._rounds) if round_ended else (self._steps,):
            marks.append(mark)
            # The second oldest must stay within reach, or the window would be shorter than asked for.
            while len(marks) > 2 and mark.steps - marks[1].steps >= self.window_steps:
                marks.popleft()

    def rates(self) -> dict[str, float]:
        """Return the rates by metric key; that of accepted tokens is absent before the end of the first round."""
        rates = per_second(self._steps[0], self._steps[-1])
        del rates["accepted_tokens_per_s"]
        if len(self._rounds) > 1:
            accepted = per_second(self._rounds[0], self._rounds[-1])["accepted_tokens_per_s"]
            rates["accepted_tokens_per_s"] = accepted
        return {f"throughput/{name}": rate for name, rate in rates.items()}


class AcceptedThroughput(L.Callback):
    """Log accepted tokens, processed tokens and steps per second of training time over a moving window.

    Under a strategy without rounds every processed token counts as accepted, so the same callback serves the
    controls; there it counts as ``metrics.count_tokens`` does (samples, if a batch shows no token ids and the module
    does not count) and sums the rates over ranks. Under rounds, ``throughput/accepted_tokens_per_s`` appears once the
    first round has ended.

    Args:
        window_steps: Optimizer steps that the window spans, at least 1.

    Raises:
        ValueError: If ``window_steps`` is below 1.
    """

    def __init__(self, window_steps: int = 50) -> None:
        if window_steps < 1:
            raise ValueError(
                explain("window_steps must be at least 1", f"window_steps={window_steps}", "choose for example 50")
            )
        self.window_steps = window_steps
        self._clock = TrainClock()
        self._rounds: ReportsRounds | None = None
        self._num_rounds = 0
        self._counted_tokens = 0
        self._first = self._last = Mark(0.0, 0, 0, 0)
        self._window = Window(window_steps, self._first)

    def summary(self) -> dict[str, float]:
        """Return totals and rates of the whole newest fit, its slow first steps included.

        Returns:
            ``train_s`` (seconds, as the module docstring defines them), ``steps``, ``worker_tokens``,
            ``accepted_tokens`` and, for each of the last three, its rate ``..._per_s`` (nan without any time).
        """
        first, last = self._first, self._last
        totals: dict[str, float] = {name: getattr(last, name) - getattr(first, name) for name in Mark._fields}
        return totals | per_second(first, last)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock and the counters anew."""
        self._rounds = trainer.strategy if isinstance(trainer.strategy, ReportsRounds) else None
        self._num_rounds = self._rounds.num_rounds_closed if self._rounds else 0
        self._counted_tokens = 0
        self._clock.start(time.perf_counter())
        self._first = self._last = self._mark(trainer)
        self._window = Window(self.window_steps, self._first)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Close the gap before the batch."""
        self._clock.batch_start(time.perf_counter())

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch and, after an optimizer step, log the rates of the window."""
        if self._rounds is None:
            self._counted_tokens += count_tokens(pl_module, batch)
        _wait_for(trainer.strategy.root_device)
        self._clock.batch_end(time.perf_counter())
        mark = self._mark(trainer)
        stepped = mark.steps > self._last.steps
        self._last = mark
        if not stepped:
            return
        self._window.add(mark, round_ended=self._round_ended())
        several = self._rounds is None and trainer.world_size > 1
        for name, value in self._window.rates().items():
            # Ranks share every step but not every token.
            summed = several and name != "throughput/steps_per_s"
            pl_module.log(name, value, on_step=True, on_epoch=False, sync_dist=summed, reduce_fx="sum")

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the gap that validation runs in out of the training time."""
        self._clock.interrupt()

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Leave the gap that a checkpoint is saved in out of the training time."""
        self._clock.interrupt()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Sum the totals over ranks, where each counted its own batches."""
        if self._rounds is None and trainer.world_size > 1:
            local = torch.tensor(self._last.worker_tokens, device=trainer.strategy.root_device)
            num_tokens = int(trainer.strategy.reduce(local, reduce_op="sum"))
            self._last = self._last._replace(worker_tokens=num_tokens, accepted_tokens=num_tokens)

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add a last round that the strategy closed after the last batch."""
        if self._rounds is not None:
            self._last = self._last._replace(accepted_tokens=self._rounds.accepted_tokens)
            self._rounds = None

    def _mark(self, trainer: L.Trainer) -> Mark:
        rounds = self._rounds
        if rounds is None:
            tokens = self._counted_tokens
            return Mark(self._clock.seconds, trainer.global_step, tokens, tokens)
        return Mark(self._clock.seconds, trainer.global_step, rounds.worker_tokens, rounds.accepted_tokens)

    def _round_ended(self) -> bool:
        if self._rounds is None:
            return True
        num_rounds_before, self._num_rounds = self._num_rounds, self._rounds.num_rounds_closed
        return self._num_rounds > num_rounds_before


def _wait_for(device: torch.device) -> None:
    # Kernels are queued: without this the host's clock would run ahead of the device.
    if device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.synchronize(device)
