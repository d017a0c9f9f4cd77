"""One worker's rounds over a transport: submit, wait for the close, fetch, go on.

Owns what a worker does between its steps, and its counters. Knows nothing of Lightning, of processes, or of what
carries its requests. The tensors are ``workers``': outside a step the module shows the masters as last fetched.

The order in a round, ``send_round`` and then ``take_round``: its block, and its interface where that is due, are
submitted before anything is awaited. Waiting happens in short slices, so that whoever drives the run can look up.
"""

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_blocktrain.coordinator.status import report_of
from lightning_blocktrain.errors import (
    RunEndedError,
    RunFailedError,
    SupersededError,
    TransportError,
    UnauthorisedError,
    explain,
)
from lightning_blocktrain.heap import trim_heap
from lightning_blocktrain.partition import Partition
from lightning_blocktrain.rounds import INTERFACE, Verdict, block_entry
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.strategies import block_checkpoint
from lightning_blocktrain.strategies.frozen_reader import FrozenReader
from lightning_blocktrain.strategies.pace import Pace
from lightning_blocktrain.strategies.run_settings import RunSettings
from lightning_blocktrain.strategies.tally import Tally
from lightning_blocktrain.strategies.whole import make_whole
from lightning_blocktrain.strategies.workers import SimulatedWorkers, Worker, fp32, process_streams, trained_tensors
from lightning_blocktrain.transport import Fetched, Submission, Transport, Welcome

log = logging.getLogger(__name__)

SLICE_S = 1.0
"""Longest wait between two looks up."""
MARGIN_S = 60.0
"""What a wait may last beyond what the terms of the run explain: transfers, a coordinator that restarts."""

COUNTS_OR_WAITS = (Verdict.ACCEPTED, Verdict.DUPLICATE, Verdict.LATE, Verdict.STALE)
REFUSED_CONTENT = (Verdict.NONFINITE, Verdict.OUTLIER, Verdict.MALFORMED)


