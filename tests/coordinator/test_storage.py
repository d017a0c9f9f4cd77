import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from lightning_blocktrain.coordinator import storage as storage_module
from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.coordinator.storage import Storage, read_entry_file
from lightning_blocktrain.errors import CheckpointMismatchError, RequestRefusedError, StateError
from lightning_blocktrain.rounds import OuterSGD, Params, RoundRules, Verdict
from lightning_blocktrain.transport.base import Sender, WorkerFacts
from lightning_blocktrain.transport.messages import pack_submission
from tests.transport.lines import RUN, TOKEN, make_masters, make_terms, moved, same, submission

OUTER = OuterSGD(0.7, 0.9, nesterov=True)
NUM_WORKERS = 4


def founded(folder: Path, kept_versions: int = 1, **terms: Any) -> Desk:
    desk = Desk(RUN, TOKEN, Storage(folder, kept_versions))
    fixed = {"outer": OUTER, "num_workers": NUM_WORKERS}
    desk.found(make_terms(2, **{**fixed, **terms}), make_masters(2), 0.0)
    for worker_id in range(NUM_WORKERS):
        desk.service.join(WorkerFacts(worker_id, nonce=f"life-{worker_id}"), None, 0.0)
    return desk


def resumed(folder: Path) -> Desk:
    desk = Desk(RUN, TOKEN, Storage(folder))
    assert desk.resume(0.0)
    return desk


def send(desk: Desk, worker_id: int, entry: str | None = None, seed: int = 0) -> Verdict:
    entry = entry or f"block{worker_id % 2}"
    ledger = desk.service.ledger_of(entry)
    update = submission(ledger.version, moved(ledger.master, 10 * seed + worker_id))
    sender = Sender(worker_id, desk.service.roster.incarnation_of(worker_id) or 0)
    message = io.BytesIO(b"".join(bytes(piece) for piece in pack_submission(sender, update).pieces()))
    return desk.submit(entry, sender, update, 0.0, message).verdict


def masters_of(desk: Desk) -> dict[str, Params]:
    return {entry: ledger.master for entry, ledger in desk.service.ledgers.items()}


def run_rounds(desk: Desk, num_rounds: int, between: Callable[[Desk, int], Desk] = lambda desk, _: desk) -> Desk:
    """Let all workers send; ``between`` gets the desk after every update."""
    for idx in range(num_rounds * NUM_WORKERS * 2):
        round_idx, worker_idx = divmod(idx, NUM_WORKERS * 2)
        worker_id, entry = worker_idx // 2, "interface" if worker_idx % 2 else None
        assert send(desk, worker_id, entry, round_idx) is Verdict.ACCEPTED
        desk = between(desk, idx)
    return desk


def test_scenario_07_coordinator_killed_after_every_update_ends_with_the_same_weights(tmp_path: Path) -> None:
    undisturbed = run_rounds(founded(tmp_path / "whole"), 3)

    def restart(desk: Desk, _: int) -> Desk:
        desk.close()  # as the end of its process would release the lock; nothing is written here
        return resumed(tmp_path / "killed")

    killed = run_rounds(founded(tmp_path / "killed"), 3, restart)
    assert killed.service.versions == undisturbed.service.versions == {"block0": 3, "block1": 3, "interface": 3}
    assert all(same(masters_of(killed)[entry], master) for entry, master in masters_of(undisturbed).items())
    assert killed.service.accepted_tokens == undisturbed.service.accepted_tokens
    for desk in (killed, undisturbed):
        desk.close()


def test_scenario_32_restart_keeps_round_members_and_momentum(tmp_path: Path) -> None:
    desk = run_rounds(founded(tmp_path), 2)
    before = {entry: ledger.state_dict() for entry, ledger in desk.service.ledgers.items()}
    desk.close()
    again = resumed(tmp_path)
    after = {entry: ledger.state_dict() for entry, ledger in again.service.ledgers.items()}
    for entry, state in before.items():
        assert same(state["buffers"], after[entry]["buffers"])
        assert list(state["master"]) == list(after[entry]["master"])
        changed = dict.fromkeys(("master", "buffers", "opened_at"), 0)  # the clock is another one
        assert {**state, **changed} == {**after[entry], **changed}
    assert again.service.roster.live == (0, 1, 2, 3)
    welcome = again.service.join(WorkerFacts(2, nonce="life-2"), None, 0.0)
    assert (welcome.worker_id, welcome.incarnation, welcome.versions["block0"]) == (2, 0, 2)
    again.close()


