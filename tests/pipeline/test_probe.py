import contextlib

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_blocktrain.pipeline.probe import probe
from tests.pipeline.tiny import WIDTH, Layer, Tiny, batches, differing, state_of, tiny


def probed(module):
    return probe(module, batches(1)[0], contextlib.nullcontext)


def test_probe_returns_the_bytes_of_the_largest_hidden_state():
    class Widening(nn.Module):
        def forward(self, hidden):
            return hidden.repeat(1, 1, 4)

    class Narrowing(Layer):
        def forward(self, hidden):
            return super().forward(hidden[..., :WIDTH])

    module = tiny(layers=[Layer(), Widening(), Narrowing()])
    assert probed(module) == 4 * 3 * 4 * WIDTH * 4  # (B, T, 4 D) float32: a multiple of 64 bytes


def test_probe_sees_the_types_of_the_context():
    module = tiny(layers=[nn.Linear(WIDTH, 64)])
    module.readout = nn.Linear(64, 5)
    half = probe(module, batches(1)[0], lambda: torch.autocast("cpu", torch.bfloat16))
    assert half == 4 * 3 * 64 * 2
    assert probed(module) == 4 * 3 * 64 * 4


def test_probe_leaves_module_buffers_and_random_streams_alone():
    module = tiny(dropout=0.5, layers=[Layer(0.5), nn.BatchNorm1d(3)])
    before, stream = state_of(module), torch.get_rng_state()
    probed(module)
    assert differing(before, state_of(module)) == []
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(p.grad is None for p in module.parameters())
    assert module.training


class Returning(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, hidden):
        return self.output


@pytest.mark.parametrize(
    ("output", "got"),
    [
        (None, "NoneType"),
        ({"h": 1}, "dict"),
        (torch.ones(2, dtype=torch.int64), "a tensor of torch.int64"),
        ((), "tuple"),
    ],
)
def test_layer_that_returns_something_else_is_named(output, got):
    module = tiny(layers=[Layer(), Returning(output)])
    with pytest.raises(MisconfigurationException, match=rf"layer 1 \(Returning\) must return one floating.*got {got}"):
        probed(module)


def test_layer_that_takes_something_else_is_named():
    module = tiny(layers=[nn.Bilinear(WIDTH, WIDTH, WIDTH)])
    with pytest.raises(MisconfigurationException, match=r"layer 0 \(Bilinear\) must take one tensor and the keywords"):
        probed(module)


def test_layer_that_returns_a_tuple_is_let_pass():
    class Pair(Layer):
        def forward(self, hidden):
            return super().forward(hidden), None

    assert probed(tiny(layers=[Pair(), Pair()])) == 320  # 4 x 3 x 6 float32, aligned


def test_error_inside_a_layer_stays_what_it_is_and_names_the_layer():
    class Broken(Layer):
        def forward(self, hidden):
            return hidden + len(3)

    with pytest.raises(TypeError, match="has no len") as caught:
        probed(tiny(layers=[Layer(), Broken()]))
    assert caught.value.__notes__ == [
        f"In the trial run of the first batch: layer 1 (Broken), on a hidden state of shape (4, 3, {WIDTH})."
    ]


def test_layer_that_changes_the_width_is_told_by_the_next():
    with pytest.raises(RuntimeError) as caught:
        probed(tiny(layers=[nn.Linear(WIDTH, 2 * WIDTH), Layer()]))
    assert f"layer 1 (Layer), on a hidden state of shape (4, 3, {2 * WIDTH})" in caught.value.__notes__[0]


def test_readout_that_does_not_fit_is_named():
    class Odd(Tiny):
        def configure_blocks(self):
            return {"layers": self.layers, "readout": self.embed}

    with pytest.raises(RuntimeError) as caught:
        probed(Odd([Layer()]))
    assert "readout and stage_loss" in caught.value.__notes__[0]


def test_embedding_that_returns_something_else_is_refused():
    class Odd(Tiny):
        def stage_embed(self, batch):
            return [self.embed(batch["x"])]

    with pytest.raises(MisconfigurationException, match="stage_embed must return one floating-point tensor; got list"):
        probed(Odd([Layer()]))


@pytest.mark.parametrize(
    ("output", "got"),
    [
        (lambda logits: logits, r"a loss of shape \(4, 3, 5\)"),
        (lambda logits: 1.0, "float"),
        (lambda logits: {"total": logits.mean()}, "dict"),
        (lambda logits: torch.tensor(1), r"a loss of shape \(\)"),
    ],
)
def test_loss_that_is_no_scalar_is_refused(output, got):
    class Odd(Tiny):
        def stage_loss(self, logits, batch):
            return output(logits)

    with pytest.raises(MisconfigurationException, match=rf"stage_loss must return a scalar loss.*; got {got}"):
        probed(Odd([Layer()]))


def test_keywords_that_are_no_mapping_are_refused():
    class Odd(Tiny):
        def stage_kwargs(self, batch, hidden):
            return [1]

    with pytest.raises(MisconfigurationException, match=r"stage_kwargs must return a mapping.*got list"):
        probed(Odd([Layer()]))


def test_keywords_from_a_trainable_parameter_are_refused_by_name():
    class Odd(Tiny):
        def stage_kwargs(self, batch, hidden):
            return {"scale": self.embed.weight.sum()}

    with pytest.raises(MisconfigurationException, match=r"may not use trainable parameters.*a gradient in scale"):
        probed(Odd([Layer()]))
