"""What a coordinator shows of a run is all there is, as plain values, and comes back whole."""

import json

import pytest

from lightning_blocktrain.coordinator.status import report_of, snapshot
from lightning_blocktrain.rounds import Verdict
from lightning_blocktrain.transport.base import Sender, WorkerFacts
from tests.coordinator.test_server import founded_desk
from tests.transport.lines import make_masters, moved, submission


def test_report_of_a_round_comes_back_whole_through_the_status() -> None:
    desk = founded_desk(num_workers=2)
    for worker_id in range(2):
        desk.service.join(WorkerFacts(worker_id), None, 1.0)
    update = submission(0, moved(make_masters(1)["block0"], 1))
    assert desk.service.submit("block0", Sender(0, 0), update, 2.0).verdict is Verdict.ACCEPTED
    assert desk.service.submit("block0", Sender(0, 0), update, 2.5).verdict is Verdict.DUPLICATE
    desk.service.leave(Sender(1, 0), 3.0)
    [report] = desk.service.reports
    shown = json.loads(json.dumps(snapshot(desk.service, 4.0), allow_nan=False))["entries"]["block0"]["last_round"]
    assert report_of(shown) == report
    assert report.counts == {Verdict.ACCEPTED: 1, Verdict.DUPLICATE: 1} and report.accepted_tokens == 40
    assert report.mean_delta_norm > 0 and (report.opened_at, report.closed_at) == (1.0, 3.0)
    assert (shown["participation"], shown["took_s"]) == (0.5, 2.0)


def test_status_tells_how_long_each_entry_is() -> None:
    entry = snapshot(founded_desk().service, 0.0)["entries"]["block0"]
    assert entry["num_bytes"] == pytest.approx(5 * 3 * 4 + 8)  # fp32 weights and one int64