class WorkerRun:
    """One worker of a run whose coordinator and other workers are elsewhere.

    Args:
        module: The live module.
        partition: Its partition.
        settings: How to train; of it only ``sync_every`` and ``inner_state`` are the worker's own business.
        worker_id: Which worker.
        block_idx: The block it trains.
        seed: Of the run, for the worker's random stream.
        assembles: Whether the module is to show all blocks' masters; else the others are released.
        for_good: Whether nobody uses the module after the run, so that ``make_whole`` is never called.
        clock: Seconds, monotonic, for the worker's pace.
        drops_base: Whether the module may show the worker's replica between steps, where the updates travel as they
            are; that saves the memory of the master.
    """

    def __init__(
        self,
        module: nn.Module,
        partition: Partition,
        settings: RunSettings,
        worker_id: int,
        block_idx: int,
        seed: int,
        assembles: bool = False,
        for_good: bool = False,
        clock: Callable[[], float] = time.monotonic,
        drops_base: bool = False,
    ) -> None:
        self.settings = settings
        self.partition = partition
        self.tally = Tally()
        self.steps_in_round = 0
        self.ended = False
        """Whether the run is over: nothing that this worker does would count."""
        kept = None if assembles else {block_idx}
        self.workers = SimulatedWorkers(module, partition, 0, seed, {worker_id: block_idx}, kept, for_good)
        [self.worker] = self.workers
        self.entry = block_entry(block_idx)
        self._names = {block_entry(b): names for b, names in enumerate(self.workers.block_names)}
        if self.workers.interface_names:
            self._names[INTERFACE] = self.workers.interface_names
        others = range(partition.num_blocks) if assembles else ()
        self.watched = [block_entry(b) for b in others if b != block_idx]
        self._reader = FrozenReader(self.workers.frozen, partition.read_by(block_idx))
        self._assembles = assembles
        self._drops_base = drops_base and not assembles
        self._versions: dict[str, int] = {}
        self._sent_interface = False
        self._clock = clock
        self.pace = Pace()
        self._line: Transport | None = None
        self._keeps_interface = False
        self._kept_prefix: Mapping[str, Any] = {}
        self._look_up = self._on_round = self._on_assembled = _nothing

    @property
    def masters(self) -> dict[str, dict[str, Tensor]]:
        """The masters by entry, as the module shows them, not to be written to; floating ones in fp32."""
        merged = self.workers.merged
        return {entry: fp32({n: merged[n] for n in names}, copy=False) for entry, names in self._names.items()}

    @property
    def version(self) -> int:
        """Rounds of its block that were closed before the one it is in."""
        return self._versions.get(self.entry, 0)

    @property
    def first_step(self) -> int:
        """Inner steps of a worker that has missed none, when the round began that this worker is in."""
        return self.version * self.settings.sync_every

    @property
    def versions(self) -> dict[str, int]:
        """By entry, the versions that the module shows."""
        return dict(self._versions)

    def show(self, entry: str, version: int, params: Mapping[str, Tensor]) -> None:
        """Let the module show another version of a watched entry, until there is a newer one."""
        self.workers.load_masters(params)
        self._versions[entry] = version

    def begin(
        self,
        line: Transport,
        welcome: Welcome,
        look_up: Callable[[], None] | None = None,
        on_round: Callable[[], None] | None = None,
        on_assembled: Callable[[], None] | None = None,
        resumes: bool = False,
    ) -> None:
        """Start from the run's masters; the worker has joined.

        Args:
            line: To the coordinator, until ``finish``; the caller closes it.
            welcome: What the coordinator answered to the join.
            look_up: Called at least once per ``SLICE_S`` of waiting; what it raises ends the wait.
            on_round: Called whenever a round of this worker begins.
            on_assembled: Called whenever the module has been assembled.
            resumes: Whether the run goes on from the checkpoint that ``resume`` was given, if any: the worker then
                keeps its copy of an interface that was not merged in the round before.
        """
        self._line, self._welcome = line, welcome
        self.pace = Pace(welcome.terms.local_steps, welcome.terms.rules.deadline_s, self._clock)
        self._look_up, self._on_round, self._on_assembled = (
            call or _nothing for call in (look_up, on_round, on_assembled)
        )
        for entry in (self.entry, *self.watched):
            self._receive(entry, -1, SLICE_S)
        self._take_interface()
        # Masters that were founded anew may be averages: a replica of before is no replica of theirs.
        goes_on = self.version > 0 or not welcome.terms.rules.average_decay
        self.workers.fetch(self.worker, interface_too=not (resumes and goes_on and self._keeps_interface))
        if self._drops_base and welcome.terms.codec.name == "fp32":
            self.workers.drop_base()
        if resumes:
            self._reader.load_state_dict(self._kept_prefix, self.version, welcome.terms)
        self._kept_prefix = {}
        self._renew_prefix(SLICE_S)
        self.pace.begin()
        self._on_round()

    @property
    def learners(self) -> list[Worker]:
        """The worker: whatever it has sent, it goes on."""
        return list(self.workers)

    def count_batch(self, worker: Worker, num_tokens: int) -> None:
        """Count a batch that the worker has trained on."""
        worker.num_tokens += num_tokens
        self.tally.worker_tokens += num_tokens
        self.workers.frozen.batch_tokens = num_tokens

    def finish_step(self, last: bool) -> None:
        """Count one inner step; finish the round if it is full or the worker stops here."""
        self.worker.num_steps += 1
        self.worker.gradients = {}
        self.tally.worker_steps += 1
        self.tally.count_prefix(self.workers.frozen)
        self.steps_in_round += 1
        is_full = self.steps_in_round == self.settings.sync_every or self.pace.is_time_to_send(self.steps_in_round)
        if (last or is_full) and not self.ended:
            self.finish_round()
            if last:
                self.assemble()

    def finish_round(self) -> None:
        """Submit the replica, wait until the round has closed, and go on from its result."""
        trim_heap()  # of gradients and activations
        self.send_round()
        trim_heap()  # of what a codec took
        self.take_round()

    def send_round(self) -> None:
        """Submit the block, and the interface if its turn has come."""
        self._sent_interface = INTERFACE in self._names and self._welcome.terms.interface_due(self.version)
        with self.pace.sending():
            for entry in (self.entry, INTERFACE) if self._sent_interface else (self.entry,):
                self._submit(entry)

    def take_round(self) -> None:
        """Wait until what was submitted has become a new version, and start from that."""
        sent_for = self.version
        self._receive(self.entry, sent_for, self._patience_s)
        took_interface = self._take_interface()
        for entry in self.watched:
            self._receive(entry, self._versions.get(entry, -1), 0.0)
            self._expect(entry)
        self._renew_prefix(0.0)
        self.workers.fetch(self.worker, interface_too=took_interface)
        self.workers.renew_optimizer_states(self.settings.inner_state, interface_too=took_interface)
        self.pace.begin()
        self.worker.num_steps = self.worker.num_tokens = self.steps_in_round = 0
        self.tally.num_rounds_closed += 1
        if self._assembles:
            self._count_rounds()
        if self.version > sent_for:  # the last one too: a checkpoint of the end shows the run where it would go on
            self._on_round()

    def _take_interface(self) -> bool:
        """Load the interface if there is a newer one, waiting for that of the block's version; return whether it was.

        Who comes back or joins while it is being merged would else begin with an older one, and stay behind.
        """
        if INTERFACE not in self._names:
            return False
        seen, due = self._versions.get(INTERFACE, -1), self._welcome.terms.interface_round(self.version)
        if seen < due:
            return self._receive(INTERFACE, due - 1, self._patience_s)
        return self._receive(INTERFACE, seen, 0.0)

    def _renew_prefix(self, wait_s: float) -> None:
        def fetch(entry: str, newer_than: int, codec: Codec) -> Fetched | None:
            return self._fetch(entry, newer_than, wait_s, codec, average=True)

        self.tally.prefix_bytes += self._reader.renew(self.version, self._welcome.terms, fetch)

    def _expect(self, entry: str) -> None:
        # The other blocks are only looked at: they arrive while this one trains, and are shown a round later at most.
        assert self._line is not None
        if not self.ended:
            self._line.expect(entry, self._versions.get(entry, -1), average=True)

    def assemble(self) -> None:
        """Wait until the module shows every watched block as it was, or newer, when this worker's round began."""
        if self._line is None:
            return
        for entry in self.watched:
            seen = self._versions.get(entry, -1)
            if seen < self.version and not self._receive(entry, self.version - 1, self._patience_s):
                log.warning("%s is still at version %d: its workers lag behind", entry, seen)
        self._on_assembled()

    def finish(self) -> None:
        """Merge what a worker that was stopped inside a round has not merged yet."""
        if self.steps_in_round and not self.ended and self._line is not None:
            self.finish_round()
            self.assemble()

    def make_whole(self) -> None:
        """Let the module hold all blocks again, while the line is open; see ``whole.make_whole``."""
        has_averages = self._line is not None and self._welcome.terms.rules.average_decay > 0
        make_whole(self.workers, self._names, self._line, has_averages and not self._assembles)

    def detach(self) -> None:
        """Ask the coordinator nothing more."""
        self._line = None

    # Requests

    def _submit(self, entry: str) -> None:
        assert self._line is not None
        if self.ended:
            return
        tensors, meta = self._encoded(entry)
        submission = Submission(
            base_version=self._versions[entry],
            num_steps=self.worker.num_steps,
            num_tokens=self.worker.num_tokens,
            tensors=tensors,
            meta=meta,
        )
        self.tally.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        try:
            receipt = self._line.submit(entry, submission)
        except RunFailedError:
            raise
        except RunEndedError as exc:
            self._end(exc)
            return
        log.debug("%s of worker %d: %s", entry, self.worker.worker_id, receipt)
        self._settle(entry, receipt.verdict)
        if receipt.verdict is Verdict.SUPERSEDED:
            raise SupersededError(receipt.reason)
        if receipt.verdict is Verdict.UNAUTHORISED:
            raise UnauthorisedError(receipt.reason)
        if receipt.verdict in REFUSED_CONTENT:
            # Not rank_zero_warn: it is silent in every process but the one that leads.
            warnings.warn(f"An update of {entry} does not count ({receipt.verdict}): {receipt.reason}", stacklevel=2)
        if receipt.verdict is Verdict.NONFINITE:
            self.worker.optimizer_state.clear()  # what made the update may be in there
        if receipt.verdict not in COUNTS_OR_WAITS + REFUSED_CONTENT:
            raise TransportError(f"The coordinator answered {receipt.verdict}, which this worker does not know.")

    def _encoded(self, entry: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        codec, names = self._welcome.terms.codec, self._names[entry]
        if codec.name == "fp32":
            # Not copied: they are read before submit returns, and nobody trains meanwhile.
            return fp32({name: self.worker.local[name] for name in names}, copy=False), {}
        encoded = self.worker.encode(codec, entry, {name: self.workers.merged[name] for name in names})
        return encoded.tensors, encoded.meta

    def _settle(self, entry: str, verdict: Verdict) -> None:
        feedback = self.worker.feedback.get(entry)
        if feedback is not None and verdict in (Verdict.ACCEPTED, Verdict.DUPLICATE):
            feedback.confirm()
        if feedback is not None and verdict in REFUSED_CONTENT:
            feedback.reset()

    def _receive(self, entry: str, newer_than: int, wait_s: float) -> bool:
        """Load an entry's newest version as soon as it is newer; return whether there was one in time.

        Raises:
            TransportError: If there was none of its own block or of the interface, and it was worth a wait.
        """
        fetched = self._fetch(entry, newer_than, wait_s, average=entry in self.watched)
        if fetched is None:
            if wait_s > 0.0 and entry not in self.watched and not self.ended:
                self._refuse_silence(entry, newer_than, wait_s)
            return False
        self.workers.load_masters(fetched.params)
        self._versions[entry] = fetched.version
        if entry not in self.watched:
            self.pace.told(fetched.closes_in_s)
            self._show_average(entry)
        return True

    def _show_average(self, entry: str) -> None:
        """Let the module show what others read of what this worker trains, where it shows the whole model."""
        if self._assembles and self._welcome.terms.rules.average_decay:
            fetched = self._fetch(entry, -1, 0.0, average=True)
            if fetched is not None:
                self.workers.show_averages(fetched.params)

    def _fetch(
        self, entry: str, newer_than: int, wait_s: float, codec: Codec | None = None, average: bool = False
    ) -> Fetched | None:
        """Return an entry's newest version as soon as it is newer; None: there was none in time, or the run is over."""
        assert self._line is not None
        ends_at = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, ends_at - time.monotonic())
            try:
                fetched = self._line.fetch(entry, newer_than, min(left_s, SLICE_S), codec, average)
            except RunFailedError:
                raise
            except RunEndedError as exc:
                self._end(exc)
                return None
            if fetched is not None or left_s <= 0:
                return fetched
            self._look_up()

    def _end(self, exc: RunEndedError) -> None:
        if not self.ended:
            log.info("worker %d stops: %s", self.worker.worker_id, exc)
        self.ended = True

    @property
    def _patience_s(self) -> float:
        # A round closes by its deadline once it is open. It opens when all have joined and, where the interface is
        # due, when the slowest block has come as far.
        terms = self._welcome.terms
        return terms.join_timeout_s + (terms.interface_every + 2) * terms.rules.deadline_s + MARGIN_S

    def _refuse_silence(self, entry: str, version: int, waited_s: float) -> None:
        got = f"entry={entry}, version={version}, waited_s={waited_s:g}"
        raise TransportError(explain("a round must close by its deadline", got, "look at the coordinator's status"))

    # Counters

    def _count_rounds(self) -> None:
        """Take the reports of the newest rounds from the coordinator."""
        assert self._line is not None
        entries: Mapping[str, Any] = self._line.status().get("entries", {})
        blocks = [entry for entry in entries if entry != INTERFACE]
        self.tally.accepted_tokens = sum(entries[entry]["accepted_tokens"] for entry in blocks)
        shown = [*blocks, INTERFACE] if self._sent_interface else blocks
        closed = {entry: entries[entry]["last_round"] for entry in shown if entries[entry]["last_round"]}
        self.tally.round_reports = [report_of(values) for values in closed.values()]

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the worker's own state; tensors, dicts, lists, str, int, float and None only."""
        streams = {"process_streams": process_streams(self.workers.device)} if self._draws_from_process else {}
        return {
            "shape": self.shape(),
            "has_averages": self._welcome.terms.rules.average_decay > 0,
            "tally": self.tally.state_dict(),
            "workers": {
                key: {**state, **self._reader.state_dict(self.version)}
                for key, state in block_checkpoint.worker_states(self.workers).items()
            },
            **streams,
        }

    def own_states(self) -> dict[str, Any]:
        """Return the worker's own state when a round begins, for a checkpoint that holds the masters as well."""
        # A checkpoint that holds averages in the place of the masters cannot give the interface back.
        keeps_interface = self._welcome.terms.rules.average_decay > 0
        states = block_checkpoint.own_states(self.workers, keeps_interface)
        return {key: {**state, **self._reader.state_dict(self.version)} for key, state in states.items()}

    @property
    def _draws_from_process(self) -> bool:
        return self.worker.random_state is None

    def shape(self) -> dict[str, Any]:
        """Return what a checkpoint must agree in to be resumed."""
        return {"num_blocks": self.partition.num_blocks, "num_layers": len(self.partition.layout.layers)}

    def saved_in(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a checkpoint holds of a run in rounds, whether of simulated workers or of processes."""
        saved = block_checkpoint.saved_run(checkpoint)
        return {name: value for name, value in saved.items() if name != "process_streams" or self._draws_from_process}

    def resume(self, checkpoint: Mapping[str, Any], optimizer: Optimizer) -> bool:
        """Continue as the worker of this block and replica in a checkpoint; return whether it holds that one.

        Raises:
            CheckpointMismatchError: If the blocks were others.
        """
        kept = self.saved_in(checkpoint)
        saved = kept.get("workers", {})
        if saved:
            block_checkpoint.refuse_other_shape(kept["shape"], self.shape())
        if self._assembles and block_checkpoint.MEMBER_KEY in checkpoint:
            self.tally = Tally(**kept["tally"])
        key = block_checkpoint.worker_key(self.workers, self.worker)
        if key not in saved:
            return False
        groups = checkpoint["optimizer_states"][0]["param_groups"]
        block_checkpoint.load_worker_states(self.workers, optimizer, groups, saved)
        self._keeps_interface = saved[key]["num_steps"] == 0
        # Simulated workers share theirs.
        self._kept_prefix = saved[key] if "prefix" in saved[key] else kept
        self.worker.num_steps = self.worker.num_tokens = 0  # the round it was in is not this run's
        return True


def masters_of(module: nn.Module, partition: Partition) -> dict[str, dict[str, Tensor]]:
    """Return a module's tensors as the masters of a run, by entry, not to be written to; floating ones in fp32."""
    tensors = trained_tensors(module, partition)
    names = {block_entry(b): block for b, block in enumerate(partition.block_names)}
    entries = {**names, INTERFACE: partition.interface_names}
    masters = {
        entry: fp32({n: tensors[n] for n in kept if n in tensors}, copy=False) for entry, kept in entries.items()
    }
    return {entry: kept for entry, kept in masters.items() if kept or entry != INTERFACE}


def _nothing() -> None:
    """Look at nothing."""
