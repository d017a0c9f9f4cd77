import math

import pytest

from lightning_blocktrain.rounds.pace import TRANSFER_MARGIN, affordable_steps, is_time_to_send


@pytest.mark.parametrize(("step_s", "expected"), [(0.0, 20), (0.1, 20), (1.0, 7), (7.0, 1), (100.0, 1), (math.inf, 1)])
def test_affordable_steps_leave_time_for_the_transfer(step_s: float, expected: int) -> None:
    assert affordable_steps(step_s, transfer_s=2.0, limit_s=7.0 + 2.0 * TRANSFER_MARGIN, sync_every=20) == expected


@pytest.mark.parametrize("step_s", [0.3, 0.9, 2.0])
def test_is_time_to_send_after_the_steps_that_are_affordable(step_s: float) -> None:
    limit_s, transfer_s = 10.0, 1.0
    num_steps = affordable_steps(step_s, transfer_s, limit_s, sync_every=1000)
    assert is_time_to_send(num_steps * step_s, num_steps, transfer_s, limit_s)
    earlier = num_steps - 1
    assert not is_time_to_send(earlier * step_s, earlier, transfer_s, limit_s)
