import copy
import math

import pytest
import torch
from torch import Tensor

from lightning_blocktrain.rounds.merge import (
    NORM_PIECE,
    OuterSGD,
    Params,
    RoundRules,
    all_finite,
    as_params,
    clip_params,
    delta_norm,
    merge_replicas,
    trimmed_mean,
    weighted_mean,
)


def random_params(seed: int, scale: float = 1.0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(5, 3, generator=generator) * scale,
        "bias": torch.randn(3, generator=generator) * scale,
        "count": torch.tensor(seed),
    }


def test_weighted_mean_one_replica_is_bit_identical() -> None:
    replica = random_params(1)
    merged = weighted_mean([replica], [977], random_params(0))
    assert all(torch.equal(merged[name], replica[name]) for name in replica)


def test_weighted_mean_unequal_tokens_matches_fp64_formula() -> None:
    replicas = [random_params(seed) for seed in (1, 2, 3)]
    weights = [100, 300, 50]
    merged = weighted_mean(replicas, weights, random_params(0))
    expected = sum((r["weight"].double() * w for r, w in zip(replicas, weights, strict=True)), torch.zeros(5, 3)) / 450
    # Three products and two sums in fp32: a few units in the last place.
    torch.testing.assert_close(merged["weight"].double(), expected, rtol=1e-6, atol=1e-6)


def test_weighted_mean_equal_tokens_equals_uniform_bit_for_bit() -> None:
    replicas = [random_params(seed) for seed in (1, 2, 3)]
    by_tokens = weighted_mean(replicas, [777, 777, 777], random_params(0))
    uniform = weighted_mean(replicas, [1, 1, 1], random_params(0))
    assert all(torch.equal(by_tokens[name], uniform[name]) for name in uniform)


def test_weighted_mean_all_zero_weights_returns_master() -> None:
    master = random_params(0)
    merged = weighted_mean([random_params(1), random_params(2)], [0, 0], master)
    assert all(torch.equal(merged[name], master[name]) for name in master)


def test_weighted_mean_identical_replicas_change_nothing() -> None:
    replica = random_params(4)
    merged = weighted_mean([replica] * 5, [1] * 5, random_params(0))
    # Summing five and dividing by five rounds at most a few times.
    torch.testing.assert_close(merged["weight"], replica["weight"], rtol=3e-7, atol=0)


def test_weighted_mean_counters_take_maximum_and_keep_dtype() -> None:
    merged = weighted_mean([random_params(7), random_params(3)], [1, 1], random_params(0))
    assert merged["count"].dtype == torch.int64
    assert merged["count"].item() == 7


def test_trimmed_mean_one_wild_replica_is_ignored() -> None:
    replicas = [{"w": torch.tensor([float(value), -float(value)])} for value in (1, 2, 3, 4, 1000)]
    merged = trimmed_mean(replicas, trim_frac=0.2)
    assert merged["w"].tolist() == [3.0, -3.0]


def test_trimmed_mean_three_replicas_is_the_median_per_coordinate() -> None:
    replicas = [random_params(seed) for seed in (1, 2, 3)]
    stacked = torch.stack([replica["weight"] for replica in replicas])
    assert torch.equal(trimmed_mean(replicas, 0.1)["weight"], stacked.median(dim=0).values)


def test_trimmed_mean_any_replica_order_gives_same_bits() -> None:
    replicas = [random_params(seed) for seed in range(5)]
    assert torch.equal(trimmed_mean(replicas, 0.2)["weight"], trimmed_mean(replicas[::-1], 0.2)["weight"])


def test_trimmed_mean_extreme_frac_keeps_a_replica() -> None:
    replicas = [{"w": torch.tensor([float(value)])} for value in range(4)]
    assert trimmed_mean(replicas, 0.4999999999999999)["w"].item() == 1.5


def test_trimmed_mean_two_replicas_is_refused() -> None:
    with pytest.raises(ValueError, match="trimmed_mean needs at least 3 replicas; got num_replicas=2"):
        trimmed_mean([random_params(1), random_params(2)], 0.1)


def test_delta_norm_integers_are_left_out() -> None:
    master = {"w": torch.zeros(2), "b": torch.zeros(1), "n": torch.tensor(0)}
    assert delta_norm({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0]), "n": torch.tensor(99)}, master) == 5.0


