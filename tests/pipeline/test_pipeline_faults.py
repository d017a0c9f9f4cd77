"""Stages that fail, die or hang: the driver is told which and when, soon, and nothing is left."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_blocktrain.errors import NonFiniteError, StageError
from tests.pipeline import tiny as tools
from tests.pipeline.tiny import (
    BACKENDS,
    DEADLINE_S,
    THREADS,
    Gated,
    Layer,
    Sabotage,
    batches,
    differing,
    hyper,
    open_backend,
    sgd,
    shared_memory,
    slow,
    stage_threads,
    state_of,
    tiny,
    train,
)

ALL = [*BACKENDS, "groups"]
PROCESSES = [slow("processes serial"), "processes"]
FEW = [*THREADS, slow("processes serial"), slow("processes")]
"""For a failure that takes the way of others, shown to be the same in every backend."""


def failure_of(pipeline, module, num=6, batches_per_step=1):
    """Return what training raises, and check that it came in time and that the pipeline stays failed."""
    start = time.monotonic()
    with pytest.raises((StageError, MisconfigurationException)) as caught:
        train(pipeline, sgd(module), batches(num), batches_per_step=batches_per_step)
    assert time.monotonic() - start < DEADLINE_S
    with pytest.raises(type(caught.value)) as again:
        pipeline.learn(batches(1)[0], 1.0)
    assert again.value is caught.value
    start = time.monotonic()
    pipeline.close()
    assert time.monotonic() - start < DEADLINE_S
    assert stage_threads() == []
    return caught.value


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("stage_idx", [0, 1])
def test_layer_that_raises_is_named_with_stage_step_and_cause(launch, backend, stage_idx):
    layers = [Layer(), Layer()]
    layers[stage_idx] = Sabotage(tools.raises, on_pass=2)
    module = tiny(layers=layers)
    error = failure_of(launch(backend, module, sizes=(1, 1)), module)
    named = 0 if backend == "groups" else stage_idx
    assert str(error) == f"stage {named} failed at step 2: LookupError: this layer is broken"
    assert isinstance(error.__cause__, LookupError)


@pytest.mark.parametrize("backend", PROCESSES)
def test_error_from_another_process_brings_its_traceback(launch, backend):
    module = tiny(layers=[Layer(), Sabotage(tools.raises)])
    error = failure_of(launch(backend, module, sizes=(1, 1)), module)
    (note,) = error.__cause__.__notes__
    assert "Traceback" in note
    assert "in raises" in note


@pytest.mark.parametrize("backend", BACKENDS[-1:])
def test_error_whose_class_takes_more_than_a_text_keeps_its_text(launch, backend):
    module = tiny(layers=[Layer(), Sabotage(tools.raises_with_arguments)])
    error = failure_of(launch(backend, module, sizes=(1, 1)), module)
    assert str(error).startswith("stage 1 failed at step 1: ")
    assert "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff" in str(error)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_exit_in_a_layer_ends_the_run_and_not_the_driver(launch, backend):
    module = tiny(layers=[Layer(), Sabotage(tools.exits)])
    error = failure_of(launch(backend, module, sizes=(1, 1)), module)
    assert "stage 1 failed at step 1" in str(error)
    assert "SystemExit: 3" in str(error)


@pytest.mark.parametrize("backend", ALL)
def test_nan_loss_stops_before_the_update(launch, backend):
    module = tiny(layers=[Layer(), Sabotage(tools.becomes_nan)])
    error = failure_of(launch(backend, module, sizes=(1, 1)), module)
    named = 0 if backend == "groups" else 1
    assert f"stage {named} failed at step 1" in str(error)
    assert "the loss must be finite; got loss=nan" in str(error)
    assert isinstance(error.__cause__, NonFiniteError)
    assert all(tensor.isfinite().all() for tensor in state_of(module).values())


@pytest.mark.parametrize("backend", ALL)
def test_infinite_gradient_stops_before_the_update(launch, backend):
    module = tiny(layers=[Sabotage(tools.has_infinite_gradient), Layer()])
    error = failure_of(launch(backend, module, sizes=(1, 1)), module)
    assert "stage 0 failed at step 1: NonFiniteError: the gradient must be finite; got norm=" in str(error)
    assert all(tensor.isfinite().all() for tensor in state_of(module).values())


class InPlace(Layer):
    """Changes its input."""

    def forward(self, hidden):
        return super().forward(hidden.mul_(2.0))


@pytest.mark.parametrize("backend", FEW)
def test_layer_that_changes_its_input_in_place_is_refused_at_a_boundary(launch, backend):
    """In threads the stage before would learn from the changed hidden state."""
    module = tiny(layers=[Layer(), InPlace()])
    error = failure_of(launch(backend, module, sizes=(1, 1)), module)
    assert isinstance(error, MisconfigurationException)
    assert str(error).startswith("the layers of stage 1 may not change their input in place; got")


def test_layer_that_changes_its_input_in_place_is_let_pass_inside_a_stage(launch):
    module = tiny(layers=[Layer(), InPlace(), Layer()])
    finished = train(launch("threads", module, sizes=(2, 1)), sgd(module), batches(2))
    assert len(finished) == 2


class Idle(Layer):
    """Has a parameter that the loss does not reach."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


