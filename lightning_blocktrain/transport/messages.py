"""The contract's types as JSON and as frames, and back; what comes back is checked, for it may come from strangers.

Owns the names of the fields. Owns no bytes (``wire.py``). Counts and versions of an update are passed on as they are:
the ledger answers them with a verdict.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from torch import Tensor

from lightning_blocktrain.errors import WireError, explain
from lightning_blocktrain.rounds import Params, Receipt, Verdict
from lightning_blocktrain.rounds.verdicts import is_count, shown
from lightning_blocktrain.transport.base import Fetched, Sender, Submission, Welcome, WorkerFacts
from lightning_blocktrain.transport.terms import RunTerms
from lightning_blocktrain.transport.wire import Frame, Outgoing

SENDER_FIELDS = ("worker_id", "incarnation")
COUNT_FIELDS = ("base_version", "num_steps", "num_tokens")
MAX_META = 32


def pack_submission(sender: Sender, submission: Submission) -> Outgoing:
    """Return an update as a message."""
    header = {name: _sendable(getattr(sender, name)) for name in SENDER_FIELDS}
    header |= {name: _sendable(getattr(submission, name)) for name in COUNT_FIELDS}
    return Outgoing({**header, "meta": dict(submission.meta)}, submission.tensors)


def _sendable(value: object) -> object:
    # Whatever else it is, the ledger has to refuse it, and JSON may not know it (NaN).
    return value if is_count(value) else shown(value)


def unpack_submission(frame: Frame) -> tuple[Sender, Submission]:
    """Return the update that a message holds; its tensors are views of the message, which nobody else has.

    Raises:
        WireError: If its meta is no mapping of text to text.
    """
    header, meta = frame.header, _meta_in(frame)
    sender = Sender(**{name: header.get(name) for name in SENDER_FIELDS})  # type: ignore[arg-type]
    counts: dict[str, Any] = {name: header.get(name) for name in COUNT_FIELDS}
    return sender, Submission(**counts, tensors=frame.tensors, meta=meta, owned=True)


def _meta_in(frame: Frame) -> dict[str, str]:
    meta = frame.header.get("meta", {})
    if not isinstance(meta, dict) or len(meta) > MAX_META or not all(isinstance(text, str) for text in meta.values()):
        raise WireError("Not a valid message: meta must map names to text.")
    return meta


def pack_fetched(
    version: int, params: Params, closes_in_s: float | None = None, meta: Mapping[str, str] | None = None
) -> Outgoing:
    """Return a version of an entry as a message; the tensors are not copied."""
    return Outgoing({"version": version, "closes_in_s": closes_in_s, "meta": dict(meta or {})}, params)


def unpack_fetched(frame: Frame) -> Fetched:
    """Return the version of an entry that a message holds; its tensors are views of the message.

    Raises:
        WireError: If it names no version, or its meta is no mapping of text to text.
    """
    version = frame.header.get("version")
    if not is_count(version):
        raise WireError("Not a valid message: it names no version.")
    told = frame.header.get("closes_in_s")
    closes_in_s = float(told) if isinstance(told, int | float) else None
    return Fetched(version, frame.tensors, closes_in_s, _meta_in(frame))


def pack_masters(terms: RunTerms, masters: Mapping[str, Mapping[str, Tensor]] | None) -> Outgoing:
    """Return a run's terms and first masters as a message; without masters it asks whether they are wanted."""
    tensors = {f"{entry}:{name}": tensor for entry, kept in (masters or {}).items() for name, tensor in kept.items()}
    return Outgoing({"terms": terms.to_json(), "entries": None if masters is None else list(masters)}, tensors)


def unpack_masters(frame: Frame) -> tuple[RunTerms, dict[str, Params] | None]:
    """Return the terms and masters that a message holds.

    Raises:
        ValueError: If the terms are none, or a tensor belongs to no entry.
    """
    terms = RunTerms.from_json(frame.header.get("terms", {}))
    entries = frame.header.get("entries")
    if entries is None:
        return terms, None
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise WireError("Not a valid message: entries must be a list of names.")
    masters: dict[str, Params] = {entry: {} for entry in entries}
    for key, tensor in frame.tensors.items():
        entry, _, name = key.partition(":")
        if entry not in masters:
            raise WireError(f"Not a valid message: the tensor {key} belongs to no entry.")
        masters[entry][name] = tensor
    return terms, masters


def facts_of(values: Mapping[str, Any]) -> WorkerFacts:
    """Return the facts that JSON says.

    Raises:
        ValueError: If a name is unknown or the identity is no mapping.
    """
    known = {item.name for item in fields(WorkerFacts)}
    if not isinstance(values, Mapping) or not values.keys() <= known or "nonce" not in values:
        got = f"names={sorted(map(str, values))[:20] if isinstance(values, Mapping) else type(values).__name__}"
        raise ValueError(explain(f"facts must have names out of {sorted(known)}", got, "use WorkerFacts"))
    if not isinstance(values.get("identity", {}), dict):
        got = f"identity={shown(values['identity'])}"
        raise ValueError(explain("identity must map names to plain values", got, "send a JSON object"))
    return WorkerFacts(**values)


def welcome_json(welcome: Welcome) -> dict[str, Any]:
    """Return a welcome as plain values."""
    values = {item.name: getattr(welcome, item.name) for item in fields(Welcome)}
    return {**values, "versions": dict(welcome.versions), "terms": welcome.terms.to_json()}


def welcome_of(values: Mapping[str, Any]) -> Welcome:
    """Return the welcome that JSON says.

    Raises:
        ValueError: If it is none.
    """
    try:
        return Welcome(**{**values, "terms": RunTerms.from_json(values["terms"])})
    except (TypeError, KeyError) as exc:
        raise ValueError(explain("the welcome must have the fields of Welcome", repr(exc), "use one version")) from exc


def receipt_json(receipt: Receipt) -> dict[str, Any]:
    """Return a receipt as plain values."""
    return asdict(receipt)


def receipt_of(values: Mapping[str, Any]) -> Receipt:
    """Return the receipt that JSON says.

    Raises:
        ValueError: If it is none.
    """
    try:
        return Receipt(Verdict(values["verdict"]), values["version"], values["reason"])
    except (TypeError, KeyError) as exc:
        raise ValueError(explain("a receipt must have verdict, version, reason", repr(exc), "use one version")) from exc
