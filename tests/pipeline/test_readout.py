import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_blocktrain.pipeline.readout import consensus, consensus_weights, pinned_version


@given(st.sampled_from(["uniform", "depth", "final"]), st.integers(1, 24))
def test_named_weights_sum_to_one_and_the_final_stage_has_the_most(name, num_stages):
    weights = consensus_weights(name, num_stages)
    assert len(weights) == num_stages
    assert sum(weights) == pytest.approx(1)
    assert weights[-1] == max(weights)


def test_weights_of_three_stages_have_their_closed_form():
    assert consensus_weights("uniform", 3) == (1 / 3,) * 3
    assert consensus_weights("depth", 3) == (1 / 6, 2 / 6, 3 / 6)
    assert consensus_weights("final", 3) == (1 / 5, 1 / 5, 3 / 5)
    assert consensus_weights([1, 0, 3], 3) == (0.25, 0, 0.75)


@given(st.integers(1, 24))
def test_final_weight_is_more_than_half_and_the_others_are_equal(num_stages):
    weights = consensus_weights("final", num_stages)
    assert weights[-1] > 0.5
    assert set(weights[:-1]) <= {weights[0]}


def test_consensus_under_final_is_nearer_to_the_final_stage_than_under_depth_and_uniform():
    parts = gradients(4)
    distances = [
        sum(
            float((agreed - own).square().sum())
            for agreed, own in zip(consensus(parts, consensus_weights(name, 4)), parts[-1], strict=True)
        )
        for name in ("final", "depth", "uniform")
    ]
    assert distances == sorted(distances)
    assert distances[0] > 0


@pytest.mark.parametrize(
    "weights", [[], [1.0], [1.0, 1.0, 1.0], [1.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]]
)
def test_weights_that_are_not_one_number_per_stage_are_refused(weights):
    with pytest.raises(ValueError, match=r"one finite number of at least 0 per stage.*num_stages=2"):
        consensus_weights(weights, 2)


def test_weights_of_an_unknown_name_are_refused():
    with pytest.raises(ValueError, match="'depth', 'final' or one number per stage; got consensus_weights='last'"):
        consensus_weights("last", 2)


def gradients(num_stages):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2), (3,), ()]
    return [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(num_stages)
    ]


@pytest.mark.parametrize("weights", ["uniform", "depth", [0, 1, 0, 2]])
def test_consensus_is_the_weighted_sum_per_parameter(weights):
    parts, shares = gradients(4), consensus_weights(weights, 4)
    for idx, agreed in enumerate(consensus(parts, shares)):
        expected = sum(share * part[idx] for share, part in zip(shares, parts, strict=True))
        torch.testing.assert_close(agreed, expected, rtol=1e-14, atol=1e-15)  # float64, another order


@pytest.mark.parametrize("weights", ["uniform", "depth", "final"])
def test_consensus_of_a_parameter_that_some_do_not_use_is_the_mean_over_those_that_do(weights):
    parts, shares = gradients(4), consensus_weights(weights, 4)
    whole = consensus(parts, shares)
    missing = [[None, *part[1:]] if idx in (0, 2) else part for idx, part in enumerate(parts)]
    first, *rest = consensus(missing, shares)
    expected = (shares[1] * parts[1][0] + shares[3] * parts[3][0]) / (shares[1] + shares[3])
    torch.testing.assert_close(first, expected, rtol=1e-14, atol=1e-15)  # float64, another order
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(rest, whole[1:], strict=True))


def test_consensus_of_a_parameter_that_only_the_final_stage_uses_is_its_own_gradient():
    parts = gradients(3)
    alone = [[None, *part[1:]] for part in parts[:-1]]
    agreed = consensus([*alone, parts[-1]], consensus_weights("final", 3))
    torch.testing.assert_close(agreed[0], parts[-1][0], rtol=1e-14, atol=0)  # 1 up to rounding


def test_consensus_of_a_parameter_that_nobody_of_weight_uses_is_none():
    parts = [[torch.ones(2), None], [None, None]]
    assert consensus(parts, (0.0, 1.0)) == [None, None]


def test_consensus_of_one_stage_is_its_own_gradient_bit_for_bit():
    (own,) = gradients(1)
    for agreed, gradient in zip(consensus([own], (1.0,)), own, strict=True):
        assert torch.equal(agreed, gradient)


def test_consensus_leaves_what_it_was_given_alone():
    parts = gradients(3)
    before = [[g.clone() for g in part] for part in parts]
    for weights in ("uniform", "depth"):
        consensus(parts, consensus_weights(weights, 3))
    assert all(
        torch.equal(g, b) for part, kept in zip(parts, before, strict=True) for g, b in zip(part, kept, strict=True)
    )


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 8), st.data())
def test_pinned_lag_is_the_distance_to_the_final_stage_and_at_most_the_steps_since_the_drain(
    drained_at, since, num_stages, data
):
    stage_idx = data.draw(st.integers(0, num_stages - 1))
    lag = drained_at + since - pinned_version(drained_at + since, drained_at, stage_idx, num_stages)
    assert lag == min(since, num_stages - 1 - stage_idx)
