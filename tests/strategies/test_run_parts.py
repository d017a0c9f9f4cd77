"""Checkpoints of several workers: what one process gathers from the others' files, resumed and compared bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.coordinator.standing import store_standing
from lightning_blocktrain.coordinator.storage import Storage
from lightning_blocktrain.partition import partition as cut
from lightning_blocktrain.rounds import INTERFACE, OuterSGD
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.strategies import block_checkpoint
from lightning_blocktrain.strategies.block_guard import declared_layout
from lightning_blocktrain.strategies.member import Member, MemberSettings
from lightning_blocktrain.strategies.place import find_place
from lightning_blocktrain.strategies.run_parts import RunParts, warn_of_fresh_starts
from lightning_blocktrain.strategies.simulated_run import SimulatedRun
from lightning_blocktrain.strategies.state_files import WorkerFiles, kept_versions, state_folder, worker_folder
from lightning_blocktrain.strategies.worker_run import WorkerRun, masters_of
from lightning_blocktrain.strategies.workers import restore_process_streams
from lightning_blocktrain.transport import RunTerms, WorkerFacts
from lightning_blocktrain.transport.memory import MemoryHub, MemoryTransport
from tests.strategies.conftest import assert_same, seeded
from tests.strategies.test_worker_run import (
    BLOCKS,
    RULES,
    SEED,
    SYNC_EVERY,
    Clock,
    LookingAhead,
    OnFrozenPrefix,
    OnFrozenStem,
    ThreeBlocks,
    batches,
    learn,
    settings,
    terms,
)

NUM_WORKERS, NUM_ROUNDS, SAVED_AT = 6, 7, 3
AVERAGED = replace(RULES, average_decay=0.9)
DATA = list(batches(NUM_WORKERS * SYNC_EVERY * NUM_ROUNDS))


class Run:
    """Rank 0 and five workers, with a coordinator that keeps its state in the folder of the run."""

    def __init__(
        self,
        folder: Path,
        interface_every: int,
        checkpoint: Mapping[str, Any] | None = None,
        make: type[ThreeBlocks] = ThreeBlocks,
        drops_base: bool = False,
        **changes: Any,
    ) -> None:
        self.drops_base = drops_base
        worker_folder(folder).mkdir(parents=True)
        self.modules = [seeded(make) for _ in range(NUM_WORKERS)]
        self.terms: RunTerms = terms(NUM_WORKERS, interface_every=interface_every, max_rounds=NUM_ROUNDS, **changes)
        self.cuts = [cut(module, declared_layout(module), BLOCKS) for module in self.modules]
        self.optimizers = [torch.optim.AdamW(module.parameters(), lr=0.05) for module in self.modules]
        for module in self.modules if checkpoint else ():
            module.load_state_dict(checkpoint["state_dict"])  # type: ignore[index]
        masters, kept = masters_of(self.modules[0], self.cuts[0]), kept_versions(interface_every)
        stands = block_checkpoint.standing_of(block_checkpoint.saved_run(checkpoint)) if checkpoint else None
        if stands is not None:
            store_standing(state_folder(folder), "run", "token", self.terms, masters, stands)
        self.desk = Desk("run", "token", Storage(state_folder(folder), kept))
        hub = MemoryHub(self.desk, Clock())
        if stands is not None:
            assert self.desk.resume(0.0)
        self.lines = lines = [MemoryTransport(hub, "run", "token") for _ in range(NUM_WORKERS)]
        self.look_up: Callable[[], object] = lambda: None
        lines[0].found(self.terms, masters)
        welcomes = [line.join(WorkerFacts(w)) for w, line in enumerate(lines)]
        self.runs = [self._worker(w, welcome.block_idx) for w, welcome in enumerate(welcomes)]
        self.parts = RunParts(folder, self.runs[0])
        for w, run in enumerate(self.runs):
            if checkpoint is not None:
                assert run.resume(checkpoint, self.optimizers[w])
            write = self._writer(folder, run, kept) if w else None
            settle = None if w else lambda: self.parts.settle(lines[0], self.look_up)
            run.begin(lines[w], welcomes[w], None, write, settle, resumes=True)
        if checkpoint is not None:
            streams = self.runs[0].saved_in(checkpoint)["process_streams"]
            restore_process_streams(streams, torch.device("cpu"))
            assert not any("process_streams" in run.saved_in(checkpoint) for run in self.runs[1:])

    def _worker(self, worker_id: int, block_idx: int) -> WorkerRun:
        module, parts = self.modules[worker_id], self.cuts[worker_id]
        leads, drops = worker_id == 0, self.drops_base
        return WorkerRun(module, parts, settings(), worker_id, block_idx, SEED, assembles=leads, drops_base=drops)

    def _writer(self, folder: Path, run: WorkerRun, kept: int) -> Any:
        files = WorkerFiles(worker_folder(folder), run.worker.worker_id, kept)
        return lambda: files.write(run.version, run.own_states())

    def train(self, worker_id: int, round_idx: int) -> None:
        run = self.runs[worker_id]
        for step in range(SYNC_EVERY):
            batch = DATA[(round_idx * SYNC_EVERY + step) * NUM_WORKERS + worker_id]
            learn(self.modules[worker_id], run.workers, run.worker, self.optimizers[worker_id], batch)
            run.count_batch(run.worker, batch[1].numel())
            run.worker.num_steps += 1
            run.steps_in_round += 1
        run.send_round()

    def train_rounds(self, first: int, end: int) -> None:
        for round_idx in range(first, end):
            for worker_id in range(NUM_WORKERS):
                self.train(worker_id, round_idx)
            for run in self.runs:
                run.take_round()

    def checkpoint(self) -> dict[str, Any]:
        """Return what a Trainer would store in rank 0."""
        self.runs[0].assemble()
        state = self.modules[0].state_dict()
        return {
            "state_dict": {name: tensor.clone() for name, tensor in state.items()},
            "optimizer_states": [block_checkpoint.plain_optimizer_state(self.runs[0].workers, self.optimizers[0])],
            block_checkpoint.MEMBER_KEY: self.parts.complete(self.runs[0].state_dict()),
        }

    def close(self) -> dict[str, Any]:
        self.desk.close()
        return {name: t for ledger in self.desk.service.ledgers.values() for name, t in ledger.master.items()}


def whole_run(folder: Path, interface_every: int, **options: Any) -> dict[str, Any]:
    run = Run(folder, interface_every, **options)
    run.train_rounds(0, NUM_ROUNDS)
    return run.close()


@pytest.mark.parametrize("interface_every", [1, 2, 3])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drops_base": True},
        {"make": OnFrozenStem, "drops_base": True},
        {"make": OnFrozenPrefix, "prefix_every": 4},
        {"make": OnFrozenStem, "prefix_every": 2, "prefix_codec": Codec("int8"), "drops_base": True},
        {"rules": AVERAGED},
        {"make": LookingAhead, "prefix_every": 4, "rules": AVERAGED, "drops_base": True},
    ],
    ids=[
        "base",
        "no base",
        "prefix",
        "stale prefix",
        "stale prefix, no base",
        "average",
        "average, lookahead, no base",
    ],
)
def test_scenario_32_resumed_workers_equal_the_uninterrupted_run(
    tmp_path: Path, interface_every: int, ahead: bool, options: dict[str, Any]
) -> None:
    """What a stale prefix was read from is part of the state: the masters of its version are gone."""
    expected = whole_run(tmp_path / "whole", interface_every)
    expected = whole_run(tmp_path / "same", interface_every, **options) if options.keys() - {"drops_base"} else expected
    run = Run(tmp_path / "first", interface_every, **options)
    run.train_rounds(0, SAVED_AT - 1)
    for worker_id in range(NUM_WORKERS):
        run.train(worker_id, SAVED_AT - 1)
    for worker_id in range(1, NUM_WORKERS):
        run.runs[worker_id].take_round()
    for worker_id in (1, 2, 4, 5) if ahead else ():  # their blocks close another round before rank 0 looks
        run.train(worker_id, SAVED_AT)
        assert run.runs[worker_id].version == SAVED_AT
    run.runs[0].take_round()
    assert run.runs[0].versions["block1"] == SAVED_AT + ahead
    torch.save(run.checkpoint(), tmp_path / "x.ckpt")
    run.close()
    torch.manual_seed(99)
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)
    resumed = Run(tmp_path / "second", interface_every, saved, **options)
    assert {run.version for run in resumed.runs} == {SAVED_AT}
    for worker in resumed.runs:
        stale = resumed.terms.prefix_version(SAVED_AT)
        assert set(worker.workers.frozen.versions.values()) <= {stale}
    assert resumed.desk.service.versions[INTERFACE] == SAVED_AT // interface_every
    resumed.train_rounds(SAVED_AT, NUM_ROUNDS)
    assert resumed.desk.service.phase == "finished"
    assert resumed.runs[0].tally.num_rounds_closed == NUM_ROUNDS
    assert_same(resumed.close(), expected)


def test_rank_0_begins_with_the_runs_interface_where_its_masters_are_the_averages_of_before(tmp_path: Path) -> None:
    run = Run(tmp_path / "first", 2, rules=AVERAGED)
    run.train_rounds(0, SAVED_AT)
    saved = run.checkpoint()
    run.close()
    del saved[block_checkpoint.MEMBER_KEY]["coordinator"]
    resumed = Run(tmp_path / "second", 2, saved, rules=AVERAGED)
    for run_of_one in resumed.runs:
        local, workers = run_of_one.worker.local, run_of_one.workers
        assert_same(*({name: found[name] for name in workers.interface_names} for found in (local, workers.merged)))
    resumed.close()


def test_parts_stay_what_they_were_while_the_others_go_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 2)
    run.train_rounds(0, 2)
    first = run.checkpoint()
    for worker_id in (1, 2, 4, 5):
        run.train(worker_id, 2)
        run.runs[worker_id].take_round() if worker_id > 2 else None
    second = run.checkpoint()
    workers = [checkpoint[block_checkpoint.MEMBER_KEY]["workers"] for checkpoint in (first, second)]
    assert list(workers[0]) == list(workers[1]) and len(workers[0]) == NUM_WORKERS
    for key in workers[0]:
        states = [kept[key]["optimizer"]["embed.weight"]["exp_avg"] for kept in workers]
        assert torch.equal(*states)
    run.close()


def checkpoint_after_the_end(run: Run) -> Mapping[str, Any]:
    """Return rank 0's state as its strategy gives it to a callback that saves when training has ended."""
    member = Member(settings(), MemberSettings(), find_place(None, NUM_WORKERS), 0)
    member._line, member._run, member._parts = run.lines[0], run.runs[0], run.parts
    member.end()
    return member.complete(run.runs[0].state_dict())