def test_update_accepted_before_the_end_is_known_after_it_whatever_became_of_its_worker(tmp_path: Path) -> None:
    desk = founded(tmp_path)
    send(desk, 0)
    desk.service.leave(Sender(0, 0), 0.0)
    desk.close()
    again = resumed(tmp_path)
    assert again.service.roster.live == (1, 2, 3)
    assert again.service.ledger_of("block0").pending == (2,)
    send(again, 2)
    assert again.service.reports[0].accepted == (0, 2)
    again.close()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_late_update_that_was_accepted_counts_after_a_restart(tmp_path: Path, is_restarted: bool) -> None:
    rules = RoundRules(deadline_s=10.0, late="stale_weighted")
    desk = founded(tmp_path, rules=rules, outer=OuterSGD())
    start = desk.service.ledger_of("block0").master
    replicas = [moved(start, seed) for seed in range(4)]

    def submit(worker_id: int, base_version: int) -> str:
        update = submission(base_version, replicas[worker_id + base_version])
        message = io.BytesIO(b"".join(bytes(p) for p in pack_submission(Sender(worker_id, 0), update).pieces()))
        return desk.submit("block0", Sender(worker_id, 0), update, now, message).reason

    desk.submit("block0", Sender(0, 0), submission(0, replicas[0]), 0.0)
    now = 10.0
    desk.advance(now)
    assert "weighing 0.707" in submit(2, 0)
    if is_restarted:
        desk.close()
        desk, now = resumed(tmp_path), 0.0
    submit(0, 1)
    submit(2, 1)
    assert desk.service.reports[-1].stale == (2,)
    first, second, late, third = (replica["layer.w"] for replica in replicas)
    weight = 2**-0.5
    expected = (second + weight * (first + late - start["layer.w"]) + third) / (2 + weight)
    # The weight is rounded to 1/1024.
    assert torch.allclose(desk.service.ledger_of("block0").master["layer.w"], expected, atol=0.01)
    names = sorted(path.name for path in tmp_path.glob("block0-*"))
    assert names == ["block0-0.safetensors", "block0-1.safetensors", "block0-2.safetensors"]
    assert not list((tmp_path / "updates").iterdir())
    desk.close()


def test_kept_update_is_damaged_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    desk = founded(tmp_path)
    send(desk, 0)
    desk.close()
    (path,) = (tmp_path / "updates").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    again = resumed(tmp_path)
    assert "is left out" in caplog.text
    assert again.service.ledger_of("block0").pending == (0, 2)
    again.close()


class Interrupted(Exception):
    """Stands for the end of the process at one point of a write."""


