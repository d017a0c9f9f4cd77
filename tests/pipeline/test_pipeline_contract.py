"""The contract that every backend keeps, whoever carries the orders."""

import threading

import pytest
import torch
from torch import nn

from lightning_blocktrain.errors import StageError
from lightning_blocktrain.pipeline.orders import Clip
from lightning_blocktrain.pipeline.stage import plain_state
from tests.pipeline.tiny import (
    BACKENDS,
    THREADS,
    WIDTH,
    Gated,
    Layer,
    adam,
    batches,
    differing,
    hyper,
    sgd,
    shared_memory,
    slow,
    stage_threads,
    state_of,
    tiny,
    train,
)

ALL = [*BACKENDS, "groups"]
CONCURRENT = ["threads", "processes"]


def stages_in(backend: str) -> int:
    return 1 if backend == "groups" else 2


@pytest.mark.parametrize("backend", ALL)
def test_batches_are_finished_once_each_in_order_with_one_report_per_stage(launch, backend):
    module = tiny()
    optimizer = sgd(module)
    pipeline = launch(backend, module, optimizer=optimizer)
    finished = train(pipeline, optimizer, batches(6))
    assert [batch.batch_idx for batch in finished] == list(range(6))
    for batch in finished:
        assert [report.stage_idx for report in batch.stages] == list(range(stages_in(backend)))
        assert {report.batch_idx for report in batch.stages} == {batch.batch_idx}
        assert all({"top"} == set(report.extras) for report in batch.stages)
    assert pipeline.num_in_flight == 0
    assert pipeline.finished(wait=True) == []


@pytest.mark.parametrize("backend", ALL)
def test_first_losses_are_those_of_the_untrained_stages(launch, backend):
    module, (batch,) = tiny(), batches(1)
    half = tiny()
    half.layers = half.layers[:2]
    expected = [half.loss(batch).item(), module.loss(batch).item()][-stages_in(backend) :]
    pipeline = launch(backend, module)
    pipeline.learn(batch, 1.0)
    (finished,) = pipeline.finished(wait=True)
    # The groups' halves are averaged: a sum in another order.
    assert [report.loss for report in finished.stages] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("backend", ALL)
def test_drain_leaves_all_stages_at_the_same_number_of_steps_and_can_be_repeated(launch, backend):
    module = tiny()
    optimizer = adam(module)
    pipeline = launch(backend, module, optimizer=optimizer)
    for round_idx in (1, 2):
        train(pipeline, optimizer, batches(3, seed=round_idx))
        weights = state_of(module)
        reports = [pipeline.drain(with_state=True), pipeline.drain(with_state=True)]
        for drained in reports:
            assert [report.stage_idx for report in drained] == list(range(stages_in(backend)))
            states = [state for report in drained for state in report.optimizer_state.values()]
            assert {float(state["step"]) for state in states} == {3.0 * round_idx}
            assert len(states) == len(list(module.parameters()))
        assert {account.num_steps for account in pipeline.accounts} == {3 * round_idx}
        assert pipeline.num_steps == 3 * round_idx
        assert differing(weights, state_of(module)) == []


@pytest.mark.parametrize("backend", ALL)
def test_drain_after_an_interrupted_one_reports_the_state_that_it_asks_for(launch, monkeypatch, backend):
    def interrupt(done):
        raise KeyboardInterrupt

    module = tiny()
    optimizer = adam(module)
    pipeline = launch(backend, module, optimizer=optimizer)
    train(pipeline, optimizer, batches(2))
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pipeline.drain()
    reports = pipeline.drain(with_state=True)
    assert [report.stage_idx for report in reports] == list(range(stages_in(backend)))
    states = [name for report in reports for name in report.optimizer_state or {}]
    assert sorted(states) == sorted(name for name, _ in module.named_parameters())


@pytest.mark.parametrize("backend", ALL)
def test_drain_without_state_reports_none(launch, backend):
    reports = launch(backend, tiny()).drain()
    assert [report.optimizer_state for report in reports] == [None] * stages_in(backend)


