"""What a coordinator tells those who watch a run: one snapshot of plain values, and the same for Prometheus.

Owns the names. Holds no secret: neither contains the token.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from lightning_blocktrain.coordinator.service import CoordinatorService
from lightning_blocktrain.rounds import Ledger, RoundReport, Verdict, block_entry


def snapshot(service: CoordinatorService, now: float) -> dict[str, Any]:
    """Return the state of a run.

    Returns:
        ``run_id``, ``phase``, ``reason``, ``terms``; ``entries`` by name (version, length, open round, verdict counts,
        report of the last closed round); ``workers`` by id as text (block, liveness, share of their rounds);
        ``missing_blocks``.
    """
    return {
        "run_id": service.run_id,
        "phase": str(service.phase),
        "reason": service.reason,
        "terms": service.terms.to_json(),
        "entries": {entry: _entry(service, ledger, now) for entry, ledger in service.ledgers.items()},
        "workers": _workers(service),
        "missing_blocks": list(service.schedule.missing_blocks),
    }


def _entry(service: CoordinatorService, ledger: Ledger, now: float) -> dict[str, Any]:
    deadline = ledger.deadline
    last = next((report for report in reversed(service.reports) if report.entry == ledger.entry), None)
    given = {verdict.value: count for (entry, verdict), count in service.counts.items() if entry == ledger.entry}
    return {
        "version": ledger.version,
        "num_bytes": sum(tensor.numel() * tensor.element_size() for tensor in ledger.master.values()),
        "is_open": ledger.is_open,
        "closes_in_s": None if deadline is None else max(0.0, deadline - now),
        "waits_for": list(ledger.pending),
        "accepted_tokens": service.accepted_tokens[ledger.entry],
        "verdicts": given,
        "last_round": None if last is None else _round(last),
    }


def _round(report: RoundReport) -> dict[str, Any]:
    values = {name: _plain(value) for name, value in vars(report).items()}
    return {**values, "participation": report.participation, "took_s": report.closed_at - report.opened_at}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return {str(name): kept for name, kept in value.items()} if isinstance(value, dict) else value


def report_of(values: Mapping[str, Any]) -> RoundReport:
    """Return the report of a closed round that a snapshot shows."""
    known = {item.name: values[item.name] for item in fields(RoundReport)}
    tuples = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    counts = {Verdict(verdict): count for verdict, count in values["counts"].items()}
    return RoundReport(**{**known, **tuples, "counts": counts})


def _workers(service: CoordinatorService) -> dict[str, dict[str, Any]]:
    return {
        str(member.worker_id): {
            "block_idx": member.block_idx,
            "entry": block_entry(member.block_idx),
            "incarnation": service.roster.incarnation_of(member.worker_id),
            "is_live": service.roster.is_live(member.worker_id),
            "is_silent": member.silent,
            "host": member.host,
            "rounds_expected": member.expected,
            "rounds_accepted": member.accepted,
        }
        for member in service.membership.members
    }


def prometheus_text(status: Mapping[str, Any], traffic: Mapping[str, float]) -> str:
    """Return a snapshot in Prometheus' text format.

    Args:
        status: What ``snapshot`` returned, or the status of a coordinator without masters.
        traffic: Counters of the server by name, such as ``received_bytes``.
    """
    lines = [line for name, value in traffic.items() for line in _family(f"{name}_total", "counter", [("", value)])]
    phases = [(_labels(run_id=status["run_id"], phase=status["phase"]), 1)]
    lines += _family("run_phase", "gauge", phases)
    lines += [line for family in _entry_families(status.get("entries", {})) for line in family]
    lines += [line for family in _worker_families(status.get("workers", {})) for line in family]
    return "\n".join(lines) + "\n"


def _entry_families(entries: Mapping[str, Any]) -> Iterator[list[str]]:
    for field, kind, name in (
        ("version", "gauge", "version"),
        ("closes_in_s", "gauge", "round_closes_in_seconds"),
        ("accepted_tokens", "counter", "accepted_tokens_total"),
    ):
        yield _family(name, kind, [(_labels(entry=entry), kept[field]) for entry, kept in entries.items()])
    verdicts = [
        (_labels(entry=entry, verdict=verdict), count)
        for entry, kept in entries.items()
        for verdict, count in kept["verdicts"].items()
    ]
    yield _family("updates_total", "counter", verdicts)


def _worker_families(workers: Mapping[str, Any]) -> Iterator[list[str]]:
    for field, kind, name in (
        ("is_live", "gauge", "worker_live"),
        ("rounds_expected", "counter", "worker_rounds_expected_total"),
        ("rounds_accepted", "counter", "worker_rounds_accepted_total"),
    ):
        samples = [(_labels(worker=w, entry=kept["entry"]), kept[field]) for w, kept in workers.items()]
        yield _family(name, kind, samples)


def _family(name: str, kind: str, samples: list[tuple[str, Any]]) -> list[str]:
    known = [(labels, value) for labels, value in samples if value is not None]
    if not known:
        return []
    full = f"blocktrain_{name}"
    return [f"# TYPE {full} {kind}", *(f"{full}{labels} {_number(value)}" for labels, value in known)]


def _number(value: float | bool) -> str:
    return repr(float(value)) if math.isfinite(value) else "NaN"


def _labels(**labels: str) -> str:
    escaped = {
        name: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, text in labels.items()
    }
    return "{" + ",".join(f'{name}="{text}"' for name, text in escaped.items()) + "}"
