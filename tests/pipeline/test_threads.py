"""The mailbox and the snapshots of stages in one process; the pipelines themselves are in the contract's tests."""

import threading

import pytest
import torch

from lightning_blocktrain.pipeline.account import StageClock
from lightning_blocktrain.pipeline.threads import Exchange, Mailbox, SnapshotBoard, ThreadLinks
from lightning_blocktrain.pipeline.worker import Stopped


def in_thread(work):
    """Start ``work`` in a thread; return a function that waits for what it returned or raised."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except BaseException as exc:
            outcome.append(exc)

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(60)
        (value,) = outcome
        return value

    return result


class TestMailbox:
    def test_items_come_out_in_the_order_they_went_in(self):
        box = Mailbox(None, threading.Event())
        for item in range(5):
            assert box.put(item)
        assert [box.get() for _ in range(5)] == list(range(5))

    def test_full_box_refuses_after_the_timeout_and_keeps_what_it_has(self):
        box = Mailbox(2, threading.Event())
        assert box.put("a")
        assert box.put("b")
        assert not box.put("c", 0.0)
        assert not box.put("c", 0.02)
        assert [box.get(0), box.get(0), box.get(0)] == ["a", "b", None]

    def test_empty_box_gives_none_after_the_timeout(self):
        assert Mailbox(1, threading.Event()).get(0.02) is None

    def test_waiting_put_goes_on_when_there_is_room(self):
        box = Mailbox(1, threading.Event())
        box.put("a")
        result = in_thread(lambda: box.put("b"))
        assert box.get() == "a"
        assert result() is True
        assert box.get() == "b"

    def test_waiting_get_goes_on_when_an_item_comes(self):
        box = Mailbox(1, threading.Event())
        result = in_thread(box.get)
        box.put("a")
        assert result() == "a"

    def test_stop_ends_whoever_waits(self):
        stop = threading.Event()
        empty, full = Mailbox(1, stop), Mailbox(1, stop)
        full.put("a")
        results = [in_thread(empty.get), in_thread(lambda: full.put("b"))]
        stop.set()
        assert all(isinstance(result(), Stopped) for result in results)

    def test_stop_comes_before_items_that_wait(self):
        stop = threading.Event()
        box = Mailbox(2, stop)
        box.put("a")
        stop.set()
        with pytest.raises(Stopped):
            box.get()
        with pytest.raises(Stopped):
            box.put("b")


class TestSnapshotBoard:
    def test_newest_is_what_was_published_last(self):
        board = SnapshotBoard(3, threading.Event())
        for version in (0, 1, 2):
            board.publish(version, [torch.full((2,), float(version))])
        version, (tensor,) = board.read(None)
        assert (version, tensor.tolist()) == (2, [2.0, 2.0])

    def test_snapshot_is_a_copy_without_graph(self):
        board, live = SnapshotBoard(1, threading.Event()), torch.ones(2, requires_grad=True)
        board.publish(0, [live])
        with torch.no_grad():
            live.mul_(5)
        _, (tensor,) = board.read(None)
        assert tensor.tolist() == [1.0, 1.0]
        assert not tensor.requires_grad

    def test_only_the_kept_versions_can_be_read(self):
        stop = threading.Event()
        board = SnapshotBoard(2, stop)
        for version in range(4):
            board.publish(version, [torch.tensor(version)])
        assert board.read(2)[0] == 2
        assert board.read(3)[0] == 3
        stop.set()  # or it would wait
        with pytest.raises(Stopped):
            board.read(1)

    def test_reader_waits_for_the_version_it_asked_for(self):
        board = SnapshotBoard(3, threading.Event())
        board.publish(0, [torch.tensor(0)])
        result = in_thread(lambda: board.read(2))
        board.publish(1, [torch.tensor(1)])
        board.publish(2, [torch.tensor(2)])
        version, (tensor,) = result()
        assert (version, int(tensor)) == (2, 2)

    def test_stop_ends_a_reader_that_waits(self):
        stop = threading.Event()
        result = in_thread(lambda: SnapshotBoard(1, stop).read(None))
        stop.set()
        assert isinstance(result(), Stopped)


def test_gradients_of_another_step_are_refused():
    exchange = Exchange(2, 1)
    upstream, final = (ThreadLinks(exchange, idx, StageClock()) for idx in (0, 1))
    upstream.send_gradients(3, [torch.ones(2)])
    (gradient,) = final.receive_gradients(0, 3)
    assert gradient.tolist() == [1.0, 1.0]
    upstream.send_gradients(4, [torch.ones(2)])
    with pytest.raises(RuntimeError, match="the gradients of stage 0 are those of step 4, not 5"):
        final.receive_gradients(0, 5)


def test_snapshot_is_copied_into_the_stages_own_tensors():
    exchange = Exchange(2, 1)
    links = ThreadLinks(exchange, 0, StageClock())
    exchange.board.publish(4, [torch.ones(2)])
    mine = torch.zeros(2, requires_grad=True)
    assert links.read_snapshot(None, [mine]) == 4
    assert mine.tolist() == [1.0, 1.0]
