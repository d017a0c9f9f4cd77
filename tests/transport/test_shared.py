"""Several coordinators that share a run, and lines that spread over them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_blocktrain.coordinator import SimulatedCoordinator, WorkerRound, preset_network
from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.coordinator.storage import Storage
from lightning_blocktrain.errors import (
    CoordinatorUnreachableError,
    NotFoundedError,
    RequestRefusedError,
    RunEndedError,
    SupersededError,
    TransportError,
)
from lightning_blocktrain.rounds import OuterSGD, Params, RoundRules, Verdict
from lightning_blocktrain.transport.base import Fetched, Transport, Welcome, WorkerFacts
from lightning_blocktrain.transport.http import HttpTransport
from lightning_blocktrain.transport.memory import MemoryHub, MemoryTransport
from lightning_blocktrain.transport.shared import SharedTransport, line_to
from tests.transport.lines import RULES, RUN, TOKEN, Clock, make_masters, make_terms, moved, same, served, submission

Split = Sequence[Sequence[str] | None]

ENDS: Split = (("block0", "block2", "interface"), ("block1",))
APART: Split = (("block1", "block0"), ("interface",), ("block2",))
NUM_BLOCKS = 3
OUTER = OuterSGD(0.7, 0.9, nesterov=True)


class Sharing:
    """Coordinators that share a run, by name, and the lines opened to all of them."""

    def __init__(self, kind: str, split: Split, stack: ExitStack, folder: Path | None = None) -> None:
        self.clock = Clock()
        self.serves = {f"c{idx}": served for idx, served in enumerate(split)}
        self._kind = kind
        self._stack = stack
        self._folder = folder
        self._hubs: dict[str, MemoryHub] = {}
        self._ports = dict.fromkeys(self.serves, 0)
        self._running: dict[str, ExitStack] = {}
        for name in self.serves:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a coordinator, again where it was before and from the state that it has."""
        desk = Desk(RUN, TOKEN, self._folder and Storage(self._folder / name), serves=self.serves[name])
        desk.resume(self.clock())
        if self._kind == "memory":
            self._hubs.setdefault(name, MemoryHub(desk, self.clock)).desk = desk
            return
        self._running[name] = self._stack.enter_context(ExitStack())
        server = self._running[name].enter_context(served(desk, self.clock, port=self._ports[name]))
        self._ports[name] = int(server.url.rpartition(":")[2])

    def kill(self, name: str) -> None:
        """End a coordinator; its state is as after the last request that it answered."""
        if self._kind == "memory":
            self._hubs[name].desk.close()
        else:
            self._running[name].close()

    def open(self, order: Sequence[str] | None = None, **options: Any) -> SharedTransport:
        lines = {name: self._line(name) for name in order or self.serves}
        return self._stack.enter_context(SharedTransport(lines, **options))

    def _line(self, name: str) -> Transport:
        if self._kind == "memory":
            return MemoryTransport(self._hubs[name], RUN, TOKEN)
        return HttpTransport(f"http://127.0.0.1:{self._ports[name]}", RUN, TOKEN, reconnect_timeout_s=20.0)

    def only(self, name: str) -> Transport:
        """Return a line to one of them alone."""
        return self._stack.enter_context(self._line(name))

    def join(self, worker_id: int | None = None, **facts: Any) -> tuple[SharedTransport, Welcome]:
        line = self.open()
        return line, line.join(WorkerFacts(worker_id, **facts))

    def begin(self, num_workers: int, **terms: Any) -> list[tuple[SharedTransport, Welcome]]:
        fixed = {"outer": OUTER, "num_workers": num_workers}
        assert self.open().found(make_terms(NUM_BLOCKS, **{**fixed, **terms}), make_masters(NUM_BLOCKS))
        return [self.join(w) for w in range(num_workers)]


@contextmanager
def sharing(kind: str, split: Split = ENDS, folder: Path | None = None) -> Iterator[Sharing]:
    with ExitStack() as stack:
        yield Sharing(kind, split, stack, folder)