@pytest.mark.parametrize("stop_at", range(8))
def test_scenario_33_interrupted_write_leaves_the_previous_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    desk = founded(tmp_path)
    send(desk, 0)
    before = masters_of(desk)["block0"]
    steps = iter(range(100))

    def interruptible(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(steps) == stop_at:
                raise Interrupted
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(storage_module, "_sync", interruptible(storage_module._sync))
    monkeypatch.setattr(storage_module, "save_file", interruptible(storage_module.save_file))
    monkeypatch.setattr(Path, "replace", interruptible(Path.replace))
    monkeypatch.setattr(Path, "write_text", interruptible(Path.write_text))
    with pytest.raises(Interrupted):
        send(desk, 2)  # closes the round of block 0
    monkeypatch.undo()
    desk.close()
    again = resumed(tmp_path)
    assert list(tmp_path.glob("*.tmp")) == []
    if again.service.versions["block0"] == 0:
        assert same(masters_of(again)["block0"], before)
        assert send(again, 2) is Verdict.ACCEPTED
    whole = founded(tmp_path / "whole")
    for worker_id in (0, 2):
        send(whole, worker_id)
    assert again.service.versions["block0"] == 1
    assert same(masters_of(again)["block0"], masters_of(whole)["block0"])
    again.close()
    whole.close()


@pytest.mark.parametrize(("owner", "name"), [(storage_module, "save_file"), (Path, "write_text")])
def test_close_that_could_not_be_written_stops_the_run_until_it_is_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    desk, whole = (founded(tmp_path / folder, interface_every=2) for folder in ("full", "whole"))
    sends = [*((w, "interface") for w in range(NUM_WORKERS)), (0, "block0")]
    for worker_id, entry in sends[:3]:
        send(desk, worker_id, entry)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match="no space left"):
        send(desk, *sends[3])  # closes the interface's round
    with pytest.raises(OSError, match="no space left"):
        desk.advance(1000.0)  # long after the deadline of the blocks' rounds
    assert (desk.service.versions, desk.next_event()) == ({"block0": 0, "block1": 0, "interface": 1}, None)
    monkeypatch.undo()
    send(desk, *sends[4])
    for worker_id, entry in sends:
        send(whole, worker_id, entry)
    assert not desk.service.ledger_of("interface").is_open  # nobody has answered its new version
    assert list(desk.service.reports) == list(whole.service.reports)
    assert desk.service.accepted_tokens == whole.service.accepted_tokens == {"interface": 160}
    desk.close()
    again = resumed(tmp_path / "full")
    assert again.service.versions == {"block0": 0, "block1": 0, "interface": 1}
    assert same(masters_of(again)["interface"], masters_of(whole)["interface"])
    assert again.service.accepted_tokens == {"interface": 160}
    for open_desk in (again, whole):
        open_desk.close()


def test_scenario_33_second_writer_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    first = Storage(tmp_path)
    with pytest.raises(StateError, match=r"only one coordinator may use a state folder; got folder=.*, pid=\d+"):
        Storage(tmp_path)
    first.close()
    first.close()
    Storage(tmp_path).close()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sync_every": 6}, "got sync_every: here=5, there=6;"),
        ({"identity": {"layout": "other"}}, "got layout: here='mine', there='other';"),
    ],
)
def test_scenario_34_state_of_another_model_is_refused_with_the_fields_named(
    tmp_path: Path, asked: dict[str, Any], message: str
) -> None:
    founded(tmp_path, identity={"layout": "mine"}).close()
    desk = resumed(tmp_path)
    with pytest.raises(RequestRefusedError, match=message):
        desk.found(make_terms(2, **asked), make_masters(2), 0.0)
    desk.close()


def test_scenario_34_state_of_another_run_is_refused_with_both_named(tmp_path: Path) -> None:
    founded(tmp_path).close()
    desk = Desk("run-2", TOKEN, Storage(tmp_path))
    with pytest.raises(CheckpointMismatchError, match="run_id: here='run-2', there='run-1'"):
        desk.resume(0.0)
    desk.close()


def test_folder_holds_one_file_per_entry_that_anybody_can_read_and_no_secret(tmp_path: Path) -> None:
    desk = run_rounds(founded(tmp_path), 2)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [
        "block0-2.safetensors",
        "block1-2.safetensors",
        "interface-2.safetensors",
        "lock",
        "manifest.json",
        "updates",
    ]
    assert list((tmp_path / "updates").iterdir()) == []
    stored = safetensors.torch.load_file(tmp_path / "block1-2.safetensors")
    assert torch.equal(stored["master:layer.w"], masters_of(desk)["block1"]["layer.w"])
    assert stored.keys() == {"master:layer.w", "master:layer.n", "buffer:layer.w"}
    assert TOKEN not in (tmp_path / "manifest.json").read_text()
    desk.close()


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_damaged_entry_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    founded(tmp_path).close()
    path = tmp_path / "block1-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink() if damage == "gone" else path.write_bytes(content[:-1] if damage == "cut" else content)
    desk = Desk(RUN, TOKEN, Storage(tmp_path))
    with pytest.raises(StateError, match=r"block1-0\.safetensors must be as the manifest describes it"):
        desk.resume(0.0)
    desk.close()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"format": 99})])
