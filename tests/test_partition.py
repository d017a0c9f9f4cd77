import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scipy import stats
from torch import nn
from torchmetrics import MeanMetric

from lightning_blocktrain.partition import (
    as_layout,
    band_table,
    block_sigma_edges,
    block_slices,
    default_num_blocks,
    divisors,
    partition,
    sweep_sigmas,
    widened_band,
)
from lightning_blocktrain.protocols import BlockLayout

EDGES_1_10 = block_sigma_edges(3, 1.0, 10.0)


class Stack(nn.Module):
    """A stack of layers with buffers (BatchNorm's statistics), an embedding and a readout."""

    layers: Any  # a ModuleList of Sequentials: mypy knows a ModuleList's members as Modules only

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(num_layers))
        self.readout = nn.Linear(3, 5, bias=False)
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def layout(self, **fields: Any) -> BlockLayout:
        return BlockLayout(self.layers, self.readout, **fields)


def log_normal_probability(low: float, high: float) -> float:
    below, above = (stats.norm.cdf((math.log(sigma) + 1.2) / 1.2) for sigma in (low, high))
    return float(above - below)


# Layers into blocks.


@pytest.mark.parametrize(("num_layers", "expected"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 3), (7, 1), (10, 2), (12, 4)])
def test_default_num_blocks_is_the_largest_divisor_up_to_four(num_layers: int, expected: int) -> None:
    assert default_num_blocks(num_layers) == expected


def test_divisors_of_twelve_ascend() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@given(st.integers(1, 6), st.integers(1, 8))
def test_block_slices_cover_every_layer_once_in_order(layers_per_block: int, num_blocks: int) -> None:
    slices = block_slices(layers_per_block * num_blocks, num_blocks)
    layers = list(range(layers_per_block * num_blocks))
    assert [layers[s] for s in slices] == [
        layers[b * layers_per_block : (b + 1) * layers_per_block] for b in range(num_blocks)
    ]


@pytest.mark.parametrize("num_blocks", [5, 0, -3, 13])
def test_block_slices_not_dividing_names_the_choices(num_blocks: int) -> None:
    got = f"num_blocks={num_blocks}, num_layers=12; choose one of 1, 2, 3, 4, 6, 12"
    with pytest.raises(ValueError, match=f"num_blocks must divide num_layers; got {got}"):
        block_slices(12, num_blocks)


@pytest.mark.parametrize("num_layers", [0, -2])
def test_block_slices_without_layers_says_so(num_layers: int) -> None:
    with pytest.raises(ValueError, match="the model has no layers"):
        block_slices(num_layers, default_num_blocks(num_layers))


# Noise bands.


@pytest.mark.parametrize(
    ("sigma_min", "sigma_max", "num_blocks", "expected"),
    [
        (1.0, 10.0, 3, [10, 2.0711, 1.3436, 1]),
        (0.002, 80.0, 3, [80, 0.5050, 0.1796, 0.002]),
        (0.002, 80.0, 4, [80, 0.6766, 0.3012, 0.1341, 0.002]),
    ],
)
def test_sigma_edges_have_the_reference_values(
    sigma_min: float, sigma_max: float, num_blocks: int, expected: list[float]
) -> None:
    edges = block_sigma_edges(num_blocks, sigma_min, sigma_max)
    assert edges == pytest.approx(expected, abs=5e-5)  # the references are printed to four places
    assert (edges[0], edges[-1]) == (sigma_max, sigma_min)


@given(st.integers(1, 12), st.floats(0.002, 5.0), st.floats(1.5, 40.0))
def test_sigma_edges_descend_with_equal_probability(num_blocks: int, sigma_min: float, ratio: float) -> None:
    edges = block_sigma_edges(num_blocks, sigma_min, sigma_min * ratio)
    assert len(edges) == num_blocks + 1
    assert all(high > low for high, low in pairwise(edges))
    whole = log_normal_probability(edges[-1], edges[0])
    shares = [log_normal_probability(low, high) / whole for high, low in pairwise(edges)]
    # Probabilities near 1 carry an absolute rounding error of 1e-16 each.
    assert shares == pytest.approx([1 / num_blocks] * num_blocks, abs=1e-15 / whole + 1e-9)