def newest(line: Transport, entry: str, newer_than: int = -1) -> Fetched:
    found = line.fetch(entry, newer_than, 0.0)
    assert found is not None
    return found


def send(line: Transport, entry: str, base: int, params: Params) -> Verdict:
    return line.submit(entry, submission(base, params)).verdict


class Lockstep:
    """Workers that do their rounds together, and the simulation that does the same."""

    def __init__(self, workers: Sequence[tuple[Transport, Welcome]], interface_every: int) -> None:
        self.workers = workers
        blocks = [welcome.block_idx for _, welcome in workers]
        network = preset_network("lockstep", len(workers), RULES.deadline_s, 5, 100)
        rules = RoundRules(deadline_s=RULES.deadline_s)
        self.simulated = SimulatedCoordinator(
            make_masters(NUM_BLOCKS), blocks, rules, lambda: OUTER, network, 0, interface_every
        )
        self.terms = workers[0][1].terms
        self.local = [newest(line, "interface").params for line, _ in workers]

    def work(self, round_idx: int) -> None:
        """Let everybody send its block, and its interface where that is due."""
        due, updates = self.terms.interface_due(round_idx), []
        for worker_id, (line, welcome) in enumerate(self.workers):
            entry, seed = f"block{welcome.block_idx}", 100 * round_idx + worker_id
            block = moved(newest(line, entry, round_idx - 1).params, seed)
            self.local[worker_id] = moved(self.local[worker_id], seed + 50)
            assert send(line, entry, round_idx, block) is Verdict.ACCEPTED
            if due:
                version = self.terms.interface_round(round_idx)
                assert send(line, "interface", version, self.local[worker_id]) is Verdict.ACCEPTED
            updates.append(WorkerRound(worker_id, 5, 40, block, self.local[worker_id] if due else None))
        self.simulated.finish_round(updates, final=due)
        if due:
            self.local = [newest(line, "interface", version).params for line, _ in self.workers]

    def is_same(self) -> bool:
        line = self.workers[-1][0]
        return all(same(newest(line, entry).params, master) for entry, master in self.simulated.masters.items())


# The whole run


@pytest.mark.parametrize("interface_every", [1, 2, 3])
@pytest.mark.parametrize(("kind", "split"), [("memory", ENDS), ("memory", APART), ("http", ENDS)])
def test_lockstep_over_several_coordinators_equals_the_simulation(
    kind: str, split: Split, interface_every: int
) -> None:
    num_rounds = 5
    with sharing(kind, split) as shared:
        workers = shared.begin(6, interface_every=interface_every, max_rounds=num_rounds)
        run = Lockstep(workers, interface_every)
        for round_idx in range(num_rounds):
            run.work(round_idx)
        assert run.is_same()
        status = workers[0][0].status()
        assert {entry: kept["version"] for entry, kept in status["entries"].items()} == run.simulated.versions
        assert list(status["entries"]) == ["block0", "block1", "block2", "interface"]
        assert (status["phase"], status["missing_blocks"]) == ("finished", [])
        counts = [(kept["rounds_expected"], kept["rounds_accepted"]) for kept in status["workers"].values()]
        assert counts == [(num_rounds, num_rounds)] * 6
        with pytest.raises(RunEndedError, match="all 5 rounds are closed"):
            workers[1][0].fetch("block1", num_rounds, 5.0)
        for line, _ in workers:
            line.leave()
        assert not any(kept["is_live"] for kept in workers[0][0].status()["workers"].values())


@pytest.mark.parametrize("kind", ["memory", "http"])
@pytest.mark.parametrize("killed", ["c0", "c1"])
def test_scenario_07_one_of_several_coordinators_comes_back_from_its_state_and_nothing_differs(
    tmp_path: Path, kind: str, killed: str
) -> None:
    with sharing(kind, folder=tmp_path) as shared:
        workers = shared.begin(3, interface_every=2, max_rounds=4)
        run = Lockstep(workers, 2)
        run.work(0)
        shared.kill(killed)
        other = 1 if killed == "c0" else 0  # a worker of a block that the other one serves
        line = workers[other][0]
        assert newest(line, f"block{other}").version == 1
        shared.start(killed)
        for round_idx in range(1, 4):
            run.work(round_idx)
        assert run.is_same()
        assert line.status()["phase"] == "finished"
        for name in shared.serves:
            shared.kill(name)