def test_damaged_manifest_is_refused_and_the_folder_given_back(tmp_path: Path, text: str) -> None:
    founded(tmp_path).close()
    content = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(StateError, match=r"manifest\.json must"):
        Storage(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    Storage(tmp_path).close()


def test_empty_folder_resumes_nothing_and_a_full_one_is_not_founded_again(tmp_path: Path) -> None:
    desk = Desk(RUN, TOKEN, Storage(tmp_path))
    assert not desk.resume(0.0)
    desk.close()
    founded(tmp_path).close()
    storage = Storage(tmp_path)
    with pytest.raises(StateError, match="a new run needs an empty folder"):
        storage.create(RUN, make_terms(), {}, {})
    storage.close()


def test_folder_of_somebody_else_is_left_as_it_was(tmp_path: Path) -> None:
    names = ["model.safetensors", "model-1.safetensors", "notes.tmp", "manifest.json.bak"]
    for name in names:
        (tmp_path / name).write_text("mine")
    desk = run_rounds(founded(tmp_path), 1)
    desk.close()
    Storage(tmp_path).close()
    assert all((tmp_path / name).read_text() == "mine" for name in names)


def test_leftovers_of_an_interrupted_process_are_removed_when_the_folder_is_opened(tmp_path: Path) -> None:
    founded(tmp_path).close()
    for name in ("block0-7.safetensors", "block0-0.safetensors.tmp", "updates/block0-3-1.frame"):
        (tmp_path / name).write_text("half")
    (tmp_path / "updates" / "block0-0-1.frame.tmp").write_text("half")
    Storage(tmp_path).close()
    kept = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert kept == ["block0-0.safetensors", "block1-0.safetensors", "interface-0.safetensors", "lock", "manifest.json"]


def test_run_that_was_stopped_waits_for_its_workers_again(tmp_path: Path) -> None:
    desk = run_rounds(founded(tmp_path), 1)
    for worker_id in range(NUM_WORKERS):
        desk.service.leave(Sender(worker_id, 0), 0.0)
    desk.stop("enough for today")
    desk.close()
    again = resumed(tmp_path)
    assert (again.service.phase, again.service.versions["block0"]) == ("waiting", 1)
    for worker_id in range(NUM_WORKERS):
        again.service.join(WorkerFacts(worker_id), None, 0.0)
    assert send(again, 0, seed=1) is Verdict.ACCEPTED
    again.close()


def test_finished_run_stays_finished(tmp_path: Path) -> None:
    run_rounds(founded(tmp_path, max_rounds=1), 1).close()
    again = resumed(tmp_path)
    assert (again.service.phase, again.service.reason) == ("finished", "all 1 rounds are closed")
    again.close()


def test_kept_versions_stay_readable_beside_the_process_and_a_restart_takes_the_newest(tmp_path: Path) -> None:
    desk = founded(tmp_path, kept_versions=2)
    states = [desk.service.ledgers["block1"].state_dict()]
    for _ in range(3):
        desk = run_rounds(desk, 1)
        states.append(desk.service.ledgers["block1"].state_dict())
    assert sorted(path.name for path in tmp_path.glob("block1-*")) == ["block1-2.safetensors", "block1-3.safetensors"]
    for version in (2, 3):
        read = read_entry_file(tmp_path / f"block1-{version}.safetensors")
        assert (read["entry"], read["version"], read["norms"]) == ("block1", version, states[version]["norms"])
        for kind in ("master", "buffers"):
            assert same(read[kind], states[version][kind])
    with pytest.raises(FileNotFoundError):
        read_entry_file(tmp_path / "block1-1.safetensors")
    desk.close()
    again = resumed(tmp_path)
    assert again.service.versions["block1"] == 3
    assert [path.name for path in tmp_path.glob("block1-*")] == ["block1-3.safetensors"]
    again.close()
