"""What stages in processes meet at, used in one; the pipeline itself is in the contract's tests."""

import multiprocessing
import threading

import pytest
import torch
from torch import nn

from lightning_blocktrain.errors import NonFiniteError
from lightning_blocktrain.pipeline.account import StageClock
from lightning_blocktrain.pipeline.processes import Ends, ProcessLinks, SharedBoard, _portable, share, unshare
from lightning_blocktrain.pipeline.ring import make_ring
from lightning_blocktrain.pipeline.worker import Stopped
from tests.pipeline.tiny import differing, state_of, tiny

CONTEXT = multiprocessing.get_context("forkserver")


def board(num_kept=2, stop=None):
    return SharedBoard(CONTEXT, num_kept, [torch.zeros(2)], stop or threading.Event())


def test_board_keeps_the_newest_versions():
    stop = threading.Event()
    snapshots, mine = board(2, stop), torch.zeros(2)
    for version in range(3):
        snapshots.publish(version, [torch.full((2,), float(version))])
    assert snapshots.read(None, [mine]) == 2
    assert mine.tolist() == [2.0, 2.0]
    assert snapshots.read(1, [mine]) == 1
    assert mine.tolist() == [1.0, 1.0]
    stop.set()  # or it would wait
    with pytest.raises(Stopped):
        snapshots.read(0, [mine])


def test_board_reader_waits_for_the_version_it_asked_for():
    snapshots, mine, seen = board(), torch.zeros(2), []
    snapshots.publish(0, [torch.zeros(2)])
    reader = threading.Thread(target=lambda: seen.append(snapshots.read(1, [mine])))
    reader.start()
    snapshots.publish(1, [torch.ones(2)])
    reader.join(60)
    assert seen == [1]
    assert mine.tolist() == [1.0, 1.0]


def test_gradients_of_another_step_are_refused():
    stop = threading.Event()
    writer, reader = make_ring(CONTEXT, 2, 256, stop)
    orders, reports = make_ring(CONTEXT, 1, 64, stop), CONTEXT.Pipe(duplex=False)
    upstream = ProcessLinks(Ends(orders[1], None, writer, (), board(), reports[1]), StageClock())
    final = ProcessLinks(Ends(orders[1], None, None, (reader,), board(), reports[1]), StageClock())
    upstream.send_gradients(3, [torch.ones(2)])
    (gradient,) = final.receive_gradients(0, 3)
    assert gradient.tolist() == [1.0, 1.0]
    upstream.send_gradients(4, [torch.ones(2)])
    with pytest.raises(RuntimeError, match="the gradients of stage 0 are those of step 4, not 5"):
        final.receive_gradients(0, 5)


def test_share_and_unshare_keep_every_value_and_tie():
    module = tiny()
    module.layers[0].norm.register_buffer("seen", torch.arange(3))
    module.layers[1].linear.weight = module.layers[0].linear.weight
    before = state_of(module)
    share(module)
    assert all(tensor.is_shared() for tensor in module.state_dict().values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in module.state_dict().values()}) == 1
    assert differing(before, state_of(module)) == []
    unshare(module)
    assert not any(tensor.is_shared() for tensor in module.state_dict().values())
    assert differing(before, state_of(module)) == []
    assert module.layers[1].linear.weight is module.layers[0].linear.weight


def test_share_keeps_the_parameters_that_an_optimizer_holds():
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    share(module)
    module.weight.grad = torch.ones(2, 2)
    before = module.weight.detach().clone()
    optimizer.step()
    assert torch.equal(module.weight, before - 1)


class Foreign(Exception):
    """Of a module that the driver may not have."""


@pytest.mark.parametrize(
    ("cause", "kind", "text"),
    [
        (LookupError("gone"), LookupError, "gone"),
        (NonFiniteError("the loss"), NonFiniteError, "the loss"),
        (KeyError("name"), RuntimeError, "KeyError: 'name'"),
        (Foreign("odd"), RuntimeError, "Foreign: odd"),
        (SystemExit(3), RuntimeError, "SystemExit: 3"),
        (ExceptionGroup("two", [ValueError("a")]), RuntimeError, "ExceptionGroup: two (1 sub-exception)"),
    ],
)
def test_error_for_another_process_keeps_its_text(cause, kind, text):
    portable = _portable(cause)
    assert type(portable) is kind
    assert str(portable) == text
    assert type(cause).__name__ in portable.__notes__[0]