def test_coordinator_that_is_away_does_not_stop_the_workers_of_others(tmp_path: Path) -> None:
    with sharing("http", folder=tmp_path) as shared:
        (zero, _), (one, _), (two, _) = shared.begin(3, interface_every=100)
        one.status()
        shared.kill("c0")
        for version in range(3):
            assert send(one, "block1", version, moved(newest(one, "block1").params, version)) is Verdict.ACCEPTED
        verdicts: list[Verdict] = []
        params = make_masters(NUM_BLOCKS)["block0"]
        waiting = threading.Thread(target=lambda: verdicts.append(send(zero, "block0", 0, params)))
        waiting.start()  # its own line tries again until the coordinator is back
        shared.start("c0")
        waiting.join(30.0)
        assert verdicts == [Verdict.ACCEPTED]
        assert newest(two, "block1").version == 3
        for name in shared.serves:
            shared.kill(name)


def test_error_of_a_coordinator_that_does_not_answer_names_its_address() -> None:
    with sharing("http") as shared:
        lines = {
            name: HttpTransport(f"http://127.0.0.1:{port}", RUN, TOKEN, reconnect_timeout_s=0.2)
            for name, port in shared._ports.items()
        }
        shared.kill("c1")
        with SharedTransport(lines) as line, pytest.raises(CoordinatorUnreachableError) as caught:
            line.found(make_terms(NUM_BLOCKS), make_masters(NUM_BLOCKS))
        assert f"http://127.0.0.1:{shared._ports['c1']} must answer" in str(caught.value)
        assert shared.only("c0").status()["phase"] == "empty"  # nothing is founded by halves


# Joining


@pytest.fixture
def shared() -> Iterator[Sharing]:
    with sharing("memory") as opened:
        yield opened


def test_join_without_an_id_is_given_one_and_a_block_by_the_coordinator_of_the_interface(shared: Sharing) -> None:
    shared.open().found(make_terms(NUM_BLOCKS), make_masters(NUM_BLOCKS))
    orders = (["c0", "c1"], ["c1", "c0"]) * 3  # whoever names them in another order is given another id all the same
    given = [shared.open(order).join(WorkerFacts()) for order in orders]
    assert [(welcome.worker_id, welcome.block_idx) for welcome in given] == [(w, w % 3) for w in range(6)]
    assert given[1].versions == {"block1": 0, "block0": 0, "block2": 0, "interface": 0}
    assert given[5].num_workers == 6
    assert list(shared.only("c1").status()["workers"]) == ["1", "4"]


def test_join_again_with_the_same_nonce_is_the_same_life_everywhere(shared: Sharing) -> None:
    shared.open().found(make_terms(NUM_BLOCKS), make_masters(NUM_BLOCKS))
    facts = WorkerFacts(1, nonce="life-1")
    first, again = shared.open().join(facts), shared.open().join(facts)
    assert (again.worker_id, again.incarnation) == (first.worker_id, first.incarnation) == (1, 0)
    assert shared.open().status()["workers"]["1"]["incarnation"] == 0


def test_worker_that_returns_is_a_new_life_everywhere_and_the_old_one_is_refused(shared: Sharing) -> None:
    workers = shared.begin(3)
    (old, _), (new, welcome) = workers[1], shared.join(1)
    assert welcome.incarnation == 1
    for entry in ("block1", "interface"):
        params = newest(new, entry).params
        assert send(old, entry, 0, params) is Verdict.SUPERSEDED
        assert send(new, entry, 0, params) is Verdict.ACCEPTED
    with pytest.raises(SupersededError):
        shared.open().join(WorkerFacts(1), incarnation=0)