@pytest.mark.parametrize("backend", FEW)
def test_parameter_that_no_loss_reaches_is_named(launch, backend):
    module = tiny(layers=[Layer(), Idle()])
    error = failure_of(launch(backend, module, sizes=(1, 1)), module)
    assert isinstance(error, MisconfigurationException)
    assert "the loss of stage 1 must train every parameter of its layers" in str(error)
    assert "layers.1.unused.weight, layers.1.unused.bias" in str(error)


class Leaking(tools.Tiny):
    """Its loss uses the embedding, which stage 0 owns."""

    def stage_loss(self, logits, batch):
        return super().stage_loss(logits, batch)["loss"] + self.embed.weight.sum()


@pytest.mark.parametrize("backend", FEW)
def test_loss_that_reaches_another_stages_parameter_is_refused(launch, backend):
    module = Leaking([Layer(), Layer()])
    error = failure_of(launch(backend, module, sizes=(1, 1)), module)
    assert isinstance(error, MisconfigurationException)
    assert "the loss of stage 1 may train its own layers and the readout only; got a gradient in embed" in str(error)


def stage_process(stage_idx):
    """Return the process of a stage, of the children that are alive."""
    (found,) = [c for c in multiprocessing.active_children() if c.name == f"stage-{stage_idx}"]
    return psutil.Process(found.pid), found.sentinel


@pytest.mark.parametrize("backend", PROCESSES)
@pytest.mark.parametrize("stage_idx", [slow(0), 1, slow(2)])
def test_killed_idle_stage_is_named_at_the_next_call(launch, backend, stage_idx):
    """Its neighbours end as well, and may have done so before the driver looks."""
    module = tiny()
    pipeline = launch(backend, module, sizes=(2, 1, 1))
    train(pipeline, sgd(module), batches(2))
    process, sentinel = stage_process(stage_idx)
    process.kill()
    assert multiprocessing.connection.wait([sentinel], 60)
    error = failure_of(pipeline, module)
    assert f"stage {stage_idx} failed at step " in str(error)
    assert f"its process {process.pid} ended with exit code -9" in str(error)


@pytest.mark.parametrize("stage_idx", [1, slow(2)])
def test_killed_busy_stage_is_named_when_the_one_before_has_ended_too(launch, make_gate, stage_idx):
    """A stage that cannot pass an order on ends, and comes first in the driver's list."""
    gate, entered = make_gate("processes"), make_gate("processes")
    layers = [Layer(), Layer(), Layer()]
    layers[stage_idx] = Gated(gate, entered)
    module = tiny(layers=layers)
    pipeline = launch("processes", module, sizes=(1, 1, 1))
    pipeline.learn(batches(1)[0], 1.0)
    entered.wait()
    process, sentinel = stage_process(stage_idx)
    _, before = stage_process(stage_idx - 1)
    process.kill()
    assert multiprocessing.connection.wait([sentinel], 60)
    pipeline.learn(batches(1)[0], 1.0)
    assert multiprocessing.connection.wait([before], 60)
    error = failure_of(pipeline, module)
    assert f"stage {stage_idx} failed at step " in str(error)
    assert f"its process {process.pid} ended with exit code -9" in str(error)