@pytest.mark.parametrize("make", [ThreeBlocks, OnFrozenPrefix])
@pytest.mark.parametrize("saved_before", [False, True])
def test_parts_of_the_last_round_are_those_of_its_end_though_another_block_closed_it_first(
    tmp_path: Path, saved_before: bool, make: type[ThreeBlocks]
) -> None:
    run, last_round, slow = Run(tmp_path / "run", 2, make=make), NUM_ROUNDS - 1, (0, 2, 3, 5)
    run.train_rounds(0, last_round - 1)
    if saved_before:
        run.checkpoint()
    for worker_id in range(NUM_WORKERS):
        run.train(worker_id, last_round - 1)
    for worker_id in (1, 4):
        run.runs[worker_id].take_round()
        run.train(worker_id, last_round)
    for worker_id in slow:
        run.runs[worker_id].take_round()
    assert (run.runs[0].version, run.runs[0].versions["block1"]) == (last_round, NUM_ROUNDS)
    for worker_id in slow:
        run.train(worker_id, last_round)
    for worker_id in (1, 2, 3, 4, 5, 0):
        run.runs[worker_id].take_round()
    assert run.runs[0].ended  # there was nothing newer of block 1
    assert run.runs[2].ended is (make is OnFrozenPrefix)  # which looks at block 1 too
    parts = checkpoint_after_the_end(run) if saved_before else run.checkpoint()[block_checkpoint.MEMBER_KEY]
    assert parts["coordinator"]["version"] == NUM_ROUNDS
    steps = {key: int(kept["optimizer"]["readout.weight"]["step"]) for key, kept in parts["workers"].items()}
    assert len(steps) == NUM_WORKERS and set(steps.values()) == {NUM_ROUNDS * SYNC_EVERY}
    run.close()