def test_delta_norm_huge_values_do_not_overflow() -> None:
    assert delta_norm({"w": torch.full((4,), 1e38)}, {"w": torch.zeros(4)}) == pytest.approx(2e38, rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_delta_norm_one_nonfinite_value_is_not_finite(value: float) -> None:
    assert not math.isfinite(delta_norm({"w": torch.tensor([1.0, value])}, {"w": torch.zeros(2)}))


def test_delta_norm_empty_and_scalar_tensors_count() -> None:
    assert delta_norm({"e": torch.zeros(0), "s": torch.tensor(2.0)}, {"e": torch.zeros(0), "s": torch.tensor(0.0)}) == 2


def test_clip_params_long_delta_gets_the_norm_and_keeps_direction() -> None:
    master, params = random_params(0), random_params(1)
    clipped = clip_params(params, master, delta_norm(params, master), clip_norm=0.5)
    assert delta_norm(clipped, master) == pytest.approx(0.5, rel=1e-5)
    cosine = torch.cosine_similarity(
        (clipped["weight"] - master["weight"]).flatten(), (params["weight"] - master["weight"]).flatten(), dim=0
    )
    assert cosine.item() == pytest.approx(1.0, abs=1e-5)
    assert clipped["count"].item() == 1


def test_clip_params_short_delta_is_untouched() -> None:
    params = random_params(1)
    assert clip_params(params, random_params(0), norm=1.0, clip_norm=1.0) is params


def test_as_params_transposed_bf16_becomes_fp32_copy() -> None:
    source = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t().requires_grad_()
    copied = as_params({"w": source})["w"]
    assert copied.dtype == torch.float32 and not copied.requires_grad
    assert copied.tolist() == source.tolist()


@pytest.mark.parametrize(
    ("lr", "momentum", "nesterov"), [(0.7, 0.0, False), (1.0, 0.9, False), (0.7, 0.9, True), (0.3, 0.5, True)]
)
def test_outer_sgd_five_steps_equal_torch_sgd_bit_for_bit(lr: float, momentum: float, nesterov: bool) -> None:
    outer = OuterSGD(lr=lr, momentum=momentum, nesterov=nesterov)
    master, buffers = random_params(0), dict[str, Tensor]()
    oracle = torch.nn.Parameter(master["weight"].clone())
    reference = torch.optim.SGD([oracle], lr=lr, momentum=momentum, nesterov=nesterov, foreach=False)
    for seed in range(1, 6):
        merged = random_params(seed)
        oracle.grad = oracle.detach() - merged["weight"]
        reference.step()
        master, buffers = outer.step(master, merged, buffers)
        assert torch.equal(master["weight"], oracle.detach())
        assert master["count"].item() == seed


def test_outer_sgd_plain_returns_merged_bits() -> None:
    merged = random_params(1)
    master, buffers = OuterSGD().step(random_params(0, scale=1e6), merged, {})
    assert all(torch.equal(master[name], merged[name]) for name in merged)
    assert buffers == {}


def test_outer_sgd_step_leaves_its_arguments() -> None:
    outer = OuterSGD(lr=0.5, momentum=0.9, nesterov=True)
    master, merged = random_params(0), random_params(1)
    _, buffers = outer.step(master, merged, {})
    kept = copy.deepcopy((master, merged, buffers))
    outer.step(master, merged, buffers)
    for before, after in zip(kept, (master, merged, buffers), strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_merge_replicas_trimmed_rule_is_used() -> None:
    replicas = [{"w": torch.tensor([value])} for value in (0.0, 1.0, 50.0)]
    rules = RoundRules(deadline_s=1.0, merge="trimmed_mean")
    assert merge_replicas(replicas, [1, 1, 1], {"w": torch.zeros(1)}, rules)["w"].item() == 1.0


def test_merge_replicas_token_weighting_is_used() -> None:
    replicas = [{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}]
    rules = RoundRules(deadline_s=1.0, weighting="tokens")
    assert merge_replicas(replicas, [100, 300], {"w": torch.full((1,), -1.0)}, rules)["w"].item() == 3.0


def test_weighted_mean_leaves_out_a_replica_that_did_not_move_a_tensor() -> None:
    master = {"embed": torch.tensor([1.0, 2.0]), "readout": torch.tensor([0.0])}
    trained = {"embed": torch.tensor([5.0, 2.0]), "readout": torch.tensor([3.0])}
    beside = {"embed": master["embed"].clone(), "readout": torch.tensor([1.0])}
    merged = weighted_mean([trained, beside], [1, 1], master)
    assert torch.equal(merged["embed"], trained["embed"])
    assert torch.equal(merged["readout"], torch.tensor([2.0]))


def test_weighted_mean_of_replicas_that_moved_nothing_is_the_master() -> None:
    master = random_params(0)
    merged = weighted_mean([{name: tensor.clone() for name, tensor in master.items()}] * 3, [1, 2, 3], master)
    assert all(torch.equal(merged[name], master[name]) for name in master)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deadline_s": 0.0}, "deadline_s must be finite and above 0; got deadline_s=0.0"),
        ({"deadline_s": math.inf}, "deadline_s must be finite"),
        ({"deadline_s": math.nan}, "deadline_s must be finite"),
        ({"min_replicas": 0}, "min_replicas must be an int of at least 1"),
        ({"weighting": "samples"}, "weighting must be known; got weighting='samples'; choose uniform or tokens"),
        ({"merge": "median"}, "merge must be known"),
        ({"trim_frac": 0.5}, "trim_frac must be between 0 and 0.5"),
        ({"trim_frac": 0.0}, "trim_frac must be between 0 and 0.5"),
        ({"clip_norm": 0.0}, "clip_norm must be finite and above 0"),
        ({"outlier_factor": 1.0}, "outlier_factor must be finite and above 1"),
        ({"merge": "trimmed_mean", "weighting": "tokens"}, "weighting must be 'uniform'"),
    ],
)
def test_round_rules_bad_value_is_one_clear_error(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoundRules(**{"deadline_s": 1.0, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr must be finite and above 0"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"nesterov": True}, "nesterov needs momentum above 0"),
    ],
)
def test_outer_sgd_bad_value_is_one_clear_error(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OuterSGD(**arguments)  # type: ignore[arg-type]


def test_check_replicas_trimmed_mean_needs_three() -> None:
    rules = RoundRules(deadline_s=1.0, merge="trimmed_mean")
    rules.check_replicas(3)
    with pytest.raises(ValueError, match="needs 3 replicas; got num_replicas=2; use 3 or more"):
        rules.check_replicas(2)


@pytest.mark.parametrize("size", [0, 1, NORM_PIECE - 1, NORM_PIECE, 3 * NORM_PIECE + 5])
def test_delta_norm_in_pieces_is_that_of_the_whole(size: int) -> None:
    params, master = {"w": torch.randn(size)}, {"w": torch.randn(size)}
    whole = torch.linalg.vector_norm(params["w"] - master["w"], dtype=torch.float64).item()
    assert delta_norm(params, master) == pytest.approx(whole, rel=1e-12)


def test_all_finite_of_values_whose_sum_overflows_is_true() -> None:
    assert all_finite({"w": torch.full((9,), 3e38)})
    for bad in (math.nan, math.inf, -math.inf):
        assert not all_finite({"w": torch.tensor([3e38, 3e38, bad, 1.0])})
    assert not all_finite({"w": torch.tensor([math.inf, -math.inf])})


def test_as_params_without_a_copy_shares_what_has_the_form_already() -> None:
    tensors = {"w": torch.zeros(2), "half": torch.zeros(2, dtype=torch.bfloat16), "n": torch.tensor(1)}
    shared = as_params(tensors, copy=False)
    assert [shared[name].data_ptr() == tensors[name].data_ptr() for name in tensors] == [True, False, True]
    assert all(tensor.data_ptr() != tensors[name].data_ptr() for name, tensor in as_params(tensors).items())


def test_outer_sgd_leaves_spared_tensors_as_they_were_merged() -> None:
    outer = OuterSGD(0.7, 0.9, spared=["var"])  # type: ignore[arg-type]
    assert outer == OuterSGD(0.7, 0.9, spared=("var",))  # a list is what JSON makes of it
    master, buffers = {"w": torch.ones(2), "var": torch.ones(2)}, {}
    for _ in range(4):
        merged = {name: tensor * 0.1 for name, tensor in master.items()}
        master, buffers = outer.step(master, merged, buffers)
    assert torch.equal(master["var"], merged["var"])
    assert buffers.keys() == {"w"}
    assert (master["w"] < 0).all()  # what momentum would have made of it