@pytest.mark.parametrize("backend", ALL)
def test_close_twice_and_with_batches_in_flight_ends_every_stage(launch, backend):
    module = tiny()
    pipeline = launch(backend, module)
    before = shared_memory()
    for batch in batches(3):
        pipeline.learn(batch, 1.0)
    pipeline.step(hyper(sgd(module)), None)
    pipeline.close()
    pipeline.close()
    assert stage_threads() == []
    assert shared_memory() <= before  # while the closed pipeline is still there


def test_close_of_threads_ends_a_stage_after_the_pass_it_is_in(launch, make_gate):
    """What waits in front of the stage is left undone."""
    gate, entered, counted = make_gate("threads"), make_gate("threads"), []

    class Counting(Gated):
        def forward(self, hidden):
            counted.append(1)
            return super().forward(hidden)

    pipeline = launch("threads", tiny(layers=[Counting(gate, entered), Layer()]), sizes=(1, 1), slots=4)
    for batch in batches(4):
        pipeline.learn(batch, 1.0)
    entered.wait()
    closing = threading.Thread(target=pipeline.close)
    stopping = pipeline._exchange.stop
    closing.start()
    assert stopping.wait(60)
    gate.open()
    closing.join()
    assert len(counted) == 1


@pytest.mark.parametrize("backend", CONCURRENT)
@pytest.mark.parametrize("slots", [1, slow(3)])
def test_queue_in_front_of_a_blocked_stage_accepts_no_more_than_its_slots(launch, make_gate, backend, slots):
    """Each stage holds one order and has ``slots`` in front of it."""
    gate, entered = make_gate(backend), make_gate(backend)
    module = tiny(layers=[Layer(), Gated(gate, entered)])
    pipeline = launch(backend, module, sizes=(1, 1), slots=slots, timeout_s=1.0)
    accepted = 0
    with pytest.raises(StageError, match="stage_timeout_s"):
        for batch in batches(40):
            pipeline.learn(batch, 1.0)
            accepted += 1
    entered.wait()
    gate.open()
    assert accepted == 2 * (slots + 1)
    pipeline.drain()  # an accepted batch is not lost
    assert [batch.batch_idx for batch in pipeline.finished(wait=False)] == list(range(accepted))


@pytest.mark.parametrize("backend", CONCURRENT)
def test_stages_that_overlap_work_on_later_batches_while_one_is_blocked(launch, make_gate, backend):
    gate, entered = make_gate(backend), make_gate(backend)
    pipeline = launch(backend, tiny(layers=[Layer(), Gated(gate, entered)]), sizes=(1, 1))
    for batch in batches(3):
        pipeline.learn(batch, 1.0)
    entered.wait()
    assert pipeline.finished(wait=False) == []
    assert pipeline.num_in_flight == 3
    gate.open()
    assert [batch.batch_idx for batch in pipeline.finished(wait=True)][:1] == [0]
    pipeline.drain()


@pytest.mark.parametrize("backend", ["turns", "threads serial", slow("processes serial")])
def test_newest_snapshot_in_serial_has_no_lag(launch, backend):
    module = tiny()
    pipeline = launch(backend, module)
    finished = train(pipeline, sgd(module), batches(4))
    assert [[report.lag for report in batch.stages] for batch in finished] == [[0, 0]] * 4


@pytest.mark.parametrize("backend", ["turns", slow("processes serial")])
def test_snapshot_every_two_steps_is_one_step_old_every_other_time(launch, backend):
    module = tiny()
    pipeline = launch(backend, module, snapshot_every=2)
    finished = train(pipeline, sgd(module), batches(5))
    assert [batch.stages[0].lag for batch in finished] == [0, 1, 0, 1, 0]
    assert {batch.stages[1].lag for batch in finished} == {0}
    (after,) = train(pipeline, sgd(module), batches(1))
    assert after.stages[0].lag == 0  # a drain publishes too


