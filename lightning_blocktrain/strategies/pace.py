"""A worker's sense of time in its round, on a real clock: when to send so as not to be late.

Owns the clock readings. Owns no rule (``rounds/pace.py``).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_blocktrain.rounds import pace as rule
from lightning_blocktrain.rounds.pace import LocalSteps


class Pace:
    """The clock of one worker.

    Args:
        local_steps: With ``fixed`` it is never time to send early.
        deadline_s: Of a round, where no coordinator says when it closes.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        local_steps: LocalSteps = "fixed",
        deadline_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local_steps = local_steps
        self._deadline_s = deadline_s
        self._clock = clock
        self._upload_s = 0.0
        self._began_at = 0.0
        self._limit_s = deadline_s
        self._closes_at: float | None = None

    def told(self, closes_in_s: float | None) -> None:
        """Note what a coordinator says, with masters, of the deadline; None says nothing."""
        if closes_in_s is not None:
            self._closes_at = self._clock() + closes_in_s

    def begin(self) -> None:
        """Note that the worker has its masters; of what it was told since the last time the newest word holds."""
        self._began_at = self._clock()
        self._limit_s = self._deadline_s if self._closes_at is None else self._closes_at - self._began_at
        self._closes_at = None

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Measure how long what is sent inside takes."""
        began_at = self._clock()
        yield
        self._upload_s = self._clock() - began_at

    def is_time_to_send(self, num_steps: int) -> bool:
        """Tell whether a worker that has taken ``num_steps`` since ``begin`` would be late after another one."""
        if self._local_steps == "fixed":
            return False
        return rule.is_time_to_send(self._clock() - self._began_at, num_steps, self._upload_s, self._limit_s)
