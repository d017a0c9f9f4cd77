"""What is logged of the batches that a pipeline has finished: their parts put together, and the names.

Owns no logger; the strategy says where the values go.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from lightning_blocktrain.pipeline.base import FinishedBatch
from lightning_blocktrain.pipeline.batches import num_samples


def num_samples_or_1(batch: Any) -> int:
    """Return the samples of a batch, 1 where its tensors disagree."""
    try:
        return num_samples(batch)
    except ValueError:
        return 1


@dataclass(frozen=True)
class DoneBatch:
    """A batch of the loader that every stage has learnt from, all parts together.

    Args:
        values: What is logged of it, by name.
        batch_size: Its samples.
        step_idx: The optimizer step that it counts towards.
    """

    values: dict[str, float]
    batch_size: int
    step_idx: int


class BatchLog:
    """Puts the parts of batches together and names what is logged of them."""

    def __init__(self) -> None:
        self.newest: list[FinishedBatch] = []
        self._expected: deque[tuple[list[float], int, int]] = deque()
        self._parts: list[FinishedBatch] = []

    def expect(self, shares: list[float], batch_size: int, step_idx: int) -> None:
        """Expect a batch in parts of these shares; a new training step has begun."""
        self._expected.append((shares, batch_size, step_idx))
        self.newest = []

    def take(self, finished: list[FinishedBatch]) -> list[DoneBatch]:
        """Return every batch whose last part is among ``finished``, oldest first."""
        self.newest += finished
        complete = []
        for part in finished:
            self._parts.append(part)
            shares, batch_size, step_idx = self._expected[0]
            if len(self._parts) == len(shares):
                values: dict[str, float] = {}
                for share, whole in zip(shares, self._parts, strict=True):
                    for name, value in logged_values(whole).items():
                        values[name] = values.get(name, 0.0) + share * value
                complete.append(DoneBatch(values, batch_size, step_idx))
                self._parts = []
                self._expected.popleft()
        return complete


def logged_values(batch: FinishedBatch) -> dict[str, float]:
    """Return what is logged of a batch: the final loss, and with several stages the local ones.

    Further scalars of ``stage_loss`` keep their names in the final stage and get ``/stage{s}`` in the others.
    """
    *upstream, final = batch.stages
    values = {"train/loss": final.loss, **final.extras}
    for report in upstream:
        values[f"train/local_loss/stage{report.stage_idx}"] = report.loss
        values.update({f"{name}/stage{report.stage_idx}": value for name, value in report.extras.items()})
    return values
