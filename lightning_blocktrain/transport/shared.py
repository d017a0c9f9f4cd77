"""One run on several coordinators: a worker's line to all of them, which asks each for what it serves.

Owns which coordinator is asked, and the check that together they serve every entry once. Owns no request: the lines to
the single coordinators do those, with their own retries and with errors that name the address.

=======================  =====================================================================================
call                     asks
=======================  =====================================================================================
found                    all; the interface's first, since who founds that one has founded the run
join                     the interface's for id and block, then the block's, with both
fetch, submit            the entry's
leave, dismiss, stop     all, though one of them fails
status                   all, united
=======================  =====================================================================================

Covered: one coordinator that is away or starts again from its state while the others go on; founders that come at the
same time; coordinators of which some have a run's state and some have lost it (refused).
Not covered: a founder that dies between two coordinators (the others say so in time: start them again, empty). A run
with ``max_rounds`` ends for a worker with its block or with the interface, whichever is through first. A worker that
was replaced by another life on another block is only refused by the interface's coordinator.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed
from torch import Tensor
from typing_extensions import override

from lightning_blocktrain.errors import NotFoundedError, RequestRefusedError, TransportError, explain
from lightning_blocktrain.rounds import INTERFACE, Receipt, block_entry
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.rounds.verdicts import shown
from lightning_blocktrain.transport.address import split_urls
from lightning_blocktrain.transport.base import Fetched, Submission, Transport, Welcome, WorkerFacts
from lightning_blocktrain.transport.terms import RunTerms

T = TypeVar("T")

Split = Mapping[str, Collection[str] | None]
"""The entries that each coordinator serves, by its name; None: all."""

POLL_S = 0.2
PHASES = ("failed", "stopped", "empty", "waiting", "running", "finished")
"""Of several coordinators the first of these that one of them is in is the run's."""


class SharedTransport(Transport):
    """A worker's line to the coordinators that share a run.

    All of them have to answer once, to say what they serve; after that a call waits for those that it asks.

    Args:
        lines: To each coordinator, by its name in messages; closed with this one.
        found_timeout_s: How long another founder may take to bring the masters to all of them, finite.

    Raises:
        ValueError: If there is no line.
    """

    def __init__(self, lines: Mapping[str, Transport], found_timeout_s: float = 120.0) -> None:
        if not lines:
            raise ValueError(explain("lines must hold a line", "none", "name at least one coordinator"))
        self._lines = dict(lines)
        self._found_timeout_s = found_timeout_s
        self._split: Split = {}

    @override
    def found(self, terms: RunTerms, masters: Mapping[str, Mapping[str, Tensor]]) -> bool:
        split = self._known_split()
        refuse_split(split, terms)
        first = self._name_of(INTERFACE)
        others = [name for name in self._lines if name != first]
        self._refuse_half_kept(first, others)
        if not self._lines[first].found(terms, _part(masters, split[first])):
            self._await_founder(others)
            return False
        agreed = RunTerms.from_json(self._lines[first].status()["terms"])  # it may have been told some of its own
        for name in others:
            if not self._lines[name].found(agreed, _part(masters, split[name])):
                self._refuse_mixed(first, [name])
        return True

    @override
    def join(self, facts: WorkerFacts, incarnation: int | None = None) -> Welcome:
        first = self._line_of(INTERFACE)
        terms = first.status().get("terms")
        if terms is not None:
            refuse_split(self._known_split(), RunTerms.from_json(terms))
        welcome = first.join(facts, incarnation)
        line = self._line_of(block_entry(welcome.block_idx))
        if line is first:
            return welcome
        given = replace(facts, worker_id=welcome.worker_id, block_idx=welcome.block_idx)
        try:
            there = line.join(given, welcome.incarnation)
        except TransportError:
            with suppress(TransportError):
                first.leave()
            raise
        return replace(welcome, versions={**there.versions, **welcome.versions})

    @override
    def fetch(
        self,
        entry: str,
        newer_than: int = -1,
        timeout_s: float = 20.0,
        codec: Codec | None = None,
        average: bool = False,
    ) -> Fetched | None:
        return self._line_of(entry).fetch(entry, newer_than, timeout_s, codec, average)

    @override
    def submit(self, entry: str, submission: Submission) -> Receipt:
        return self._line_of(entry).submit(entry, submission)

    @override
    def leave(self) -> None:
        self._ask_all(lambda line: line.leave())

    @override
    def dismiss(self, worker_id: int) -> bool:
        return any(self._ask_all(lambda line: line.dismiss(worker_id)))

    @override
    def stop(self, reason: str) -> None:
        self._ask_all(lambda line: line.stop(reason))

    @override
    def status(self) -> dict[str, Any]:
        """Return what the coordinators say of the run as one would, and under ``coordinators`` who serves what."""
        return united({name: line.status() for name, line in self._lines.items()})

    @override
    def close(self) -> None:
        for line in self._lines.values():
            line.close()

    # Who serves what

    def _known_split(self) -> Split:
        if not self._split:
            self._split = {name: line.status().get("serves") for name, line in self._lines.items()}
        return self._split

    def _name_of(self, entry: str) -> str:
        split = self._known_split()
        for name, served in split.items():
            if served is None or entry in served:
                return name
        raise RequestRefusedError(explain("entry must be served by somebody", f"entry={shown(entry)}", _told(split)))

    def _line_of(self, entry: str) -> Transport:
        return self._lines[self._name_of(entry)]

    def _ask_all(self, ask: Callable[[Transport], T]) -> list[T]:
        answers, failures = list[T](), list[TransportError]()
        for line in self._lines.values():
            try:
                answers.append(ask(line))
            except TransportError as exc:
                failures.append(exc)
        if failures:
            raise failures[0]
        return answers

    # Founding

    def _empty(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self._lines[name].status()["phase"] == "empty"]

    def _refuse_half_kept(self, first: str, others: Sequence[str]) -> None:
        empty = self._empty(others)
        kept = [name for name in others if name not in empty]
        if kept and self._empty([first]):  # asked last: who founds the run at this moment begins with it
            self._refuse_mixed(first, kept)

    def _refuse_mixed(self, first: str, kept: Sequence[str]) -> None:
        rule = "the coordinators of a run must all be new, or all have its state"
        got = f"state at {', '.join(kept)}, none at {first}"
        raise RequestRefusedError(explain(rule, got, "start them on their state folders, or all on empty ones"))

    def _await_founder(self, names: Sequence[str]) -> None:
        limit = stop_after_delay(self._found_timeout_s)
        retrying = Retrying(stop=limit, wait=wait_fixed(POLL_S), retry=retry_if_result(bool))
        try:
            retrying(self._empty, names)
        except RetryError as exc:
            rule = f"who founds a run must bring masters to all its coordinators within {self._found_timeout_s:g} s"
            got = f"none at {', '.join(exc.last_attempt.result())}"
            raise NotFoundedError(explain(rule, got, "start all of them again on empty state folders")) from exc


