"""Who works on what: ids, blocks, incarnations, and who has fallen silent.

Owns the assignment of ids and blocks, around the run's ``Roster``. Owns no round. Pure: the clock is an argument. Not
synchronised: the thread that calls the ledgers calls it.

A worker is live from its join until it leaves or, if it gives signs of life at all, until none has come for
``silence_s``. Silence is not final: the next sign of the same incarnation makes it live again.

Of several coordinators that share a run, the one of the interface assigns ids and blocks and knows all workers. The
others know those of their blocks, who join them with what they were given there.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from lightning_blocktrain.errors import NotJoinedError, RequestRefusedError, SupersededError, explain
from lightning_blocktrain.rounds import INTERFACE, Roster
from lightning_blocktrain.rounds.verdicts import is_count, shown
from lightning_blocktrain.transport.base import Sender, WorkerFacts
from lightning_blocktrain.transport.terms import MAX_WORKERS, RunTerms, identity_differences

MAX_TEXT_CHARS = 200


@dataclass
class Member:
    """What is known of a worker id.

    Args:
        worker_id: Its id.
        block_idx: The block it trains.
        nonce: Of its present life.
        host: Where it says it runs.
        beats: Whether it gives signs of life between its requests.
        silent: Whether it was taken for gone because none came.
        expected: Block rounds that were closed and had waited for it.
        accepted: Block rounds that its update counts in.
    """

    worker_id: int
    block_idx: int
    nonce: str
    host: str
    beats: bool
    silent: bool = False
    expected: int = 0
    accepted: int = 0


class Membership:
    """The members of one run.

    Args:
        roster: Of the run; shared with the ledgers.
        terms: Of the run.
        serves: The entries that this coordinator serves; None: all.
    """

    def __init__(self, roster: Roster, terms: RunTerms, serves: Collection[str] | None = None) -> None:
        self.roster = roster
        self.assigns = serves is None or INTERFACE in serves
        """Whether it gives out ids and blocks, and so knows all workers."""
        self.blocks = tuple(range(terms.num_blocks)) if self.assigns else terms.blocks_in(serves or ())
        """The blocks whose workers it knows."""
        self._terms = terms
        self._members: dict[int, Member] = {}
        self._worker_of_nonce: dict[str, int] = {}
        self._heard_at: dict[int, float] = {}

    @property
    def members(self) -> Sequence[Member]:
        """Everyone who ever joined, by id."""
        return tuple(self._members[worker_id] for worker_id in sorted(self._members))

    @property
    def num_workers(self) -> int:
        """How many parts the data has: one per worker that is known, and as many as the run needs at the least."""
        least = self._terms.num_blocks * self._terms.rules.needed_replicas
        return max(self._terms.num_workers or least, len(self._members))

    def block_of(self, worker_id: int) -> int | None:
        """Return the block that a worker trains, or None if it never joined."""
        member = self._members.get(worker_id)
        return None if member is None else member.block_idx

    def live_of(self, block_idx: int) -> tuple[int, ...]:
        """Return the live workers of a block, ascending."""
        return tuple(w for w in self.roster.live if self._members[w].block_idx == block_idx)

    def missing_for_start(self) -> str:
        """Return who has to join before the first round, for people; empty when nobody has."""
        if self._terms.num_workers is not None and self.assigns:
            missing = sorted(set(range(self._terms.num_workers)) - set(self.roster.live))
            return f"workers {missing}" if missing else ""
        lacking = {block_idx: self._needed(block_idx) - len(self.live_of(block_idx)) for block_idx in self.blocks}
        short = [f"{count} of block {block_idx}" for block_idx, count in lacking.items() if count > 0]
        return f"workers: {', '.join(short)}" if short else ""

    def _needed(self, block_idx: int) -> int:
        if self._terms.num_workers is None:
            return self._terms.rules.needed_replicas
        return len(range(block_idx, self._terms.num_workers, self._terms.num_blocks))  # as ids are dealt to blocks

    def admit(self, facts: WorkerFacts, incarnation: int | None, beats: bool, now: float) -> Member:
        """Make a worker a live member.

        The same nonce again is the same life: nothing changes but that it is live.

        Args:
            facts: What it says of itself.
            incarnation: As it counts; None: one more than the newest.
            beats: Whether it will give signs of life.
            now: Seconds on the caller's clock.

        Raises:
            RequestRefusedError: If the facts do not fit the run, or no id is free.
            SupersededError: If another life of this worker has the same incarnation or a newer one.
        """
        self._check_facts(facts, incarnation)
        known = self._worker_of_nonce.get(facts.nonce)
        if known is None:
            member = self._new_life(facts, incarnation, beats)
        else:
            member = self._members[known]
            self.roster.join(known, self.roster.incarnation_of(known) or 0)
        member.silent = False
        self._heard_at[member.worker_id] = now
        return member

    def _new_life(self, facts: WorkerFacts, incarnation: int | None, beats: bool) -> Member:
        worker_id = self._free_id() if facts.worker_id is None else facts.worker_id
        known = self.roster.incarnation_of(worker_id)
        newest = -1 if known is None else known
        if incarnation is not None and incarnation <= newest:
            raise SupersededError(f"Worker {worker_id} has joined as incarnation {newest}, you are {incarnation}.")
        block_idx = self._block_for(facts)
        earlier = self._members.get(worker_id)
        counts = (0, 0)
        if earlier is not None:
            counts = (earlier.expected, earlier.accepted)
            del self._worker_of_nonce[earlier.nonce]
        self.roster.join(worker_id, newest + 1 if incarnation is None else incarnation)
        member = Member(worker_id, block_idx, facts.nonce, facts.host, beats, False, *counts)
        self._members[worker_id] = member
        self._worker_of_nonce[facts.nonce] = worker_id
        return member

    def _check_facts(self, facts: WorkerFacts, incarnation: int | None) -> None:
        bounds = (("worker_id", facts.worker_id, MAX_WORKERS), ("block_idx", facts.block_idx, self._terms.num_blocks))
        for name, value, bound in bounds:
            if value is not None and not (is_count(value) and value < bound):
                got = f"{name}={shown(value)}"
                raise RequestRefusedError(explain(f"{name} must be below {bound}, or None", got, "count from 0"))
        if incarnation is not None and not is_count(incarnation):
            got = f"incarnation={shown(incarnation)}"
            raise RequestRefusedError(explain("incarnation must be a non-negative int or None", got, "leave it out"))
        if not self.assigns and (facts.worker_id is None or facts.block_idx not in self.blocks):
            rule = f"a worker must join the interface's coordinator first, then here for block {list(self.blocks)}"
            got = f"worker_id={shown(facts.worker_id)}, block_idx={shown(facts.block_idx)}"
            raise RequestRefusedError(explain(rule, got, "name all coordinators of the run"))
        for name, text, least in (("nonce", facts.nonce, 1), ("host", facts.host, 0)):
            if not isinstance(text, str) or not least <= len(text) <= MAX_TEXT_CHARS:
                rule = f"{name} must be text of {least} to {MAX_TEXT_CHARS} characters"
                raise RequestRefusedError(explain(rule, f"{name}={shown(text)}", "shorten it"))
        differing = identity_differences(self._terms.full_identity, facts.identity)
        if differing:
            rule = "a worker must train the run's model in the run's way"
            raise RequestRefusedError(explain(rule, "; ".join(differing), "use the script of this run"))

    def _free_id(self) -> int:
        # First the ids whose part of the data nobody has, then those given back, then new ones.
        num_wanted = self._terms.num_workers or 0
        given_back = (member.worker_id for member in self.members if not member.silent)
        unknown = (worker_id for worker_id in range(MAX_WORKERS) if worker_id not in self._members)
        for worker_id in chain(range(num_wanted), given_back, unknown):
            if not self.roster.is_live(worker_id):
                return worker_id
        rule = f"a run has at most {MAX_WORKERS} workers"
        raise RequestRefusedError(explain(rule, f"num_workers={len(self._members)}", "ask for the id of one that left"))

    def _block_for(self, facts: WorkerFacts) -> int:
        if facts.block_idx is not None:
            return facts.block_idx
        if facts.worker_id is not None:
            return facts.worker_id % self._terms.num_blocks
        return min(range(self._terms.num_blocks), key=lambda block_idx: (len(self.live_of(block_idx)), block_idx))

    def check(self, sender: Sender) -> None:
        """Refuse who is no present member.

        Raises:
            NotJoinedError: If the worker never joined, or has left.
            SupersededError: If a newer incarnation has joined.
        """
        worker_id, incarnation = sender.worker_id, sender.incarnation
        known = self.roster.incarnation_of(worker_id) if is_count(worker_id) else None
        if known is None or not is_count(incarnation) or incarnation > known:
            raise NotJoinedError(f"Worker {shown(worker_id)} has not joined as incarnation {shown(incarnation)}.")
        if incarnation < known:
            raise SupersededError(f"Incarnation {incarnation} of worker {worker_id} was replaced by {known}.")
        if not self.roster.is_live(worker_id) and not self._members[worker_id].silent:
            raise NotJoinedError(f"Worker {worker_id} has left; join again.")

    def heard(self, sender: Sender, now: float) -> None:
        """Note a sign of life; of anybody but a present member it changes nothing."""
        worker_id = sender.worker_id
        known = self.roster.incarnation_of(worker_id) if is_count(worker_id) else None
        if known is None or known != sender.incarnation:
            return
        member = self._members[worker_id]
        if member.silent:
            member.silent = False
            self.roster.join(worker_id, known)
        self._heard_at[worker_id] = now

    def leave(self, sender: Sender) -> bool:
        """Take a worker's word that it sends nothing more; False when it was no live member."""
        worker_id, incarnation = sender.worker_id, sender.incarnation
        if not (is_count(worker_id) and is_count(incarnation)):
            return False
        if self.roster.incarnation_of(worker_id) != incarnation:
            return False
        self._members[worker_id].silent = False
        return self.roster.leave(worker_id, incarnation)

    def dismiss(self, worker_id: object) -> bool:
        """Take somebody's word that a worker's present life is over; False when it was no member, or had left."""
        member = self._members.get(worker_id) if is_count(worker_id) else None
        if member is None or not (member.silent or self.roster.is_live(member.worker_id)):
            return False
        member.silent = False
        self.roster.leave(member.worker_id, self.roster.incarnation_of(member.worker_id) or 0)
        return True

    def drop_silent(self, now: float) -> tuple[int, ...]:
        """Take those for gone who gave no sign of life in time, and return them."""
        dropped = tuple(w for w in self.roster.live if self._silent_at(w) <= now)
        for worker_id in dropped:
            self.roster.leave(worker_id, self.roster.incarnation_of(worker_id) or 0)
            self._members[worker_id].silent = True
        return dropped

    def next_silence(self) -> float | None:
        """Return when the next worker would be taken for gone, or None."""
        first = min(map(self._silent_at, self.roster.live), default=math.inf)
        return first if first < math.inf else None

    def _silent_at(self, worker_id: int) -> float:
        if not self._members[worker_id].beats:
            return math.inf
        return self._heard_at[worker_id] + self._terms.silence_s

    def count(self, expected: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a closed round of a block for its workers."""
        for worker_id, times in Counter(expected).items():
            self._members[worker_id].expected += times
        for worker_id, times in Counter(accepted).items():
            self._members[worker_id].accepted += times

    def state_dict(self) -> dict[str, Any]:
        """Return the membership as plain values, without secrets and clocks."""
        return {"roster": self.roster.state_dict(), "members": [asdict(member) for member in self.members]}

    def load_state_dict(self, state: dict[str, Any], now: float) -> None:
        """Replace the membership by a stored one; everyone live then counts as heard just now.

        Raises:
            CheckpointMismatchError: If it is another run's.
        """
        self.roster.load_state_dict(state["roster"])
        self._members = {kept["worker_id"]: Member(**kept) for kept in state["members"]}
        self._worker_of_nonce = {member.nonce: member.worker_id for member in self.members}
        self._heard_at = dict.fromkeys(self._members, now)
