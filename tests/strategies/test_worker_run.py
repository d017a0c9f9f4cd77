"""One worker's rounds over a transport in memory, driven without Lightning and without processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.errors import SupersededError, TransportError
from lightning_blocktrain.partition import partition as cut
from lightning_blocktrain.rounds import INTERFACE, OuterSGD, RoundRules, Verdict
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.rounds.history import ARRIVAL_MIN_HISTORY
from lightning_blocktrain.strategies import worker_run
from lightning_blocktrain.strategies.block_guard import declared_layout
from lightning_blocktrain.strategies.run_settings import RunSettings
from lightning_blocktrain.strategies.simulated_run import SimulatedRun
from lightning_blocktrain.strategies.worker_run import WorkerRun, masters_of
from lightning_blocktrain.transport import RunTerms, WorkerFacts
from lightning_blocktrain.transport.http import HttpTransport
from lightning_blocktrain.transport.memory import MemoryHub, MemoryTransport
from tests.strategies.conftest import UserModule, assert_same, seeded
from tests.transport.lines import served

BLOCKS, REPLICAS, SYNC_EVERY, SEED = 3, 2, 2, 11
RULES = RoundRules(deadline_s=50.0)
OUTER = OuterSGD(0.7, 0.9)


class ThreeBlocks(UserModule):
    """Three layers in three blocks, with dropout, so that the workers' random streams matter."""

    prefix = "none"

    def __init__(self) -> None:
        super().__init__(num_layers=3, dropout=0.2)

    def configure_blocks(self) -> Mapping[str, Any]:
        return {**super().configure_blocks(), "prefix": self.prefix}

    def block_loss(self, batch: list[Tensor], block_idx: int) -> Tensor:
        return self._loss(batch, self.layers[block_idx : block_idx + 1])


class OnFrozenPrefix(ThreeBlocks):
    """The same, each block on top of the blocks before it, which are frozen."""

    prefix = "frozen"

    def block_loss(self, batch: list[Tensor], block_idx: int) -> Tensor:
        with torch.set_grad_enabled(block_idx == 0):
            hidden = F.dropout(self.embed(batch[0]), self.dropout, self.training)
        with torch.no_grad():
            for layer in self.layers[:block_idx]:
                hidden = layer(hidden)
        logits = self.readout(self.layers[block_idx](hidden))
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


class OnFrozenStem(OnFrozenPrefix):
    """The same, with an embedding that only block 0 trains."""

    def configure_blocks(self) -> Mapping[str, Any]:
        return {**super().configure_blocks(), "stem": self.embed}


class LookingAhead(OnFrozenStem):
    """The same, where a block's loss is read at the exit of the next block as well."""

    def configure_blocks(self) -> Mapping[str, Any]:
        return {**super().configure_blocks(), "lookahead": 1}

    def block_loss(self, batch: list[Tensor], block_idx: int) -> Tensor:
        with torch.set_grad_enabled(block_idx == 0):
            hidden = F.dropout(self.embed(batch[0]), self.dropout, self.training)
        with torch.no_grad():
            for layer in self.layers[:block_idx]:
                hidden = layer(hidden)
        losses = []
        for layer in self.layers[block_idx : block_idx + 2]:
            hidden = layer(hidden)
            losses.append(F.cross_entropy(self.readout(hidden).flatten(0, -2), batch[1].flatten()))
        return torch.stack(losses).sum()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def settings(**changes: Any) -> RunSettings:
    given: dict[str, Any] = {
        "replicas": 1,
        "sync_every": SYNC_EVERY,
        "interface_every": 1,
        "inner_state": "keep",
        "rules": RULES,
        "outer_optimizer": OUTER,
        "network": "lockstep",
        "average_decay": 0.0,
    }
    return RunSettings(**{**given, **changes})


def terms(num_workers: int | None, **changes: Any) -> RunTerms:
    given: dict[str, Any] = {"num_blocks": BLOCKS, "sync_every": SYNC_EVERY, "rules": RULES, "outer": OUTER}
    return RunTerms(**{**given, "num_workers": num_workers, **changes})