@pytest.mark.parametrize(
    ("sigma_min", "sigma_max"), [(10, 1), (1, 1), (0, 10), (-1, 10), (math.nan, 10), (1, math.nan), (1, math.inf)]
)
def test_sigma_edges_empty_range_names_the_rule(sigma_min: float, sigma_max: float) -> None:
    words = rf"sigma_min must be positive and less than sigma_max.*got sigma_min={sigma_min}, sigma_max={sigma_max}"
    with pytest.raises(ValueError, match=words):
        block_sigma_edges(3, sigma_min, sigma_max)


def test_sigma_edges_range_without_probability_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a band of probability above 0; got sigma_min=1000000\.0"):
        block_sigma_edges(3, 1e6, 1e7)


def test_widened_band_without_overlap_is_the_band() -> None:
    assert [widened_band(EDGES_1_10, b, 0.0) for b in range(3)] == [(lo, hi) for _, lo, hi in band_table(EDGES_1_10)]


def test_widened_band_of_the_middle_block_has_the_closed_form() -> None:
    high, low = EDGES_1_10[1:3]
    a = (high / low) ** 0.1
    assert widened_band(EDGES_1_10, 1, 0.1) == pytest.approx((low / a, high * a), rel=1e-12)


def test_widened_band_at_the_ends_is_clamped_to_the_range() -> None:
    assert widened_band(EDGES_1_10, 0, 0.1)[1] == 10.0
    assert widened_band(EDGES_1_10, 2, 0.1)[0] == 1.0
    assert widened_band(EDGES_1_10, 1, 50.0) == (1.0, 10.0)


def test_widened_band_grows_with_gamma() -> None:
    widths = [high / low for low, high in (widened_band(EDGES_1_10, 1, gamma) for gamma in (0.0, 0.1, 0.2, 0.4))]
    assert all(narrow < wide for narrow, wide in pairwise(widths))


@pytest.mark.parametrize("gamma", [-0.1, math.nan])
def test_widened_band_bad_gamma_names_the_rule(gamma: float) -> None:
    with pytest.raises(ValueError, match=f"gamma must not be negative; got gamma={gamma}"):
        widened_band(EDGES_1_10, 0, gamma)


def test_sweep_sigmas_have_the_reference_values() -> None:
    assert sweep_sigmas(3, 1.0, 10.0) == pytest.approx([10, 1.623, 1], abs=5e-4)


def test_sweep_sigmas_of_one_block_is_sigma_max() -> None:
    assert sweep_sigmas(1, 1.0, 10.0) == (10.0,)


@given(st.integers(1, 12), st.floats(0.002, 5.0), st.floats(1.5, 40.0))
def test_sweep_sigmas_lie_in_the_band_of_their_block(num_blocks: int, sigma_min: float, ratio: float) -> None:
    sigma_max = sigma_min * ratio
    edges = block_sigma_edges(num_blocks, sigma_min, sigma_max)
    sigmas = sweep_sigmas(num_blocks, sigma_min, sigma_max)
    assert len(sigmas) == num_blocks
    assert all(low <= sigma <= high for sigma, (_, low, high) in zip(sigmas, band_table(edges), strict=True))


def test_band_table_lists_low_before_high() -> None:
    assert band_table((10.0, 2.0, 1.0)) == [(0, 2.0, 10.0), (1, 1.0, 2.0)]


# The declared layout.


def test_as_layout_plain_dict_equals_the_dataclass() -> None:
    stack = Stack(2)
    declared = {"layers": stack.layers, "readout": stack.readout, "num_blocks": 2, "prefix": "frozen"}
    assert as_layout(declared) == stack.layout(num_blocks=2, prefix="frozen")
    assert as_layout({"layers": stack.layers, "readout": stack.readout}) == stack.layout()


