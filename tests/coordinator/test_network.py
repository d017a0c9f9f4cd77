import math
from statistics import NormalDist

import pytest
import torch

from lightning_blocktrain.coordinator.network import (
    JITTER,
    PARTICIPATION,
    NetworkModel,
    WorkerLink,
    preset_network,
    update_bytes_of,
)


def test_round_s_without_jitter_is_the_sum_of_its_parts() -> None:
    link = WorkerLink(step_s=0.5, latency_s=0.25, bandwidth_bytes_per_s=100.0)
    assert link.round_s(num_steps=4, num_bytes=300) == 2.0 + 0.5 + 3.0


def test_round_s_with_jitter_has_the_lognormal_median_and_spread() -> None:
    link = WorkerLink(step_s=2.0, jitter=0.5)
    generator = torch.Generator().manual_seed(0)
    logs = torch.tensor([link.round_s(1, 0, link.pace(generator)) for _ in range(4000)], dtype=torch.float64).log()
    # Four standard errors of the mean and of the standard deviation at 4,000 draws.
    assert logs.mean().item() == pytest.approx(math.log(2.0), abs=4 * 0.5 / 4000**0.5)
    assert logs.std().item() == pytest.approx(0.5, abs=4 * 0.5 / 8000**0.5)


def test_round_s_dropout_share_never_arrives() -> None:
    link = WorkerLink(step_s=1.0, dropout=0.3)
    generator = torch.Generator().manual_seed(0)
    lost = sum(math.isinf(link.round_s(1, 0, link.pace(generator))) for _ in range(4000)) / 4000
    assert lost == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / 4000) ** 0.5)


def test_pace_draws_as_much_whatever_the_link() -> None:
    left, right = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    WorkerLink(step_s=1.0, dropout=1.0).pace(left)
    WorkerLink(step_s=9.0, jitter=1.0).pace(right)
    assert torch.equal(left.get_state(), right.get_state())


@pytest.mark.parametrize("name", ["mild", "wan", "harsh"])
def test_preset_probability_of_being_in_time_is_the_named_figure(name: str) -> None:
    link = preset_network(name, num_workers=3, deadline_s=20.0, sync_every=8, update_bytes=1000).links[0]
    median_s = 8 * link.step_s + 2 * link.latency_s + 2000 / link.bandwidth_bytes_per_s
    in_time = NormalDist().cdf(math.log(20.0 / median_s) / link.jitter)
    assert in_time == pytest.approx(PARTICIPATION[name], abs=1e-9)
    assert link.jitter == JITTER[name] and link.dropout == 0.0


def test_preset_lockstep_takes_half_the_deadline_and_offline_drops_all() -> None:
    lockstep, offline = (preset_network(name, 2, 20.0, 8, 1000).links for name in ("lockstep", "offline"))
    assert lockstep[0].round_s(8, 2000) == pytest.approx(10.0)
    assert [link.dropout for link in lockstep + offline] == [0.0, 0.0, 1.0, 1.0]


def test_preset_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="network='dsl'; choose lockstep, mild, wan, harsh, offline"):
        preset_network("dsl", 2, 20.0, 8, 1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 20.0, 8, 1000), "num_workers must be at least 1"),
        ((2, 0.0, 8, 1000), "deadline_s must be finite and above 0"),
        ((2, math.inf, 8, 1000), "deadline_s must be finite and above 0"),
        ((2, 20.0, 0, 1000), "sync_every must be at least 1"),
        ((2, 20.0, 8, 0), "update_bytes must be at least 1"),
    ],
)
def test_preset_bad_number_is_refused(arguments: tuple[int, float, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset_network("wan", *arguments)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step_s", -1.0),
        ("latency_s", math.nan),
        ("jitter", math.inf),
        ("bandwidth_bytes_per_s", 0.0),
        ("bandwidth_bytes_per_s", math.nan),
        ("dropout", 1.5),
        ("dropout", math.nan),
    ],
)
def test_worker_link_bad_value_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be"):
        WorkerLink(**{"step_s": 1.0, field: value})


def test_network_model_without_links_is_refused() -> None:
    with pytest.raises(ValueError, match="links must name every worker"):
        NetworkModel(())


def test_update_bytes_are_block_and_interface_in_merged_dtypes() -> None:
    masters = {
        "block0": {"w": torch.zeros(10, dtype=torch.bfloat16)},
        "block1": {"w": torch.zeros(5)},
        "interface": {"e": torch.zeros(3), "n": torch.zeros((), dtype=torch.int64)},
    }
    assert update_bytes_of(masters, 0) == 10 * 4 + 3 * 4 + 8
    del masters["interface"]
    assert update_bytes_of(masters, 1) == 5 * 4