def test_join_that_the_coordinator_of_the_block_refuses_leaves_nobody_behind(
    shared: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.open().found(make_terms(NUM_BLOCKS), make_masters(NUM_BLOCKS))
    line = shared.open()

    def refuse(*args: Any) -> Welcome:
        raise CoordinatorUnreachableError("away")

    monkeypatch.setattr(line._lines["c1"], "join", refuse)
    with pytest.raises(CoordinatorUnreachableError, match="away"):
        line.join(WorkerFacts(1))
    assert [kept["is_live"] for kept in line.status()["workers"].values()] == [False]


def test_worker_that_names_one_coordinator_of_several_is_told_to_name_all(shared: Sharing) -> None:
    alone = shared.only("c1")
    with pytest.raises(ValueError, match=r"what this coordinator serves, \['block1'\].*name all coordinators"):
        alone.found(make_terms(NUM_BLOCKS), make_masters(NUM_BLOCKS))
    shared.open().found(make_terms(NUM_BLOCKS), make_masters(NUM_BLOCKS))
    with pytest.raises(RequestRefusedError, match="name all coordinators of the run"):
        alone.join(WorkerFacts(1))


def test_leave_dismiss_and_stop_reach_all(shared: Sharing) -> None:
    _, (one, _), (two, _) = shared.begin(3)
    one.leave()
    assert two.dismiss(0)
    assert not two.dismiss(0)
    live = {worker_id: kept["is_live"] for worker_id, kept in two.status()["workers"].items()}
    assert live == {"0": False, "1": False, "2": True}
    assert shared.only("c1").status()["workers"]["1"]["is_live"] is False
    two.stop("enough")
    assert [shared.only(name).status()["phase"] for name in shared.serves] == ["stopped", "stopped"]
    assert (two.status()["phase"], two.status()["reason"]) == ("stopped", "enough")


def test_stop_that_one_coordinator_does_not_hear_reaches_the_others_and_is_told(
    shared: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((line, _), *_) = shared.begin(3)

    def away(reason: str) -> None:
        raise CoordinatorUnreachableError("c0 is away")

    monkeypatch.setattr(line._lines["c0"], "stop", away)
    with pytest.raises(CoordinatorUnreachableError, match="c0 is away"):
        line.stop("enough")
    assert shared.only("c1").status()["phase"] == "stopped"


def test_entry_that_nobody_serves_is_refused_with_what_each_does(shared: Sharing) -> None:
    shared.begin(3)
    with pytest.raises(RequestRefusedError, match=r"entry='block7'; c0 serves \['block0'.*, c1 serves \['block1'\]"):
        shared.open().fetch("block7")


def test_close_closes_every_line(shared: Sharing) -> None:
    line = shared.open()
    line.close()
    line.close()
    for name in shared.serves:
        with pytest.raises(TransportError, match="closed"):
            line._lines[name].status()


# Splits


@pytest.mark.parametrize(
    ("split", "fault"),
    [
        ((("block0", "block1", "interface"), ("block1", "block2")), r"served twice: \['block1'\]"),
        ((("block0", "interface"), ("block1", "block2", "interface")), r"served twice: \['interface'\]"),
        ((("block0", "interface"), ("block2",)), r"served by nobody: \['block1'\]"),
        ((("block0", "block1"), ("block2",)), r"served by nobody: \['interface'\]"),
        ((("block0", "block1", "interface"), ("block2", "block3")), r"not of this run: \['block3'\]"),
        ((None, ("block1",)), r"served twice: \['block1'\]"),
        ((None, None), "served twice"),
    ],
)
def test_split_that_serves_no_entry_once_is_refused_with_all_named(split: Split, fault: str) -> None:
    with sharing("memory", split) as shared:
        with pytest.raises(RequestRefusedError, match=rf"{fault}.*; c0 serves .*, c1 serves "):
            shared.open().found(make_terms(NUM_BLOCKS), make_masters(NUM_BLOCKS))
        assert [shared.only(name).status()["phase"] for name in shared.serves] == ["empty", "empty"]


def test_split_that_leaves_a_block_out_is_refused_to_who_joins(shared: Sharing) -> None:
    shared.begin(3)
    with pytest.raises(RequestRefusedError, match=r"served by nobody: \['block1'\]; c0 serves \['block0'"):
        shared.open(["c0"]).join(WorkerFacts(0))
    assert shared.open().status()["workers"]["0"]["incarnation"] == 0
    with pytest.raises(RequestRefusedError, match=r"got entry='interface'; c1 serves \['block1'\]"):
        shared.open(["c1"]).join(WorkerFacts(0))


# Founding


def test_found_by_several_at_once_gives_all_coordinators_the_masters_of_one(shared: Sharing) -> None:
    founded: dict[int, bool] = {}

    def found(seed: int) -> None:
        masters = {entry: moved(kept, seed) for entry, kept in make_masters(NUM_BLOCKS).items()}
        founded[seed] = shared.open().found(make_terms(NUM_BLOCKS, worker_settings={"seed": seed}), masters)

    threads = [threading.Thread(target=found, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    [winner] = [seed for seed, is_founder in founded.items() if is_founder]
    for entry, kept in make_masters(NUM_BLOCKS).items():
        assert same(newest(shared.open(), entry).params, moved(kept, winner))
    terms = [shared.only(name).status()["terms"]["worker_settings"] for name in shared.serves]
    assert terms == [{"seed": winner}] * 2


def test_found_where_the_founder_died_halfway_is_refused_in_time(shared: Sharing) -> None:
    masters = make_masters(NUM_BLOCKS)
    part = {entry: masters[entry] for entry in shared.serves["c0"] or ()}
    shared.only("c0").found(make_terms(NUM_BLOCKS), part)
    with pytest.raises(NotFoundedError, match=r"within 0\.01 s; got none at c1; start all of them again"):
        shared.open(found_timeout_s=0.01).found(make_terms(NUM_BLOCKS), masters)
    assert shared.only("c1").status()["phase"] == "empty"


def test_found_where_only_some_have_kept_the_state_of_the_run_is_refused(shared: Sharing) -> None:
    shared.only("c1").found(make_terms(NUM_BLOCKS), {"block1": make_masters(NUM_BLOCKS)["block1"]})
    with pytest.raises(RequestRefusedError, match="all have its state; got state at c1, none at c0"):
        shared.open().found(make_terms(NUM_BLOCKS), make_masters(NUM_BLOCKS))
    assert shared.only("c0").status()["phase"] == "empty"


def test_found_gives_all_the_terms_that_the_coordinator_of_the_interface_was_told() -> None:
    with ExitStack() as stack:
        desks = [
            Desk(RUN, TOKEN, fixed_terms={"num_workers": 6, "max_rounds": 9}, serves=ENDS[0]),
            Desk(RUN, TOKEN, serves=ENDS[1]),
        ]
        lines = {f"c{idx}": MemoryTransport(MemoryHub(desk, Clock()), RUN, TOKEN) for idx, desk in enumerate(desks)}
        stack.enter_context(SharedTransport(lines)).found(make_terms(NUM_BLOCKS), make_masters(NUM_BLOCKS))
        assert [desk.service.terms for desk in desks] == [make_terms(NUM_BLOCKS, num_workers=6, max_rounds=9)] * 2


# Several addresses in one text


def test_line_to_one_address_is_that_line_and_to_several_a_shared_one() -> None:
    opened: list[str] = []

    def open_one(url: str) -> Transport:
        opened.append(url)
        return HttpTransport(url, RUN, TOKEN)

    with line_to("http://127.0.0.1:1", open_one) as line:
        assert isinstance(line, HttpTransport)
    with line_to("http://127.0.0.1:1, http://127.0.0.1:2", open_one) as line:
        assert isinstance(line, SharedTransport)
    assert opened == ["http://127.0.0.1:1", "http://127.0.0.1:1", "http://127.0.0.1:2"]
    with pytest.raises(ValueError, match="must be different ones; got urls=http:"):
        line_to("http://127.0.0.1:1,http://127.0.0.1:1", open_one)
    with pytest.raises(ValueError, match="url must be http"):
        line_to("http://127.0.0.1:1,", open_one)


def test_shared_transport_without_a_line_is_refused() -> None:
    with pytest.raises(ValueError, match="lines must hold a line"), suppress(TransportError):
        SharedTransport({})