@pytest.mark.parametrize("backend", BACKENDS)
def test_pinned_lag_is_the_natural_one_and_a_drain_resets_it(launch, backend):
    module = tiny()
    pipeline = launch(backend, module, sizes=(2, 1, 1), lag="pinned", first_step=7)
    for _ in range(2):
        finished = train(pipeline, sgd(module), batches(4))
        lags = [[report.lag for report in batch.stages] for batch in finished]
        assert lags == [[0, 0, 0], [1, 1, 0], [2, 1, 0], [2, 1, 0]]
    assert pipeline.num_steps == 15


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("method", ["rgc", slow("broadcast")])
def test_pinned_lag_gives_every_backend_the_weights_of_turns_bit_for_bit(launch, backend, method):
    ends = []
    for name in ("turns", backend):
        module = tiny()
        optimizer = adam(module)
        pipeline = launch(name, module, sizes=(2, 1, 1), method=method, lag="pinned", optimizer=optimizer)
        train(pipeline, optimizer, batches(8), Clip(0.1), batches_per_step=2)
        pipeline.close()
        ends.append(state_of(module))
    assert differing(*ends) == []
    assert differing(ends[0], state_of(tiny())) == list(ends[0])  # every tensor was trained


@pytest.mark.parametrize("backend", ["threads serial", "processes serial"])
def test_serial_stages_with_dropout_draw_the_same_numbers_as_turns(launch, backend):
    ends, streams = [], []
    for name in ("turns", backend):
        module = tiny(dropout=0.3)
        outside = torch.get_rng_state()
        pipeline = launch(name, module, random=True)
        finished = train(pipeline, sgd(module), batches(4))
        assert torch.equal(torch.get_rng_state(), outside)
        streams.append([report.random_state for report in pipeline.drain(with_state=True)])
        losses = [[report.loss for report in batch.stages] for batch in finished]
        pipeline.close()
        ends.append((losses, state_of(module)))
    assert ends[0][0] == ends[1][0]
    assert differing(ends[0][1], ends[1][1]) == []
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*streams, strict=True))
    assert not torch.equal(streams[0][0], streams[0][1])
    module = tiny()  # without dropout the losses are others: the comparison above saw random numbers
    plain = train(launch("turns", module), sgd(module), batches(4))
    assert [batch.stages[0].loss for batch in plain] != [losses[0] for losses in ends[0][0]]


@pytest.mark.parametrize("backend", ALL)
def test_optimizer_state_by_name_survives_drain_and_rebuild(launch, backend):
    """Against a run of the same pipeline that nobody interrupted."""
    lag = "newest" if backend == "groups" else "pinned"
    straight = tiny()
    optimizer = adam(straight)
    pipeline = launch(backend, straight, optimizer=optimizer, lag=lag)
    train(pipeline, optimizer, batches(3))
    train(pipeline, optimizer, batches(3, seed=2))
    pipeline.close()

    module = tiny()
    optimizer = adam(module)
    for seed in (1, 2):
        pipeline = launch(backend, module, optimizer=optimizer, lag=lag, first_step=3 * (seed - 1))
        assert optimizer.state == {}  # the stages have it
        train(pipeline, optimizer, batches(3, seed=seed))
        reports = pipeline.drain(with_state=True)
        optimizer.state = plain_state([report.optimizer_state for report in reports], module)
        pipeline.close()
    assert {float(state["step"]) for state in optimizer.state.values()} == {6.0}
    assert differing(state_of(module), state_of(straight)) == []