class Fleet:
    """Workers in one process, each with a module of its own, as they would be in processes of their own."""

    def __init__(
        self,
        block_of: Sequence[int],
        make: type[ThreeBlocks] = ThreeBlocks,
        look_up: Callable[[], None] | None = None,
        stack: ExitStack | None = None,
        kind: str = "memory",
        drops_base: bool = False,
        desk: Desk | None = None,
        url: str = "",
        **changes: Any,
    ) -> None:
        self.clock = Clock()
        self.desk = desk or Desk("run", "token")
        self.hub = MemoryHub(self.desk, self.clock)
        if kind == "http" and not url:
            assert stack is not None
            url = stack.enter_context(served(self.desk, self.clock)).url

        def open_line() -> Any:
            if kind == "memory":
                return MemoryTransport(self.hub, "run", "token")
            assert stack is not None
            return stack.enter_context(HttpTransport(url, "run", "token"))

        self.modules = [seeded(make) for _ in block_of]
        self.cut = cut(self.modules[0], declared_layout(self.modules[0]), BLOCKS)
        self.terms = terms(len(block_of), **changes)
        self.optimizers, self.runs, self.lines = [], [], []
        founder = open_line()
        founder.found(self.terms, masters_of(self.modules[0], self.cut))
        for worker_id, module in enumerate(self.modules):
            line = open_line()
            welcome = line.join(WorkerFacts(worker_id, block_of[worker_id]))
            parts = cut(module, declared_layout(module), BLOCKS)
            leads = worker_id == 0
            run = WorkerRun(
                module,
                parts,
                settings(),
                worker_id,
                welcome.block_idx,
                SEED,
                leads,
                clock=self.clock,
                drops_base=drops_base,
            )
            run.begin(line, welcome, look_up)
            self.optimizers.append(torch.optim.AdamW(module.parameters(), lr=0.05))
            self.runs.append(run)
            self.lines.append(line)

    def step(self, worker_id: int, batch: list[Tensor]) -> None:
        """Take one inner step, without what ends a round."""
        run = self.runs[worker_id]
        run.count_batch(run.worker, batch[1].numel())
        learn(self.modules[worker_id], run.workers, run.worker, self.optimizers[worker_id], batch)
        run.tally.count_prefix(run.workers.frozen)
        run.worker.num_steps += 1
        run.steps_in_round += 1

    @property
    def ledgers(self) -> Any:
        return self.desk.service.ledgers

    def masters(self) -> dict[str, Tensor]:
        return {name: tensor for ledger in self.ledgers.values() for name, tensor in ledger.master.items()}


