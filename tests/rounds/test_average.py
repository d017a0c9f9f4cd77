"""The running average of masters."""

from typing import Any

import pytest
import torch

from lightning_blocktrain.rounds import Ledger, OuterSGD, Roster, RoundRules, Update
from lightning_blocktrain.rounds.average import FRESH, decay_after, move_average


def test_newest_of_few_masters_weighs_most_and_of_many_what_the_limit_leaves() -> None:
    assert decay_after(1, 0.9) == pytest.approx(0.1)
    assert decay_after(FRESH, 0.9) == pytest.approx(0.5)
    assert decay_after(10_000, 0.9) == 0.9
    assert decay_after(10_000, 0.0) == 0.0


def test_average_covers_about_the_last_tenth_of_the_rounds() -> None:
    """With a limit that is out of reach, the mean age of what is averaged is n / 10."""
    average, num_rounds = {"age": torch.zeros(1, dtype=torch.float64)}, 1000
    for n in range(1, num_rounds + 1):
        average = move_average(average, {"age": torch.tensor([float(n)], dtype=torch.float64)}, n, 0.9999)
    assert num_rounds - float(average["age"]) == pytest.approx(num_rounds / (FRESH + 1), rel=0.02)


def test_average_leaves_its_arguments_alone_and_takes_counts_as_they_are() -> None:
    average = {"w": torch.zeros(2), "count": torch.tensor(3)}
    master = {"w": torch.ones(2), "count": torch.tensor(7)}
    moved = move_average(average, master, 9, 0.75)
    assert torch.equal(moved["w"], torch.full((2,), 0.5)) and int(moved["count"]) == 7
    assert torch.equal(average["w"], torch.zeros(2)) and torch.equal(master["w"], torch.ones(2))


def ledger(decay: float, **more: torch.Tensor) -> Ledger:
    roster = Roster("run", "token")
    roster.join(0, 0)
    rules = RoundRules(deadline_s=10.0, average_decay=decay)
    return Ledger("block0", {"w": torch.zeros(3), **more}, rules, OuterSGD(), roster)


def close(kept: Ledger, value: float | None) -> None:
    kept.open([0], now=float(kept.version * 100))
    if value is not None:
        sent = Update(
            run_id="run",
            token="token",
            worker_id=0,
            incarnation=0,
            base_version=kept.version,
            num_steps=1,
            num_tokens=1,
            params={"w": torch.full((3,), value)},
        )
        kept.submit(sent, now=float(kept.version * 100 + 1))
    kept.close_if_due(now=float(kept.version * 100 + 50))


def test_ledger_averages_its_masters_and_a_lost_round_counts_too() -> None:
    kept = ledger(0.5)
    assert torch.equal(kept.average["w"], torch.zeros(3))
    expected = 0.0
    for n, value in enumerate([1.0, 3.0, None, 2.0], start=1):
        close(kept, value)
        master = float(kept.master["w"][0])
        expected = master + min(0.5, n / (n + FRESH)) * (expected - master)
        assert kept.average["w"] == pytest.approx(expected)
    assert kept.version == 4 and float(kept.master["w"][0]) == 2.0


def test_ledgers_average_shares_no_memory_with_its_master() -> None:
    kept = ledger(0.5, count=torch.tensor(3))
    for value in (None, None):
        assert all(kept.average[name].data_ptr() != tensor.data_ptr() for name, tensor in kept.master.items())
        close(kept, value)


def test_ledger_without_an_average_shows_its_master_and_keeps_nothing() -> None:
    kept = ledger(0.0)
    close(kept, 1.0)
    assert torch.equal(kept.average["w"], kept.master["w"])
    assert kept.state_dict()["average"] == {}


def test_ledger_goes_on_from_a_stored_average() -> None:
    kept, again = ledger(0.5), ledger(0.5)
    close(kept, 1.0)
    again.load_state_dict(kept.state_dict())
    assert torch.equal(again.average["w"], kept.average["w"])
    for one in (kept, again):
        close(one, 5.0)
    assert torch.equal(again.average["w"], kept.average["w"])
    assert not torch.equal(again.average["w"], again.master["w"])


def test_average_of_a_run_that_had_none_begins_with_the_master() -> None:
    plain, averaging = ledger(0.0), ledger(0.5)
    close(plain, 1.0)
    older = {name: value for name, value in plain.state_dict().items() if name != "average"}
    for state in (plain.state_dict(), older):
        averaging.load_state_dict(state)
        assert torch.equal(averaging.average["w"], plain.master["w"])


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan"), "0.9", None, True])
def test_decay_outside_its_range_is_refused(decay: Any) -> None:
    with pytest.raises(ValueError, match=r"average_decay must be in \[0, 1\); got average_decay="):
        RoundRules(deadline_s=1.0, average_decay=decay)