@pytest.mark.slow  # as long as a stage is given to end by itself
def test_pipeline_closes_in_time_around_a_stage_that_hangs(launch, make_gate):
    """A process can be killed; its gate never opens."""
    gate, entered = make_gate("processes"), make_gate("processes")
    pipeline = launch("processes", tiny(layers=[Layer(), Gated(gate, entered)]), sizes=(1, 1))
    pipeline.learn(batches(1)[0], 1.0)
    entered.wait()
    start = time.monotonic()
    pipeline.close()
    assert time.monotonic() - start < DEADLINE_S


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_stage_without_a_report_in_time_is_an_error_that_says_how_long(launch, make_gate, backend):
    gate, entered = make_gate(backend), make_gate(backend)
    pipeline = launch(backend, tiny(layers=[Layer(), Gated(gate, entered)]), sizes=(1, 1), timeout_s=0.5)
    pipeline.learn(batches(1)[0], 1.0)
    with pytest.raises(StageError, match=r"stage_timeout_s=0.5 without a report at step 0 .*unfinished batch: \[0\]"):
        pipeline.drain()
    gate.open()


def test_module_that_cannot_be_pickled_is_refused_and_nothing_starts(launch):
    module = tiny()
    module.layers[0].hook = lambda hidden: hidden
    before = shared_memory()
    with pytest.raises(MisconfigurationException, match="backend='processes' pickles the module"):
        launch("processes", module)
    assert shared_memory() <= before
    assert [c for c in multiprocessing.active_children() if c.name.startswith("stage-")] == []


@pytest.mark.slow  # each pipeline starts a fork server
def test_pipeline_stops_the_fork_server_that_it_started_and_spares_anothers_stages():
    """Without the fixture: nobody has started a server before."""
    before = set(psutil.Process().children())
    module, other = tiny(), tiny()
    first = open_backend("processes", module)
    second = open_backend("processes", other)
    first.close()
    assert len(train(second, sgd(other), batches(2))) == 2
    second.close()
    multiprocessing.forkserver._forkserver._stop()  # it was left to its other children
    third = open_backend("processes", module)
    third.close()
    left = set(psutil.Process().children()) - before
    tracker = multiprocessing.resource_tracker._resource_tracker._pid
    assert {child.pid for child in left} <= {tracker}
    assert multiprocessing.forkserver._forkserver._forkserver_pid is None


DRIVER = """
import sys
from tests.pipeline.tiny import batches, name_semaphores, open_backend, sgd, tiny, train
import multiprocessing

if __name__ == "__main__":
    name_semaphores()
    module = tiny()
    pipeline = open_backend("processes", module)
    train(pipeline, sgd(module), batches(2))
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    for batch in batches(3):
        pipeline.learn(batch, 1.0)
    sys.stdin.read()  # until it is killed
"""


@pytest.mark.slow  # a fresh interpreter and a fork server
def test_stages_of_a_killed_driver_end(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as driver:
        children = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        family = psutil.Process(driver.pid).children(recursive=True)
        assert shared_memory(driver.pid)
        driver.kill()
        driver.wait()
    assert len(children) == 2
    _, alive = psutil.wait_procs({*children, *family}, timeout=DEADLINE_S)
    assert alive == []
    assert shared_memory(driver.pid) == set()


def test_threads_in_serial_and_in_turns_leave_the_drivers_thread_count_alone(launch):
    outside = torch.get_num_threads()
    for backend in ("turns", "threads"):
        module = tiny()
        train(launch(backend, module), sgd(module), batches(2))
    assert torch.get_num_threads() == outside


def test_groups_report_a_failure_after_all_groups_have_ended(launch, make_gate):
    """Group 0 fails at once; group 1 is still at work then, and must not be when the error arrives."""
    ended = []

    class Slow(Layer):
        def forward(self, hidden):
            if len(hidden) == 3:
                raise LookupError("this layer is broken")
            failed.wait(0.2)  # never set: long enough for an error that does not wait to overtake
            ended.append(1)
            return super().forward(hidden)

    failed = threading.Event()
    module = tiny(layers=[Slow()])
    pipeline = launch("groups", module)
    with pytest.raises(StageError, match="stage 0 failed at step 0: LookupError"):
        pipeline.learn(batches(1, size=5)[0], 1.0)
    assert ended == [1]


def test_failed_batch_leaves_the_weights_of_the_last_step(launch):
    module = tiny(layers=[Layer(), Sabotage(tools.raises, on_pass=2)])
    reference = tiny(layers=[Layer(), Sabotage(tools.raises, on_pass=9)])
    train(launch("turns", reference, sizes=(1, 1)), sgd(reference), batches(6)[:2])
    pipeline = launch("turns", module, sizes=(1, 1))
    with pytest.raises(StageError):
        for batch in batches(6):
            pipeline.learn(batch, 1.0)
            pipeline.step(hyper(sgd(module)), None)
    assert differing(state_of(module), state_of(reference)) == []