def test_parts_that_are_held_of_another_version_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path / "run", 1)
    run.train_rounds(0, 1)
    assert len(run.checkpoint()[block_checkpoint.MEMBER_KEY]["workers"]) == NUM_WORKERS
    run.train_rounds(1, 2)
    state = run.parts.complete(run.runs[0].state_dict())  # nobody has settled on this version
    assert list(state["workers"]) == ["block0/replica0"]
    assert "coordinator" not in state
    assert "checkpoints of version 2 hold no state of the other processes" in caplog.text
    run.close()


def test_parts_of_a_worker_that_died_before_it_wrote_are_its_newest(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 1)
    run.train_rounds(0, 2)
    (worker_folder(tmp_path / "run") / "4-2.pt").unlink()
    run.look_up = lambda: run.lines[0].dismiss(4)  # as rank 0 does when it sees that the process has ended
    workers = run.checkpoint()[block_checkpoint.MEMBER_KEY]["workers"]
    steps = {key: int(kept["optimizer"]["embed.weight"]["step"]) for key, kept in workers.items()}
    assert steps == {**dict.fromkeys(steps, 2 * SYNC_EVERY), "block1/replica1": SYNC_EVERY}
    run.close()


def test_parts_are_remembered_when_the_folder_is_gone(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 1)
    run.train_rounds(0, 1)
    before = run.checkpoint()[block_checkpoint.MEMBER_KEY]
    run.parts.remember()
    run.close()
    for path in [*(tmp_path / "run").rglob("*.pt"), *(tmp_path / "run").rglob("*.safetensors")]:
        path.unlink()
    after = run.parts.complete(run.runs[0].state_dict())
    assert after.keys() == before.keys()
    assert after["workers"].keys() == before["workers"].keys()