def test_as_layout_dataclass_is_passed_on() -> None:
    layout = Stack(2).layout()
    assert as_layout(layout) is layout


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({"layers": 1}, r"got the fields \['layers'\]"),
        ({"layers": 1, "readout": 1, "tails": 2}, r"got the fields \['layers', 'readout', 'tails'\]"),
        ({}, r"got the fields \[\]"),
        ({1: 2}, r"got the fields \[1\]"),
        (None, "got NoneType"),
    ],
)
def test_as_layout_wrong_fields_names_what_was_given(fields: Any, got: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"must return layers and readout.*{got}"):
        as_layout(fields)


@pytest.mark.parametrize("layers", [nn.ModuleList(), nn.Sequential(nn.Linear(1, 1)), [nn.Linear(1, 1)]])
def test_as_layout_layers_must_be_a_filled_module_list(layers: Any) -> None:
    words = f"layers must be a non-empty torch.nn.ModuleList; got layers={type(layers).__name__}"
    with pytest.raises(MisconfigurationException, match=words):
        as_layout({"layers": layers, "readout": nn.Identity()})


def test_as_layout_readout_must_be_a_module() -> None:
    with pytest.raises(MisconfigurationException, match=r"readout must be a torch.nn.Module; got readout=NoneType"):
        as_layout({"layers": Stack(1).layers, "readout": None})


def test_as_layout_unknown_prefix_is_named() -> None:
    stack = Stack(1)
    with pytest.raises(MisconfigurationException, match="prefix must be 'none' or 'frozen'; got prefix='live'"):
        as_layout({"layers": stack.layers, "readout": stack.readout, "prefix": "live"})


def test_as_layout_stem_must_be_a_module_before_a_frozen_prefix() -> None:
    stack = Stack(1)
    for stem, prefix, got in ((stack.embed, "none", "stem=Embedding, prefix='none'"), (1, "frozen", "stem=int")):
        declared = {"layers": stack.layers, "readout": stack.readout, "prefix": prefix, "stem": stem}
        with pytest.raises(MisconfigurationException, match=f"stem must be a torch.nn.Module.*got {got}"):
            as_layout(declared)


# Tensors into blocks and interface.