def line_to(urls: str, open_one: Callable[[str], Transport]) -> Transport:
    """Return a line to a coordinator, or to all those that share a run.

    Args:
        urls: One URL, or several with commas between them, in any order.
        open_one: Makes the line to one of them.

    Raises:
        ValueError: If one is named twice, or ``open_one`` refuses it.
    """
    lines = {name: open_one(name) for name in split_urls(urls)}
    return next(iter(lines.values())) if len(lines) == 1 else SharedTransport(lines)


def refuse_split(split: Split, terms: RunTerms) -> None:
    """Refuse coordinators that do not serve every entry of a run once.

    Raises:
        RequestRefusedError: Naming the entries, and all coordinators with what they serve.
    """
    wanted = terms.entries(True)
    given = Counter(entry for served in split.values() for entry in (wanted if served is None else served))
    faults = {
        "served twice": sorted(entry for entry, count in given.items() if count > 1),
        "served by nobody": [entry for entry in wanted if entry not in given],
        "not of this run": sorted(given.keys() - set(wanted)),
    }
    got = ", ".join(f"{fault}: {entries}" for fault, entries in faults.items() if entries)
    if got:
        rule = "the coordinators of a run must serve each of its blocks, and its interface, once"
        raise RequestRefusedError(explain(rule, got, _told(split)))


def _told(split: Split) -> str:
    serves = (f"{name} serves {'all' if served is None else list(served)}" for name, served in split.items())
    return ", ".join(serves)


def _part(
    masters: Mapping[str, Mapping[str, Tensor]], serves: Collection[str] | None
) -> dict[str, Mapping[str, Tensor]]:
    return {entry: tensors for entry, tensors in masters.items() if serves is None or entry in serves}


def united(statuses: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the statuses of the coordinators of one run as one.

    Args:
        statuses: By name of the coordinator, as ``Transport.status`` returned them; at least one.

    Returns:
        The same names. The phase is the first of ``PHASES`` that one is in, with its reason; a worker's counts are
        those of its block's coordinator; ``traffic`` is summed; beside them ``coordinators`` by name.
    """
    ordered = sorted(statuses.values(), key=lambda status: INTERFACE not in (status.get("serves") or (INTERFACE,)))
    leading = min(ordered, key=lambda status: PHASES.index(status["phase"]))
    entries = {entry: kept for status in ordered for entry, kept in status.get("entries", {}).items()}
    facts = ("phase", "reason", "serves")
    one = {
        **ordered[0],
        **{name: leading[name] for name in ("phase", "reason")},
        "serves": None,
        "coordinators": {name: {fact: status.get(fact) for fact in facts} for name, status in statuses.items()},
    }
    traffic = Counter[str]()
    for status in ordered:
        traffic.update(status.get("traffic", {}))
    if traffic:
        one["traffic"] = dict(traffic)
    if entries:
        one["entries"] = {entry: entries[entry] for entry in sorted(entries, key=_entry_order)}
        one["workers"] = _united_workers(ordered)
        one["missing_blocks"] = sorted({b for status in ordered for b in status.get("missing_blocks", ())})
    return one


def _entry_order(entry: str) -> tuple[bool, int, str]:
    return entry == INTERFACE, len(entry), entry


def _united_workers(ordered: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # The interface's coordinator, which comes first, knows who is on which block now; the block's counts its rounds.
    workers: dict[str, Any] = {}
    for status in ordered:
        for worker_id, kept in status.get("workers", {}).items():
            known = workers.setdefault(worker_id, kept)
            if known["entry"] == kept["entry"] and kept["entry"] in status["entries"]:
                workers[worker_id] = kept
    return {worker_id: workers[worker_id] for worker_id in sorted(workers, key=int)}