def test_resume_of_a_simulated_run_by_workers_goes_on_with_its_outer_optimizer(tmp_path: Path) -> None:
    expected = whole_run(tmp_path / "whole", 1)
    module = seeded(ThreeBlocks)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    parts = cut(module, declared_layout(module), BLOCKS)
    simulated = SimulatedRun(module, parts, settings(replicas=2), SEED)
    for step in range(SYNC_EVERY * SAVED_AT):
        for worker in simulated.workers:
            batch = DATA[step * NUM_WORKERS + worker.worker_id]
            learn(module, simulated.workers, worker, optimizer, batch)
            simulated.count_batch(worker, batch[1].numel())
        simulated.finish_step(last=False)
    plain = block_checkpoint.plain_optimizer_state(simulated.workers, optimizer)
    saved = {"state_dict": module.state_dict(), "optimizer_states": [plain], "blocktrain": simulated.state_dict()}
    resumed = Run(tmp_path / "second", 1, saved)
    resumed.train_rounds(SAVED_AT, NUM_ROUNDS)
    assert_same(resumed.close(), expected)


def test_files_of_a_worker_are_those_of_its_newest_rounds(tmp_path: Path) -> None:
    files = [WorkerFiles(tmp_path, worker_id, kept=2) for worker_id in (1, 11)]
    for version in (8, 9, 10):
        for kept in files:
            kept.write(version, {"version": version})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-10.pt", "1-9.pt", "11-10.pt", "11-9.pt"]


def test_files_on_a_full_disk_end_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    WorkerFiles(tmp_path / "missing", 1, kept=2).write(0, {})
    assert "worker 1 cannot hand over its state for checkpoints" in caplog.text


def test_warning_names_what_starts_afresh_once() -> None:
    keys = ("block0/replica0", "block1/replica0", "block0/replica1", "block1/replica1")
    saved = {"workers": dict.fromkeys(keys[:3]), "coordinator": {}}
    with pytest.warns(UserWarning, match="optimizer and the random numbers of block1/replica1, which start") as caught:
        warn_of_fresh_starts(saved, 4, 2, OuterSGD(1.0, 0.9))
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="does not hold the momentum of the outer optimizer"):
        warn_of_fresh_starts({"workers": dict.fromkeys(keys)}, 4, 2, OuterSGD(1.0, 0.9))
    with pytest.warns(UserWarning, match="does not hold the masters of which its weights are the average, which"):
        warn_of_fresh_starts({"workers": dict.fromkeys(keys), "has_averages": True}, 4, 2, OuterSGD())


@pytest.mark.parametrize(
    "saved", [{}, {"workers": {"block0/replica0": {}}, "coordinator": {}}, {"workers": {"block0/replica0": {}}}]
)
def test_warning_is_not_given_where_nothing_is_lost(saved: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    warn_of_fresh_starts(saved, 1, 1, OuterSGD())
    assert not recwarn.list