@pytest.mark.parametrize("backend", ["turns", slow("processes serial")])
def test_optimizer_state_of_more_tensors_than_descriptors_fit_in_a_message_survives(launch, backend):
    """A process takes at most 252 descriptors; this stage has state for over 500 parameters."""
    module = tiny(num_layers=140)
    optimizer = adam(module)
    for step in range(2):
        pipeline = launch(backend, module, sizes=(135, 5), optimizer=optimizer, first_step=step)
        train(pipeline, optimizer, batches(1))
        reports = pipeline.drain(with_state=True)
        optimizer.state = plain_state([report.optimizer_state for report in reports], module)
        pipeline.close()
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_hyperparameters_of_a_step_order_are_those_it_steps_with(launch, backend):
    """Two groups with a learning rate each; one of 0 freezes what is in it, in whichever stage it lies."""
    module = tiny()
    before = state_of(module)
    frozen = [*module.embed.parameters(), *module.readout.parameters()]
    optimizer = torch.optim.SGD([{"params": frozen}, {"params": module.layers.parameters()}], lr=0.5)
    pipeline = launch(backend, module, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    train(pipeline, optimizer, batches(2))
    moved = differing(before, state_of(module))
    assert moved == [name for name in before if name.startswith("layers")]


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("clip", [Clip(1e-3), Clip(1e-4, "value")])
def test_clip_bounds_what_one_step_moves(launch, backend, clip):
    module = tiny()
    before = state_of(module)
    pipeline = launch(backend, module)
    train(pipeline, sgd(module), batches(1), clip)
    after = state_of(module)
    halves = [list(before)] if backend == "groups" else [names_of(before, 0), names_of(before, 1)]
    for names in halves:
        gradient = torch.cat([(after[name] - before[name]).flatten() / 0.5 for name in names])
        size = gradient.norm() if clip.algorithm == "norm" else gradient.abs().max()
        assert float(size) == pytest.approx(clip.value, rel=1e-2)  # weights of size 1, steps of 1e-4


def names_of(state: dict[str, torch.Tensor], stage_idx: int) -> list[str]:
    first = ("embed", "layers.0", "layers.1")
    return [name for name in state if name.startswith(first) == (stage_idx == 0)]


def test_groups_follow_global_backpropagation(launch):
    plain, ours = tiny(), tiny()
    optimizer = sgd(plain)
    for batch in batches(10, size=5):
        optimizer.zero_grad()
        plain.loss(batch).backward()
        optimizer.step()
    train(launch("groups", ours), sgd(ours), batches(10, size=5))
    for name, tensor in state_of(ours).items():
        # The mean over 5 sequences, summed in parts of 3 and 2.
        torch.testing.assert_close(tensor, state_of(plain)[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", THREADS)
def test_fits_is_true_where_room_is_not_fixed(launch, backend):
    assert launch(backend, tiny()).fits(batches(1, size=10_000)[0])


def test_fits_is_false_for_a_batch_beyond_the_room_of_processes(launch):
    pipeline = launch("processes", tiny())
    assert pipeline.fits(batches(1, size=4)[0])
    assert not pipeline.fits(batches(1, size=1000)[0])


class Heavy(Layer):
    """Computes enough that what the clock leaves out is little beside it."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(1024, 1024)

    def forward(self, hidden):
        wide = self.wide(hidden.repeat(1, 1, 1024 // WIDTH + 1)[..., :1024])
        return super().forward(hidden) + wide[..., :WIDTH]


@pytest.mark.parametrize("backend", [*THREADS, slow("processes")])
def test_parts_of_a_stage_add_up_to_its_wall_time(launch, backend):
    """Within 1 % over the run: conservation, whatever the machine's speed."""
    module = tiny(layers=[Heavy(), Heavy()])
    optimizer = sgd(module)
    pipeline = launch(backend, module, sizes=(1, 1), optimizer=optimizer)
    train(pipeline, optimizer, batches(2, size=32))
    settled = pipeline.accounts
    train(pipeline, optimizer, batches(20, size=32))
    for before, after in zip(settled, pipeline.accounts, strict=True):
        spent = after - before
        assert spent.num_batches == spent.num_steps == 20
        assert abs(spent.closure_error) < 0.01
        assert spent.busy_s > 0
        assert 0 < spent.work_cpu_s <= 1.01 * (spent.busy_s + spent.copy_s + spent.optimizer_s)