@given(st.integers(1, 4), st.integers(1, 5))
def test_partition_puts_every_tensor_in_exactly_one_place(layers_per_block: int, num_blocks: int) -> None:
    stack = Stack(layers_per_block * num_blocks)
    cut = partition(stack, stack.layout(), num_blocks)
    placed = Counter(name for names in (*cut.block_names, cut.interface_names) for name in names)
    assert placed == Counter(stack.state_dict().keys())
    assert cut.num_blocks == cut.layout.num_blocks == num_blocks
    for block_idx, names in enumerate(cut.block_names):
        homes = {int(name.split(".")[1]) // layers_per_block for name in names if name.startswith("layers.")}
        assert homes == {block_idx}
        assert len(names) == layers_per_block * len(stack.layers[0].state_dict())
    assert [layer for block in cut.blocks for layer in block] == list(stack.layers)
    assert set(cut.interface_names) == {"embed.weight", "readout.weight", "mask"}


def test_partition_nobody_chose_takes_the_default() -> None:
    stack = Stack(6)
    assert partition(stack, stack.layout()).num_blocks == 3


def test_partition_module_chose_takes_its_number() -> None:
    stack = Stack(6)
    assert partition(stack, stack.layout(num_blocks=6)).num_blocks == 6
    assert partition(stack, stack.layout(num_blocks=6), 6).num_blocks == 6


def test_partition_two_numbers_that_differ_are_both_named() -> None:
    stack = Stack(6)
    with pytest.raises(MisconfigurationException, match="strategy num_blocks=2, module num_blocks=3"):
        partition(stack, stack.layout(num_blocks=3), 2)


@pytest.mark.parametrize(("module_choice", "strategy_choice"), [(4, None), (None, 4), (0, None), (None, 0), (-1, None)])
def test_partition_number_that_does_not_divide_is_refused(module_choice: Any, strategy_choice: Any) -> None:
    stack = Stack(6)
    with pytest.raises(MisconfigurationException, match="num_blocks must divide num_layers"):
        partition(stack, stack.layout(num_blocks=module_choice), strategy_choice)


def test_partition_tied_across_blocks_names_both() -> None:
    stack = Stack(4)
    stack.layers[3][0].weight = stack.layers[0][0].weight
    with pytest.raises(
        MisconfigurationException, match=r"one block only; got tied layers.0.0.weight = layers.3.0.weight"
    ):
        partition(stack, stack.layout(), 2)


def test_partition_tied_inside_a_block_is_listed_once() -> None:
    stack = Stack(4)
    stack.layers[1][0].weight = stack.layers[0][0].weight
    cut = partition(stack, stack.layout(), 2)
    assert "layers.0.0.weight" in cut.block_names[0]
    assert "layers.1.0.weight" not in cut.block_names[0]


def test_partition_block_tied_to_the_interface_names_both() -> None:
    stack = Stack(2)
    stack.tail = nn.Linear(3, 3)
    stack.tail.bias = stack.layers[1][0].bias
    with pytest.raises(MisconfigurationException, match=r"tied layers.1.0.bias = tail.bias"):
        partition(stack, stack.layout(), 2)


def test_partition_embedding_tied_to_the_readout_stays_in_the_interface_once() -> None:
    stack = Stack(2)
    stack.readout.weight = stack.embed.weight
    assert set(partition(stack, stack.layout(), 2).interface_names) == {"embed.weight", "mask"}


def test_partition_shared_buffer_across_blocks_is_refused() -> None:
    stack = Stack(2)
    stack.layers[1][1].running_mean = stack.layers[0][1].running_mean
    with pytest.raises(MisconfigurationException, match="running_mean"):
        partition(stack, stack.layout(), 2)


def test_partition_layer_used_twice_is_refused() -> None:
    stack = Stack(2)
    stack.layers.append(stack.layers[0])
    with pytest.raises(MisconfigurationException, match=r"every layer must be a different submodule.*got 3 layers, 2"):
        partition(stack, stack.layout(), 3)


def test_partition_layers_outside_the_module_are_refused() -> None:
    stack = Stack(2)
    with pytest.raises(MisconfigurationException, match=r"every layer must be a different submodule.*got 2 layers, 0"):
        partition(stack, BlockLayout(Stack(2).layers, stack.readout), 2)


def test_partition_layers_reachable_by_two_paths_are_listed_once() -> None:
    stack = Stack(2)
    stack.first = stack.layers[0]
    cut = partition(stack, stack.layout(), 2)
    assert len(cut.block_names[0]) == len(cut.block_names[1]) == len(stack.layers[0].state_dict())
    assert set(cut.interface_names) == {"embed.weight", "readout.weight", "mask"}


def test_partition_eleven_layers_keeps_layer_1_and_layer_10_apart() -> None:
    stack = Stack(11)
    cut = partition(stack, stack.layout(), 11)
    assert all(name.startswith("layers.1.") for name in cut.block_names[1])
    assert all(name.startswith("layers.10.") for name in cut.block_names[10])


def test_partition_state_of_a_persistent_metric_is_left_alone() -> None:
    stack = Stack(2)
    stack.metric = MeanMetric()
    stack.metric.persistent(True)
    assert any(name.startswith("metric.") for name in stack.state_dict())
    assert set(partition(stack, stack.layout(), 2).interface_names) == {"embed.weight", "readout.weight", "mask"}


def test_partition_lists_parameters_that_the_module_leaves_out_of_its_state_dict() -> None:
    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(3, 2)
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {name: t for name, t in super().state_dict(*args, **kwargs).items() if "bias" not in name}

    module = Partial()
    cut = partition(module, BlockLayout(module.layers, module.embed))
    assert cut.interface_names == ("embed.weight",)
    assert [sorted(names) for names in cut.block_names] == [[f"layers.{b}.bias", f"layers.{b}.weight"] for b in (0, 1)]


# What a block reads.


@pytest.mark.parametrize(
    ("prefix", "lookahead", "read"),
    [
        ("none", 0, [(), (), (), ()]),
        ("frozen", 0, [(), (0,), (0, 1), (0, 1, 2)]),
        ("frozen", 1, [(1,), (0, 2), (0, 1, 3), (0, 1, 2)]),
        ("frozen", 9, [(1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]),
    ],
)
def test_partition_says_which_blocks_another_one_reads(prefix: Any, lookahead: int, read: list[Any]) -> None:
    stack = Stack(4)
    cut = partition(stack, stack.layout(prefix=prefix, lookahead=lookahead), 4)
    assert [cut.read_by(block_idx) for block_idx in range(4)] == read
    for block_idx in range(4):
        assert all(before < block_idx for before in cut.blocks_before(block_idx))
        assert all(after > block_idx for after in cut.blocks_after(block_idx))


@pytest.mark.parametrize(
    ("lookahead", "prefix", "words"),
    [
        *((lookahead, "frozen", "a number of blocks, 0 or more") for lookahead in (-1, 1.5, None, True, "1")),
        (1, "none", "needs a frozen prefix if it is not 0; got lookahead=1, prefix='none'"),
    ],
)
def test_as_layout_lookahead_must_be_a_number_of_blocks_with_a_frozen_prefix(
    lookahead: Any, prefix: str, words: str
) -> None:
    stack = Stack(2)
    declared = {"layers": stack.layers, "readout": stack.readout, "prefix": prefix, "lookahead": lookahead}
    with pytest.raises(MisconfigurationException, match=words):
        as_layout(declared)


def test_as_layout_takes_heads_in_a_module_list() -> None:
    stack = Stack(2)
    heads = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    assert as_layout(stack.layout(heads=heads)).heads == tuple(heads)


# The stem.


def test_partition_stem_belongs_to_block_0() -> None:
    stack = Stack(4)
    without = partition(stack, stack.layout(prefix="frozen"), 2)
    cut = partition(stack, stack.layout(prefix="frozen", stem=stack.embed), 2)
    assert set(cut.block_names[0]) == {"embed.weight", *without.block_names[0]}
    assert cut.block_names[1] == without.block_names[1]
    assert set(cut.interface_names) == {"readout.weight", "mask"}
    assert cut.blocks == ((stack.embed, *without.blocks[0]), without.blocks[1])
    assert cut.layout.stem is stack.embed and cut.layout.num_blocks == 2


def test_partition_stem_of_several_modules_brings_all_their_tensors() -> None:
    stack = Stack(2)
    stack.embed = nn.Sequential(nn.Embedding(5, 3), nn.BatchNorm1d(3))
    cut = partition(stack, stack.layout(prefix="frozen", stem=stack.embed), 2)
    assert {f"embed.{name}" for name in stack.embed.state_dict()} <= set(cut.block_names[0])
    assert set(cut.interface_names) == {"readout.weight", "mask"}
    placed = Counter(name for names in (*cut.block_names, cut.interface_names) for name in names)
    assert placed == Counter(stack.state_dict().keys())


def test_partition_stem_is_told_from_a_module_whose_name_begins_alike() -> None:
    stack = Stack(2)
    stack.embed_more = nn.Linear(2, 2)
    cut = partition(stack, stack.layout(prefix="frozen", stem=stack.embed), 2)
    assert set(cut.interface_names) == {"readout.weight", "mask", "embed_more.weight", "embed_more.bias"}


def test_partition_stem_that_is_no_submodule_is_refused() -> None:
    stack = Stack(2)
    with pytest.raises(
        MisconfigurationException, match=r"stem must be a submodule apart.*got stem=Embedding, shared: none"
    ):
        partition(stack, stack.layout(prefix="frozen", stem=nn.Embedding(5, 3)), 2)


def test_partition_stem_tied_to_the_readout_names_it() -> None:
    stack = Stack(2)
    stack.readout.weight = stack.embed.weight
    with pytest.raises(MisconfigurationException, match=r"with tensors of its own.*shared: readout.weight"):
        partition(stack, stack.layout(prefix="frozen", stem=stack.embed), 2)


def test_partition_stem_tied_to_a_later_layer_is_refused() -> None:
    stack = Stack(2)
    stack.layers[1][0].weight = nn.Parameter(torch.zeros(3, 3))
    stack.embed = nn.Linear(3, 3)
    stack.embed.weight = stack.layers[1][0].weight
    with pytest.raises(MisconfigurationException, match=r"tied embed.weight = layers.1.0.weight"):
        partition(stack, stack.layout(prefix="frozen", stem=stack.embed), 2)


def test_partition_stem_that_overlaps_with_layers_or_readout_is_refused() -> None:
    stack = Stack(2)
    for stem in (stack.readout, stack.layers, stack.layers[1]):
        with pytest.raises(MisconfigurationException, match="stem must be a submodule apart from layers and readout"):
            partition(stack, stack.layout(prefix="frozen", stem=stem), 2)


def test_partition_stem_with_a_buffer_that_others_hold_too_is_refused() -> None:
    stack = Stack(2)
    stack.embed.register_buffer("table", torch.zeros(2))
    stack.register_buffer("table", stack.embed.table)
    with pytest.raises(MisconfigurationException, match="shared: table"):
        partition(stack, stack.layout(prefix="frozen", stem=stack.embed), 2)


# Heads.


class Headed(Stack):
    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.exits = nn.ModuleList(nn.Linear(3, 5) for _ in range(num_layers - 1))


def test_partition_heads_belong_to_their_blocks() -> None:
    stack = Headed(3)
    heads = (stack.exits[0], None, stack.readout)
    cut = partition(stack, stack.layout(prefix="frozen", stem=stack.embed, heads=heads), 3)
    assert cut.blocks[0] == (stack.embed, stack.layers[0], stack.exits[0])
    assert cut.blocks[1:] == ((stack.layers[1],), (stack.layers[2], stack.readout))
    assert {"exits.0.weight", "exits.0.bias"} < set(cut.block_names[0])
    assert {n for n, _ in stack.readout.named_parameters(prefix="readout")} < set(cut.block_names[2])
    assert set(cut.interface_names) == {"exits.1.weight", "exits.1.bias", "mask"}
    everything = [*cut.interface_names, *(name for names in cut.block_names for name in names)]
    assert sorted(everything) == sorted(stack.state_dict())


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        (lambda s: (s.exits[0],), "heads must have one entry per block; got 1 heads, num_blocks=2"),
        (lambda s: (s.exits[0], s.exits[0]), "a head must be a submodule apart"),
        (lambda s: (s.layers[1], None), "a head must be a submodule apart"),
        (lambda s: (s.embed, None), "stem must be a submodule apart"),
        (lambda s: (nn.Linear(3, 5), None), "a head must be a submodule apart.*got a head=Linear"),
    ],
)
def test_partition_heads_that_are_not_their_blocks_own_are_refused(heads: Any, words: str) -> None:
    stack = Headed(2)
    with pytest.raises(MisconfigurationException, match=words):
        partition(stack, stack.layout(prefix="frozen", stem=stack.embed, heads=heads(stack)), 2)


@pytest.mark.parametrize("heads", [(1, None), nn.Linear(3, 5)])
def test_as_layout_heads_must_be_modules_or_none(heads: Any) -> None:
    stack = Headed(2)
    with pytest.raises(MisconfigurationException, match=r"heads must be a sequence of torch\.nn\.Module or None"):
        as_layout({"layers": stack.layers, "readout": stack.readout, "heads": heads})