def learn(module: ThreeBlocks, workers: Any, worker: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    with workers.acting(worker, optimizer):
        optimizer.zero_grad()
        module.block_loss(batch, worker.block_idx).backward()
        optimizer.step()
        worker.gradients = {}


def batches(num: int) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(num):
        text = torch.randint(16, (2, 6), generator=generator)
        yield [text[:, :-1], text[:, 1:]]


@pytest.mark.parametrize(
    ("make", "interface_every", "codec", "prefix_every", "prefix_codec", "average_decay"),
    [
        (ThreeBlocks, 1, Codec("fp32"), 1, Codec("bf16"), 0.0),
        (ThreeBlocks, 2, Codec("fp32"), 1, Codec("bf16"), 0.9),
        (OnFrozenPrefix, 1, Codec("fp32"), 1, Codec("fp32"), 0.0),
        (OnFrozenPrefix, 1, Codec("fp32"), 1, Codec("bf16"), 0.9),
        (OnFrozenStem, 2, Codec("fp32"), 3, Codec("bf16"), 0.9),
        (OnFrozenPrefix, 1, Codec("bf16"), 3, Codec("int8", block=16), 0.0),
        (OnFrozenStem, 1, Codec("fp32"), 1, Codec("int8"), 0.0),
        (LookingAhead, 1, Codec("fp32"), 1, Codec("bf16"), 0.2),
        (LookingAhead, 2, Codec("bf16"), 3, Codec("int8", block=16), 0.9),
        (ThreeBlocks, 2, Codec("int8", block=16), 1, Codec("bf16"), 0.0),
        (ThreeBlocks, 1, Codec("topk", top_frac=0.1), 1, Codec("bf16"), 0.0),
    ],
)
@pytest.mark.parametrize("kind", ["memory", "http"])
def test_worker_run_lockstep_equals_the_simulator_bit_for_bit(
    kind: str,
    make: type[ThreeBlocks],
    interface_every: int,
    codec: Codec,
    prefix_every: int,
    prefix_codec: Codec,
    average_decay: float,
) -> None:
    num_workers, num_rounds = BLOCKS * REPLICAS, 5
    data = list(batches(num_workers * SYNC_EVERY * num_rounds))

    module = seeded(make)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    parts = cut(module, declared_layout(module), BLOCKS)
    agreed: dict[str, Any] = {
        "interface_every": interface_every,
        "codec": codec,
        "prefix_every": prefix_every,
        "prefix_codec": prefix_codec,
    }
    usual = settings(replicas=REPLICAS, average_decay=average_decay, **agreed)
    agreed["rules"] = usual.rules_for(parts)
    simulated = SimulatedRun(module, parts, usual, SEED)
    torch.manual_seed(4)
    for step in range(SYNC_EVERY * num_rounds):
        for worker in simulated.workers:
            batch = data[step * num_workers + worker.worker_id]
            simulated.count_batch(worker, batch[1].numel())
            learn(module, simulated.workers, worker, optimizer, batch)
        simulated.finish_step(last=step + 1 == SYNC_EVERY * num_rounds)

    with ExitStack() as stack:
        fleet = Fleet(
            [w % BLOCKS for w in range(num_workers)], make, max_rounds=num_rounds, stack=stack, kind=kind, **agreed
        )
        train_fleet(fleet, data, num_rounds)

        expected = {name: tensor for entry in simulated.coordinator.masters.values() for name, tensor in entry.items()}
        assert_same(fleet.masters(), expected)
        assert_same(dict(fleet.modules[0].state_dict()), dict(module.state_dict()))
        assert fleet.runs[0].tally.accepted_tokens == simulated.tally.accepted_tokens
        assert fleet.runs[0].tally.num_rounds_closed == num_rounds
        assert sum(run.tally.sent_bytes for run in fleet.runs) == simulated.tally.sent_bytes > 0
        for counter in ("prefix_bytes", "prefix_tokens"):
            assert sum(getattr(run.tally, counter) for run in fleet.runs) == getattr(simulated.tally, counter)
            assert (getattr(simulated.tally, counter) > 0) is (make is not ThreeBlocks)
        assert not any(verdict is not Verdict.ACCEPTED for _, verdict in fleet.desk.service.counts)


def train_fleet(fleet: "Fleet", data: Sequence[list[Tensor]], num_rounds: int) -> None:
    """Train whole rounds in lockstep, and assemble the module of the first worker."""
    num_workers = len(fleet.runs)
    torch.manual_seed(4)
    for step in range(SYNC_EVERY * num_rounds):
        for w in range(num_workers):
            fleet.step(w, data[step * num_workers + w])
        if (step + 1) % SYNC_EVERY == 0:
            for run in fleet.runs:
                run.send_round()
            for run in fleet.runs:
                run.take_round()
    fleet.runs[0].assemble()


def test_worker_run_masters_of_a_module_are_every_tensor_once() -> None:
    module = seeded(ThreeBlocks)
    masters = masters_of(module, cut(module, declared_layout(module), BLOCKS))
    assert list(masters) == ["block0", "block1", "block2", INTERFACE]
    names = [name for entry in masters.values() for name in entry]
    assert sorted(names) == sorted(module.state_dict())


def test_worker_run_holds_optimizer_state_of_its_block_and_the_interface_only() -> None:
    fleet = Fleet([0, 1, 2])
    [batch] = batches(1)
    fleet.step(1, batch)
    names = {name: name.split(".")[:2] for name in fleet.runs[1].workers.named_state(fleet.runs[1].worker)}
    assert {"embed.weight", "readout.weight", "layers.1.linear.weight"} <= names.keys()
    assert {parts[1] for parts in names.values() if parts[0] == "layers"} == {"1"}
    assert all(parameter.requires_grad for parameter in fleet.modules[1].parameters())


def test_worker_run_starts_from_the_runs_masters_whatever_its_seed_was() -> None:
    fleet = Fleet([0, 1, 2])
    torch.manual_seed(99)
    other = ThreeBlocks()
    line = MemoryTransport(fleet.hub, "run", "token")
    welcome = line.join(WorkerFacts(3, 1))
    run = WorkerRun(other, cut(other, declared_layout(other), BLOCKS), settings(), 3, 1, SEED)
    run.begin(line, welcome)
    for entry in ("block1", INTERFACE):
        master = fleet.ledgers[entry].master
        assert_same({name: run.worker.local[name] for name in master}, master)


def test_worker_run_that_is_late_goes_on_from_the_newest_version_and_counts_its_steps() -> None:
    fleet = Fleet([0, 0, 1, 2])
    data = batches(20)
    for w in (0, 2, 3):
        fleet.step(w, next(data))
        fleet.runs[w].send_round()
    fleet.step(1, next(data))
    fleet.clock.now += RULES.deadline_s + 1
    for w in (0, 2, 3):
        fleet.runs[w].take_round()
    late = fleet.runs[1]
    late.send_round()
    late.take_round()
    assert late.version == 1 and late.first_step == SYNC_EVERY
    assert late.steps_in_round == late.worker.num_steps == 0
    master = fleet.ledgers["block0"].master
    assert_same({name: late.worker.local[name] for name in master}, master)
    assert fleet.hub.desk.service.counts["block0", Verdict.LATE] == 1


def test_worker_run_short_of_time_sends_the_steps_it_has() -> None:
    fleet = Fleet([0, 1, 2], local_steps="until_deadline")
    for run in fleet.runs:
        run.settings = settings(sync_every=100)
    slow, data = fleet.runs[1], batches(6)
    for other in (0, 2):
        fleet.step(other, next(data))
        fleet.runs[other].send_round()
    for passed_s in (20.0, 20.0):
        fleet.step(1, next(data))
        fleet.clock.now += passed_s
    assert slow.pace.is_time_to_send(slow.steps_in_round)  # 20 s a step, and 10 s are left
    slow.send_round()
    reports = {report.entry: report for report in fleet.hub.desk.service.reports}
    assert (reports["block1"].accepted, reports["block1"].accepted_steps) == ((1,), 2)


def test_worker_run_knows_how_long_its_round_lasts() -> None:
    rules = RoundRules(deadline_s=50.0, deadline_quantile=1.0)
    fleet = Fleet([0, 1, 2], local_steps="until_deadline", rules=rules)
    data = batches(100)

    def run_round() -> None:
        for w in range(3):
            fleet.step(w, next(data))
        fleet.clock.now += 4.0
        for run in fleet.runs:
            run.send_round()
        for run in fleet.runs:
            run.take_round()

    for _ in range(ARRIVAL_MIN_HISTORY):
        assert not fleet.runs[1].pace.is_time_to_send(1)
        run_round()
    fleet.clock.now += 2.4  # a second step would end after 4.8 s of 5.0, which is 1.25 times the usual 4
    assert not fleet.runs[1].pace.is_time_to_send(1)
    fleet.clock.now += 0.2
    assert fleet.runs[1].pace.is_time_to_send(1)


@pytest.mark.parametrize(("verdict", "owed"), [(Verdict.ACCEPTED, True), (Verdict.LATE, False)])
def test_worker_run_keeps_what_a_codec_lost_of_an_accepted_update_only(verdict: Verdict, owed: bool) -> None:
    fleet = Fleet([0, 0, 1, 2], codec=Codec("topk", top_frac=0.1))
    for w, batch in enumerate(batches(4)):
        fleet.step(w, batch)
    if verdict is Verdict.LATE:
        fleet.clock.now += RULES.deadline_s + 1
    fleet.runs[1].send_round()
    assert fleet.hub.desk.service.counts["block0", verdict] == 1
    assert bool(fleet.runs[1].worker.feedback["block0"].residual) is owed


def test_worker_run_ends_quietly_when_the_run_is_stopped() -> None:
    fleet = Fleet([0, 1, 2])
    [batch] = batches(1)
    fleet.step(1, batch)
    before = {name: tensor.clone() for name, tensor in fleet.runs[1].worker.local.items()}
    fleet.lines[0].stop("enough")
    fleet.runs[1].finish_step(last=True)
    assert fleet.runs[1].ended
    assert before.keys() == fleet.runs[1].worker.local.keys()


def test_worker_run_sends_what_a_stop_inside_a_round_left() -> None:
    fleet = Fleet([0, 1, 2], max_rounds=1)
    for w, batch in enumerate(batches(3)):
        fleet.step(w, batch)
    for run in fleet.runs[1:]:
        run.send_round()
    fleet.runs[0].finish()
    assert fleet.ledgers["block0"].version == 1
    assert fleet.hub.desk.service.reports[0].accepted_steps == 1
    fleet.runs[0].finish()
    assert fleet.ledgers["block0"].version == 1


def test_worker_run_whose_place_was_taken_fails() -> None:
    fleet = Fleet([0, 1, 2])
    MemoryTransport(fleet.hub, "run", "token").join(WorkerFacts(1, 1))
    [batch] = batches(1)
    fleet.step(1, batch)
    with pytest.raises(SupersededError, match="worker 1"):
        fleet.runs[1].send_round()


def test_worker_run_refused_update_is_told_and_the_worker_starts_anew() -> None:
    fleet = Fleet([0, 1, 2])
    for w, batch in enumerate(batches(3)):
        fleet.step(w, batch)
    run = fleet.runs[1]
    run.worker.local["layers.1.linear.bias"].fill_(float("nan"))
    with pytest.warns(UserWarning, match="block1 does not count .nonfinite"):
        run.send_round()
    assert not run.worker.optimizer_state
    for other in (fleet.runs[0], fleet.runs[2]):
        other.send_round()
    run.take_round()
    assert run.version == 1
    assert torch.isfinite(run.worker.local["layers.1.linear.bias"]).all()


def test_worker_run_a_round_that_never_closes_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    fleet = Fleet([0, 1, 2], look_up=lambda: looks.append(1))
    [batch] = batches(1)
    fleet.step(0, batch)
    monkeypatch.setattr(WorkerRun, "_patience_s", 0.05)
    monkeypatch.setattr(worker_run, "SLICE_S", 0.01)
    fleet.runs[0].send_round()
    with pytest.raises(TransportError, match="a round must close by its deadline; got entry=interface, version=0"):
        fleet.runs[0].take_round()
    assert looks


def test_worker_run_that_joins_while_the_interface_merges_begins_with_the_merged_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_run, "SLICE_S", 0.01)
    fleet = Fleet([0, 1, 2])
    data = batches(3)
    send(fleet, data, 0)
    assert (fleet.ledgers["block0"].version, fleet.ledgers[INTERFACE].version) == (1, 0)

    module = seeded(ThreeBlocks)
    line = MemoryTransport(fleet.hub, "run", "token")
    welcome = line.join(WorkerFacts(3, 0))
    run = WorkerRun(module, cut(module, declared_layout(module), BLOCKS), settings(), 3, 0, SEED)
    run.begin(line, welcome, look_up=once(lambda: send(fleet, data, 1, 2)))
    assert run.versions == {"block0": 1, INTERFACE: 1}


def test_worker_run_that_comes_back_while_the_interface_merges_goes_on_with_the_merged_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_run, "SLICE_S", 0.01)
    data = batches(20)
    back = once(lambda: send(fleet, data, 2, 3))
    fleet = Fleet([0, 0, 1, 2], look_up=back)
    fleet.hub.desk.service.membership.members[1].beats = True  # and it is not heard of any more
    fleet.clock.now += fleet.terms.silence_s + 1
    send(fleet, data, 0, 2, 3)
    for w in (0, 2, 3):
        fleet.runs[w].take_round()
    send(fleet, data, 0)
    assert (fleet.ledgers["block0"].version, fleet.ledgers[INTERFACE].version) == (2, 1)

    send(fleet, data, 1)
    fleet.runs[1].take_round()
    assert fleet.runs[1].versions == {"block0": 2, INTERFACE: 2}


def send(fleet: Fleet, data: Iterator[list[Tensor]], *worker_ids: int) -> None:
    for worker_id in worker_ids:
        fleet.step(worker_id, next(data))
        fleet.runs[worker_id].send_round()


def once(act: Callable[[], None]) -> Callable[[], None]:
    """Return a function that acts when it is called for the first time."""
    left = [act]
    return lambda: left.pop()() if left else None
