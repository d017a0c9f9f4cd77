from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_blocktrain.pipeline.split import MIN_GAIN, balanced_sizes, cut_stages, even_sizes
from lightning_blocktrain.protocols import BlockLayout
from tests.pipeline.tiny import Layer, Tiny, tiny


def layout(module):
    return BlockLayout(**module.configure_blocks())


def cuts(num_layers, num_stages):
    """Yield every way to cut layers into contiguous stages."""
    if num_stages == 1:
        yield (num_layers,)
        return
    for size in range(1, num_layers - num_stages + 2):
        for rest in cuts(num_layers - size, num_stages - 1):
            yield (size, *rest)


def busiest(sizes, busy_s, new):
    """Return the largest predicted time of the stages ``new``, each layer at its stage's mean."""
    costs = [busy / size for size, busy in zip(sizes, busy_s, strict=True) for _ in range(size)]
    ends = [sum(new[:idx]) for idx in range(len(new) + 1)]
    return max(sum(costs[start:end]) for start, end in pairwise(ends))


sizes_and_times = st.lists(st.tuples(st.integers(1, 4), st.floats(1e-4, 10.0)), min_size=1, max_size=4)


@given(st.integers(1, 12), st.integers(0, 30))
def test_even_sizes_add_up_differ_by_at_most_one_and_descend(num_stages, more):
    sizes = even_sizes(num_stages + more, num_stages)
    assert len(sizes) == num_stages
    assert sum(sizes) == num_stages + more
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(sizes_and_times)
def test_balanced_sizes_add_up_and_are_never_worse(pairs):
    sizes, busy_s = zip(*pairs, strict=True)
    new = balanced_sizes(sizes, busy_s)
    assert len(new) == len(sizes)
    assert sum(new) == sum(sizes)
    assert min(new) >= 1
    assert busiest(sizes, busy_s, new) <= max(busy_s) * (1 + 1e-9)  # sums in another order


@given(sizes_and_times)
def test_balanced_sizes_are_the_best_of_all_cuts_or_unchanged(pairs):
    """Against a search of every cut."""
    sizes, busy_s = zip(*pairs, strict=True)
    best = min(busiest(sizes, busy_s, new) for new in cuts(sum(sizes), len(sizes)))
    new = balanced_sizes(sizes, busy_s)
    if new == sizes:
        assert best >= (1 - MIN_GAIN) * max(busy_s) * (1 - 1e-9)
    else:
        assert busiest(sizes, busy_s, new) == pytest.approx(best)


@pytest.mark.parametrize(
    ("sizes", "busy_s", "expected"),
    [
        ((3, 3), (1.0, 3.0), (4, 2)),
        ((2, 2), (1.0, 1.02), (2, 2)),
        ((1, 5), (1.0, 5.0), (3, 3)),
        ((4,), (1.0,), (4,)),
        ((2, 2), (0.0, 0.0), (2, 2)),
    ],
)
def test_balanced_sizes_of_known_times(sizes, busy_s, expected):
    assert balanced_sizes(sizes, busy_s) == expected


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 3), (1, 1, 1, 1)])
def test_cut_gives_every_tensor_to_exactly_one_stage(sizes):
    module = tiny()
    cut = cut_stages(module, layout(module), sizes)
    names = [name for stage in cut.names for name in stage]
    assert sorted(names) == sorted(module.state_dict())
    assert cut.num_stages == len(sizes)
    assert [s.stop - s.start for s in cut.slices] == list(sizes)


def test_cut_puts_the_embedding_first_and_the_readout_last():
    module = tiny()
    cut = cut_stages(module, layout(module), (1, 3))
    assert [name for name in cut.names[0] if not name.startswith("layers.0.")] == ["embed.weight"]
    readout = [name for name in module.state_dict() if name.startswith("readout")]
    assert list(cut.readout_names) == readout
    assert [name for name in cut.names[1] if not name.startswith("layers.")] == readout


def test_cut_takes_persistent_buffers_along():
    module = tiny()
    module.layers[3].register_buffer("seen", torch.zeros(1))
    module.readout.register_buffer("scale", torch.ones(1))
    module.layers[0].register_buffer("table", torch.ones(1), persistent=False)
    cut = cut_stages(module, layout(module), (2, 2))
    assert {"layers.3.seen", "readout.scale"} <= set(cut.names[1])
    assert "readout.scale" in cut.readout_names
    assert "layers.0.table" not in cut.names[0]


def tied() -> Tiny:
    module = tiny()
    module.readout[1].weight = module.embed.weight
    return module


def test_cut_refuses_a_readout_tied_to_the_embedding_by_name():
    module = tied()
    with pytest.raises(MisconfigurationException, match=r"tied embed\.weight = readout\.1\.weight; untie"):
        cut_stages(module, layout(module), (2, 2))


def test_cut_lets_one_module_be_registered_under_two_paths():
    module = tiny()
    module.backbone = nn.ModuleDict({"norm": module.readout[0]})
    cut = cut_stages(module, layout(module), (2, 2))
    assert set(cut.readout_names) == {name for name in cut.names[1] if not name.startswith("layers")}
    assert len(cut.readout_names) == 4


def test_cut_into_one_stage_allows_tied_weights():
    module = tied()
    assert "embed.weight" in cut_stages(module, layout(module), (4,)).names[0]


def test_cut_refuses_weights_tied_across_stages_only():
    module = tiny()
    module.layers[3].linear.weight = module.layers[2].linear.weight
    assert cut_stages(module, layout(module), (2, 2)).num_stages == 2
    with pytest.raises(MisconfigurationException, match=r"layers\.2\.linear\.weight = layers\.3\.linear\.weight"):
        cut_stages(module, layout(module), (3, 1))


def test_cut_refuses_a_readout_outside_the_module():
    module = tiny()
    other = BlockLayout(module.layers, nn.Linear(6, 5))
    with pytest.raises(MisconfigurationException, match="readout must be a submodule"):
        cut_stages(module, other, (2, 2))


def test_cut_of_a_readout_inside_another_module_finds_its_names():
    module = tiny(layers=[Layer(), Layer()])
    module.head = nn.ModuleDict({"inner": module.readout})
    del module.readout
    cut = cut_stages(module, BlockLayout(module.layers, module.head["inner"]), (1, 1))
    assert cut.readout_names == tuple(f"head.inner.{n}" for n in ("0.weight", "0.bias", "1.weight", "1.bias"))
