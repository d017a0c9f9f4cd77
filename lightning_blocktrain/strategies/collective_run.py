"""A run without a coordinator, for ranks that start together and share a fast network: ``exchange="collective"``.

Owns the order in which the ranks meet. To its worker it is a line to a coordinator like any other (``Transport``);
behind it every rank keeps the fp32 master of its own block and of the interface, and all come to the same ones. The
arithmetic is ``collective_merge``'s, the bytes are ``process_groups``'.

Every rank meets the others in the same order, or they would wait for ever:

=====================  ===========================================================================================
when                   who meets for what
=====================  ===========================================================================================
first ``fetch``        all open their groups; rank 0's masters go to those who train or read them
``submit`` of a block  all: headers; the replicas of a block: its merge; for each block its lowest rank with rank 0,
                       and with those that read the block: what is read of it
``submit`` of the      all: headers, and the merge
interface
the end                rank 0 says so in a header; who has ended before it, takes part without counting; then all:
                       every block's master, so that each rank has the whole model after the fit
=====================  ===========================================================================================

So rank 0 has the assembled model after every round, and validates and writes checkpoints alone, while the others train
on until they need it again. A rank that dies breaks the groups: the others get an error, and the job ends.

Covered, as by a ledger: ``min_replicas``, ``merge``, ``weighting``, ``clip_norm``, ``outlier_factor``, outer optimizer,
NaN in a replica. Not covered: deadlines, late work and codecs, which need somebody who does not wait.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_blocktrain.errors import (
    RequestRefusedError,
    RunEndedError,
    RunFailedError,
    TransportError,
    explain,
)
from lightning_blocktrain.rounds import INTERFACE, Params, Receipt, Verdict, block_entry
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.rounds.merge import as_params, delta_norm
from lightning_blocktrain.rounds.values import encode_values
from lightning_blocktrain.strategies.cluster import GROUP_TIMEOUT_S, Board, group_device
from lightning_blocktrain.strategies.collective_entry import CollectiveEntry
from lightning_blocktrain.strategies.collective_merge import GATHERED_VALUES, Header, packed, pieces_of, unpacked
from lightning_blocktrain.strategies.process_groups import ProcessGroups
from lightning_blocktrain.transport import Fetched, RunTerms, Submission, Transport, Welcome, WorkerFacts
from lightning_blocktrain.transport.terms import identity_differences
from lightning_blocktrain.transport.wire import check_masters

WORLD = "world"
RUN_ID = "collective"
ENDED = "rank 0 has finished"


class CollectiveLine(Transport):
    """A rank's line to all others of its job; see the module for who meets when.

    ``fetch`` returns the tensors that the line goes on with, on the device of the groups: copy, do not write to them.

    Args:
        board: Of the fit.
        device: Of this process's model.
        read_by: Returns the blocks that a block's loss reads beside its own.
        look_up: Called in every wait; what it raises ends it.
        timeout_s: For one wait among ranks that have begun.
    """

    def __init__(
        self,
        board: Board,
        device: torch.device,
        read_by: Callable[[int], Collection[int]],
        look_up: Callable[[], None],
        timeout_s: float = GROUP_TIMEOUT_S,
    ) -> None:
        self._board = board
        self._rank, self._num_ranks = board.place.rank, board.place.num_workers
        self._device = group_device(device)
        self._read_by = read_by
        self._look_up = look_up
        self._timeout_s = timeout_s
        self._terms: RunTerms | None = None
        self._masters: Mapping[str, Mapping[str, Tensor]] = {}
        self._layout: dict[str, list[tuple[str, list[int], str]]] = {}
        self._groups: ProcessGroups | None = None
        self._entries: dict[str, CollectiveEntry] = {}
        self._fresh: dict[tuple[str, bool], Params] = {}
        """By entry and whether it is read or shown: rank 0 may do both with another block."""
        self._waits_until = math.inf
        self._ended = ""
        self._has_met_end = False
        self._closed = False

    # Who is there

    @override
    def found(self, terms: RunTerms, masters: Mapping[str, Mapping[str, Tensor]]) -> bool:
        check_masters(terms, masters)
        layout = {
            entry: [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
            for entry, tensors in masters.items()
        }
        self._masters = masters
        self._waits_until = time.monotonic() + terms.join_timeout_s
        self._board.put("terms", {"terms": terms.to_json(), "layout": layout})
        return True

    @override
    def join(self, facts: WorkerFacts, incarnation: int | None = None) -> Welcome:
        told = self._board.get("terms", self._board.join_timeout_s, self._look_up)
        terms, self._layout = RunTerms.from_json(told["terms"]), told["layout"]
        differing = identity_differences(terms.full_identity, facts.identity)
        if differing:
            rule = f"rank {self._rank} must train rank 0's model in its way"
            raise RequestRefusedError(explain(rule, "; ".join(differing), "start the same script on every rank"))
        self._terms = terms
        self._board.put(f"joined/{self._rank}", {"host": facts.host})
        block_idx, entries = self._rank % terms.num_blocks, terms.entries(INTERFACE in self._layout)
        versions = dict.fromkeys(entries, 0)
        return Welcome(RUN_ID, self._rank, 0, block_idx, self._num_ranks, versions, terms)

    def _waiting_for(self) -> list[int]:
        missing = [rank for rank in range(self._num_ranks) if not self._board.has(f"joined/{rank}")]
        if missing and time.monotonic() > self._waits_until:
            fix = "look at what they wrote; the script must reach trainer.fit on every rank"
            got = f"missing ranks={missing[:20]}"
            raise RunFailedError(explain("all ranks must join within join_timeout_s", got, fix))
        return missing

    # What a worker asks

    @override
    def fetch(
        self,
        entry: str,
        newer_than: int = -1,
        timeout_s: float = 20.0,
        codec: Codec | None = None,
        average: bool = False,
    ) -> Fetched | None:
        self._refuse_closed()
        if self._groups is None:
            self._begin()
        kept = self._entries[entry]
        if kept.master is None and codec is None and self._rank != 0:
            self._meet_end()  # only who makes its model whole after the run asks for what it does not train as it is
        if kept.version > newer_than:
            # What is shown of other blocks is handed over once: a round that merged nothing has nothing to show.
            is_read = codec is not None
            own = None if kept.master is None else (kept.average if average else kept.master)
            shown = self._fresh.pop((entry, is_read), {}) if own is None else dict(own)
            if codec is None:
                return Fetched(kept.version, shown)
            encoded = encode_values(codec, shown)
            return Fetched(kept.version, encoded.tensors, meta=encoded.meta)
        if self._ended:
            raise RunEndedError(self._ended)
        return None

    @override
    def submit(self, entry: str, submission: Submission) -> Receipt:
        self._refuse_closed()
        if self._ended:
            raise RunEndedError(self._ended)
        master = self._entries[entry].master
        assert master is not None
        params = as_params(submission.tensors, like=master, copy=False)
        norm = delta_norm(params, master)
        header = Header(True, False, submission.num_steps, submission.num_tokens, norm)
        verdict = self._close_round(entry, header, params)
        assert verdict is not None
        version = self._entries[entry].version
        return Receipt(
            verdict, version, f"Judged with a delta of norm {norm:.4g} in the round of version {version - 1}."
        )

    @override
    def leave(self) -> None:
        self._meet_end()

    @override
    def stop(self, reason: str) -> None:
        self._meet_end()

    @override
    def dismiss(self, worker_id: int) -> bool:
        return False  # a rank that dies ends the job

    @override
    def status(self) -> dict[str, Any]:
        entries = {
            entry: {
                "version": kept.version,
                "accepted_tokens": kept.accepted_tokens,
                "last_round": None if kept.report is None else dict(vars(kept.report)),
            }
            for entry, kept in self._entries.items()
        }
        if self._groups is None and self._rank == 0 and self._waiting_for():
            return {"run_id": RUN_ID, "phase": "waiting", "entries": entries}
        return {"run_id": RUN_ID, "phase": "stopped" if self._ended else "running", "entries": entries}

    @override
    def close(self) -> None:
        self._closed = True
        if self._groups is not None:
            self._groups.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise TransportError("The line is closed.")

    # The beginning

    def _begin(self) -> None:
        terms = self._require_terms()
        if self._rank == 0:
            self._board.put("begins", {})
        self._board.get("begins", self._timeout_s, self._look_up)
        everyone, now = tuple(range(self._num_ranks)), time.monotonic()
        self._groups = ProcessGroups(self._board.store, self._rank, self._device, self._timeout_s, self._look_up)
        self._groups.open(WORLD, everyone)
        for entry in terms.entries(INTERFACE in self._layout):
            is_block = entry != INTERFACE
            members = everyone[len(self._entries) :: terms.num_blocks] if is_block else everyone  # blocks come first
            self._entries[entry] = CollectiveEntry(entry, members, terms.rules, terms.outer, now)
            if is_block:
                self._groups.open(entry, members)
                self._groups.open(_readers(entry), self._readers_of(entry))
        for kept in self._entries.values():
            self._spread_first(kept)
        self._masters = {}

    def _readers_of(self, entry: str) -> list[int]:
        """Return the lowest rank of a block, and who has its master shown: rank 0, and its readers."""
        lowest = self._entries[entry].lowest
        return [rank for rank in range(self._num_ranks) if rank == lowest or self._reads(rank, entry)]

    def _reads(self, rank: int, entry: str) -> bool:
        if entry == INTERFACE or rank in self._entries[entry].members:
            return False
        block_idx = self._entries[entry].lowest
        return rank == 0 or self._runs(rank, block_idx)

    def _runs(self, rank: int, block_idx: int) -> bool:
        """Tell whether the loss of a rank's block reads another block."""
        return block_idx in self._read_by(rank % self._require_terms().num_blocks)

    def _keep_fresh(self, kept: CollectiveEntry, params: Params) -> None:
        if self._rank == 0:
            self._fresh[kept.name, False] = params
        if self._runs(self._rank, kept.lowest):
            self._fresh[kept.name, True] = params

    def _spread_first(self, kept: CollectiveEntry) -> None:
        # From rank 0 to the lowest rank of the block and its readers, and from there to the other replicas.
        groups = self._require_groups()
        ways = [(WORLD, 0)] if kept.name == INTERFACE else [(_readers(kept.name), 0), (kept.name, kept.lowest)]
        first = as_params(self._masters[kept.name]) if self._rank == 0 else None
        for name, root in ways:
            if name in groups:
                first = self._broadcast(name, kept.name, first, root)
        if self._rank in kept.members:
            kept.master, kept.average = first, first or {}
        elif first is not None and self._reads(self._rank, kept.name):
            self._keep_fresh(kept, first)

    def _broadcast(self, group: str, entry: str, params: Params | None, root: int) -> Params:
        """Return the root's tensors of an entry on every member; ``params`` are read on the root only."""
        groups = self._require_groups()
        if self._rank == root:
            assert params is not None
            params = {name: tensor.to(self._device) for name, tensor in params.items()}
        else:
            params = {
                name: torch.empty(shape, dtype=_dtype(dtype), device=self._device)
                for name, shape, dtype in self._layout[entry]
            }
        for piece in pieces_of(params, GATHERED_VALUES):
            flat = packed(piece, params)
            groups.broadcast(group, flat, root)
            if self._rank != root:
                for part, values in zip(piece, unpacked(piece, flat, params[piece[0].name].dtype), strict=True):
                    part.of(params).copy_(values)
        return params

    # A round

    def _close_round(self, entry: str, header: Header, params: Params) -> Verdict | None:
        """Take part in the end of a round, of all blocks or of the interface; return the verdict on this rank."""
        groups, headers = self._require_groups(), self._headers(header)
        if headers[0].stops:
            self._ended = ENDED
            raise RunEndedError(ENDED)
        closing = [kept for kept in self._entries.values() if (kept.name == INTERFACE) == (entry == INTERFACE)]
        verdicts = {kept.name: kept.verdicts(headers) for kept in closing}
        group = WORLD if entry == INTERFACE else entry
        own_norm = self._entries[entry].merge(
            self._rank, params, headers, verdicts[entry], lambda tensor: groups.all_gather(group, tensor)
        )
        self._entries[entry].move_average()
        now = time.monotonic()
        for kept in closing:
            norm = own_norm if kept.name == entry else math.nan
            if _readers(kept.name) in groups:
                norm = self._show(kept, norm)
            kept.close(headers, verdicts[kept.name], norm, now)
        return verdicts[entry].get(self._rank)

    def _headers(self, header: Header) -> list[Header]:
        return [Header.unpack(row) for row in self._require_groups().all_gather(WORLD, header.pack(self._device))]

    def _show(self, kept: CollectiveEntry, norm: float) -> float:
        """Bring what is read of a block from its lowest rank to its readers; return the norm of its step, or nan."""
        groups, name = self._require_groups(), _readers(kept.name)
        told = torch.tensor([norm], dtype=torch.float64, device=self._device)
        groups.broadcast(name, told, kept.lowest)
        is_new = math.isfinite(told.item()) or kept.rules.average_decay > 0
        if is_new and groups.size(name) > 1:
            shown = self._broadcast(name, kept.name, kept.average, kept.lowest)
            if self._rank != kept.lowest:
                self._keep_fresh(kept, shown)
        return told.item()

    # The end

    def _meet_end(self) -> None:
        """End the run with the others, and bring every rank the whole model; once."""
        if self._groups is None or self._has_met_end or self._closed:
            return
        self._has_met_end = True
        if self._rank == 0 and not self._ended:
            self._headers(Header(False, stops=True))
            self._ended = ENDED
        while not self._ended:
            self._look_up()
            self._pass_round()
        for entry, kept in self._entries.items():
            if entry != INTERFACE:
                whole = self._broadcast(WORLD, entry, kept.average, kept.lowest)
                if kept.master is None:
                    self._fresh[entry, False] = whole

    def _pass_round(self) -> None:
        """Take part in a round without counting."""
        terms = self._require_terms()
        entry = block_entry(self._rank % terms.num_blocks)
        is_due = INTERFACE in self._entries and terms.interface_due(self._entries[entry].version)
        try:
            for name in (entry, INTERFACE) if is_due else (entry,):
                self._close_round(name, Header(False), self._entries[name].master or {})
        except RunEndedError:
            pass

    def _require_groups(self) -> ProcessGroups:
        assert self._groups is not None
        return self._groups

    def _require_terms(self) -> RunTerms:
        assert self._terms is not None
        return self._terms


def _readers(entry: str) -> str:
    return f"readers/{entry}"


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
