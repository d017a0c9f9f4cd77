"""When a worker sends what it has, so that it is not late: ``local_steps="until_deadline"``.

Owns the arithmetic, as functions of seconds. Owns no clock.
"""

import math
from typing import Literal, get_args

from lightning_blocktrain.errors import explain

LocalSteps = Literal["fixed", "until_deadline"]

TRANSFER_MARGIN = 1.5
"""A transfer is expected to take this many times what the last ones took."""


def check_local_steps(value: object) -> None:
    """Refuse what is no ``LocalSteps``.

    Raises:
        ValueError: Naming it.
    """
    if value not in get_args(LocalSteps):
        rule = "local_steps must be 'fixed' or 'until_deadline'"
        raise ValueError(explain(rule, f"local_steps={value!r}", "choose one"))


def affordable_steps(step_s: float, transfer_s: float, limit_s: float, sync_every: int) -> int:
    """Return how many steps of a round fit before its deadline, from 1 to ``sync_every``.

    Args:
        step_s: Seconds per step, 0 or more; infinity: none fits, and the one that is made will be late.
        transfer_s: Seconds that its transfers are expected to take, both ways.
        limit_s: Seconds from the opening of the round to its deadline.
        sync_every: Most steps of a round.
    """
    left_s = limit_s - TRANSFER_MARGIN * transfer_s
    if step_s == 0.0:
        return sync_every
    return max(1, min(sync_every, math.floor(left_s / step_s))) if math.isfinite(step_s) else 1


def is_time_to_send(elapsed_s: float, num_steps: int, transfer_s: float, limit_s: float) -> bool:
    """Tell whether another step would make this worker late.

    Args:
        elapsed_s: Since the worker has its masters.
        num_steps: Steps taken in that time, 1 or more.
        transfer_s: Seconds that the last upload took.
        limit_s: Seconds from when it had its masters to the deadline.
    """
    return elapsed_s + elapsed_s / num_steps + TRANSFER_MARGIN * transfer_s > limit_s
