"""What is predicted of served shapes, against real models and real messages."""

import itertools
from dataclasses import astuple

import pytest

from lightning_blocktrain.models import ByteTransformer, DiffusionBlocks
from lightning_blocktrain.models.block_files import entries_of
from lightning_blocktrain.models.generation import Sampling, Walk
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.serving import machine as machine_module
from lightning_blocktrain.serving.client import SweepClient
from lightning_blocktrain.serving.errand import Errand
from lightning_blocktrain.serving.machine import measured_machine
from lightning_blocktrain.serving.plan import (
    MESSAGE_BYTES,
    Machine,
    Network,
    ServedShape,
    plan,
    walk_seconds,
)
from tests.serving.local import TOKEN, host_of, route_of, serving

FAST = Machine(1e12, 1e12, 0.0, 0.0)


def models(width: int = 32) -> list[tuple[Model, ServedShape]]:
    cut = {"num_layers": 6, "num_blocks": 3, "width": width, "window_bytes": 64}
    sweep = DiffusionBlocks(objective="denoise_features", p_span=0.5, **cut).eval()
    causal = ByteTransformer(**cut).eval()
    return [(sweep, ServedShape(width, 6, 3, 64)), (causal, ServedShape(width, 6, 3, 64, denoises=False))]


@pytest.mark.parametrize("width", [16, 64])
def test_parameters_are_those_of_the_models(width: int) -> None:
    for model, shape in models(width):
        assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("positions", [1, 40])
def test_bytes_of_messages_are_those_that_travel(positions: int) -> None:
    for model, shape in models(64):
        with serving(model, [0], [1], [2]) as servers, SweepClient(route_of(servers), TOKEN, chained=False) as client:
            before = client.traffic_bytes
            client.generate(bytes(positions), 1)
            sent, received = (after - start for after, start in zip(client.traffic_bytes, before, strict=True))
        # Step by step every state between two hosts comes here and goes on: both are counted.
        messages = shape.walk_bytes(positions, 1) + (shape.num_blocks - 1) * shape.state_bytes(positions)
        assert sent + received == pytest.approx(messages, abs=2 * MESSAGE_BYTES)


def test_memory_of_a_host() -> None:
    shape = ServedShape(512, 12, 3, 256, "bf16")
    # A layer's parameters by the specification; keys and values of 256 positions, 2 bytes each, in 4 layers.
    layer = 12 * 512**2 + 13 * 512
    assert shape.host_bytes(0) == 2 * (4 * layer + shape.interface_parameters)
    assert shape.host_bytes(10) - shape.host_bytes(0) == 10 * 4 * 2 * 256 * 512 * 2


def test_memory_of_a_host_is_that_of_its_tensors() -> None:
    for model, shape in models(64):
        entries = entries_of(model)
        held = [tensor for name in ("block0", "interface") for tensor in entries[name].values()]
        weights = sum(tensor.numel() * tensor.element_size() for tensor in held)
        host = host_of(model, [0])
        walk = Walk(0, (1, 2, 3), 0, 1, Sampling())
        host.run_together([Errand("me", 1, 1, walk, 3, 0, ())])
        [session] = host._sessions.values()
        kept = [cache for cache in session.caches if cache is not None]
        cached = sum(
            t.numel() * t.element_size() for cache in kept for t in (cache._keys, cache._values) if t is not None
        )
        assert len(kept) == 2 and cached > 0
        assert shape.host_bytes(1) == weights + cached


def test_distance_alone_makes_plain_slower_by_the_length_of_the_output() -> None:
    shape, far = ServedShape(512, 12, 3, denoises=False), Network(rtt_s=0.05)
    found = plan(shape, Machine(1e30, 1e30, 0.0, 0.0), far, 128)
    assert found.sweep_s == pytest.approx(4 * 0.025)
    assert found.plain_s / found.sweep_s == pytest.approx(128)


def test_time_grows_with_everything_that_takes_time() -> None:
    shape, network = ServedShape(256, 6, 3), Network(0.01, 1e6)
    base = walk_seconds(shape, FAST, network, 16, 16)
    slower = [
        walk_seconds(ServedShape(256, 12, 3), FAST, network, 16, 16),
        walk_seconds(ServedShape(512, 6, 3), FAST, network, 16, 16),
        walk_seconds(shape, Machine(1e9, 1e12, 0.0, 0.0), network, 16, 16),
        walk_seconds(shape, Machine(1e12, 1e9, 0.0, 0.0), network, 16, 16),
        walk_seconds(shape, Machine(1e12, 1e12, 1e-3, 0.0), network, 16, 16),
        walk_seconds(shape, Machine(1e12, 1e12, 0.0, 1e-3), network, 16, 16),
        walk_seconds(shape, Machine(1e12, 1e12, 0.0, 0.0, 1e-3), network, 16, 16),
        walk_seconds(shape, Machine(1e12, 1e12, 0.0, 0.0, 0.0, 1e-3), network, 16, 16),
        walk_seconds(shape, FAST, Network(0.02, 1e6), 16, 16),
        walk_seconds(shape, FAST, Network(0.01, 5e5), 16, 16),
        walk_seconds(shape, FAST, network, 32, 32),
    ]
    assert all(seconds > base for seconds in slower)
    assert walk_seconds(ServedShape(256, 6, 3, wire="bf16"), FAST, network, 16, 16) < base


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"num_blocks": 4}, "num_blocks must divide num_layers; got num_blocks=4, num_layers=6"),
        ({"width": 0}, "width=0"),
        ({"width": 511}, "an even number from 2 on, .*; got width=511"),
        ({"dtype": "int4"}, "dtype='int4'"),
        ({"wire": "fp16"}, "wire='fp16'"),
    ],
)
def test_a_shape_that_is_none_is_refused(numbers: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServedShape(**{"width": 64, "num_layers": 6, "num_blocks": 3, **numbers})  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [(0, 1), (1, 0), (200, 100)])
def test_an_output_that_does_not_fit_is_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="fit into the window together; got prompt_bytes="):
        plan(ServedShape(64, 6, 3), FAST, Network(), *lengths)


def test_speeds_stay_sane_where_a_layer_is_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "median_seconds", lambda work, repeats: (work() and 0.0) or 1e-3)
    monkeypatch.setattr(machine_module, "measured_walks", lambda *options: (1e-3, 0.0, 0.0))
    found = measured_machine(32, 16, repeats=1)
    # Every timing is the same: a tenth of it is left for the products of a layer.
    assert found.bytes_per_s == pytest.approx(ServedShape(32, 1, 1).layer_parameters * 4 / (found.layer_s / 10))


def test_a_measured_machine_has_speeds() -> None:
    machine = measured_machine(64, 16, repeats=1)
    found = astuple(machine)
    assert all(0 <= number < float("inf") for number in found)
    # What is left of two timings beside one another may be nothing on a busy machine; what is timed itself is not.
    timed = (machine.flops_per_s, machine.bytes_per_s, machine.layer_s, machine.hop_s)
    assert all(number > 0 for number in timed)
    assert all(a != b for a, b in itertools.combinations(timed, 2))
