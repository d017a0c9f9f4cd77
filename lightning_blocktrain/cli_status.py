"""A run as a terminal shows it: a line of facts, a table of its blocks, a table of its workers.

Owns the layout. It asks nobody: a status comes in (``coordinator/status.py``), something that rich prints goes out.
Host names and reasons come from strangers: what is not printable is replaced, and no text is read as markup.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

LATE = ("late", "stale")
PHASE_STYLES = {"running": "green", "finished": "green", "failed": "red"}
PHASE_WORDS = {"empty": "without a model: its first worker brings it", "waiting": "waiting for workers"}
STATE_STYLES = {"in": "green", "silent": "red", "left": "dim"}
MAX_WORKERS = 50
"""Workers that are shown; of the others there is a count."""


def status_view(status: Mapping[str, Any]) -> Group:
    """Return what a person wants to know of a run.

    Args:
        status: What a coordinator answers to ``/status``.
    """
    parts: list[Any] = [_headline(status), _facts(status)]
    if status.get("entries"):
        parts += ["", _entry_table(status["entries"])]
    if status.get("workers"):
        parts += ["", _worker_table(status["workers"])]
    return Group(*parts)


def plain(text: object) -> str:
    """Return a text without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def _headline(status: Mapping[str, Any]) -> Text:
    phase = plain(status["phase"])
    words = (PHASE_WORDS.get(phase, phase), PHASE_STYLES.get(phase, "yellow"))
    line = Text.assemble("run ", (plain(status["run_id"]), "bold"), " is ", words)
    if status.get("reason"):
        line.append(f": {plain(status['reason'])}")
    return line


def _facts(status: Mapping[str, Any]) -> Text:
    traffic, workers = status.get("traffic", {}), status.get("workers", {}).values()
    states = [_state(kept) for kept in workers]
    heard, expected = (sum(kept[name] for kept in workers) for name in ("rounds_accepted", "rounds_expected"))
    facts = [f"{states.count('in')} workers in", f"{states.count('silent')} silent"]
    if expected:
        facts.append(f"{_share(heard, expected)} rounds in time")
    facts.append(f"{_mib(traffic.get('received_bytes', 0))} received")
    prefix = f" ({_mib(traffic['prefix_bytes'])} of prefixes)" if traffic.get("prefix_bytes") else ""
    facts.append(f"{_mib(traffic.get('sent_bytes', 0))} sent{prefix}")
    if traffic.get("wrong_tokens"):
        facts.append(f"{traffic['wrong_tokens']} wrong tokens")
    if status.get("missing_blocks"):
        facts.append(f"no worker for block {_listed(status['missing_blocks'])}")
    return Text(", ".join(facts))


def _entry_table(entries: Mapping[str, Any]) -> Table:
    table = _table("block", "version", "left", "waits for", "accepted", "late", "refused", "last round")
    for name, kept in entries.items():
        verdicts = kept["verdicts"]
        late, accepted = sum(verdicts.get(verdict, 0) for verdict in LATE), verdicts.get("accepted", 0)
        refused = sum(verdicts.values()) - accepted - late
        left_s = kept["closes_in_s"]
        table.add_row(
            Text(plain(name)),
            str(kept["version"]),
            "-" if left_s is None else f"{left_s:.1f} s",
            _listed(kept["waits_for"]) or "-",
            str(accepted),
            Text(str(late), "yellow" if late else ""),
            Text(str(refused), "red" if refused else ""),
            _last_round(kept["last_round"]),
        )
    return table


def _last_round(last: Mapping[str, Any] | None) -> Text:
    if last is None:
        return Text("-", "dim")
    heard = len(set(last["accepted"]) & set(last["expected"]))
    note = f"; {plain(last['note'])}" if last["note"] else ""
    text = f"{heard} of {len(last['expected'])}, {last['took_s']:.1f} s{note}"
    return Text(text, "" if last["merged"] else "yellow")


def _worker_table(workers: Mapping[str, Any]) -> Table:
    table = _table("worker", "block", "state", "host", "rounds in time")
    for worker_id, kept in list(workers.items())[:MAX_WORKERS]:
        state = _state(kept)
        cells = (Text(plain(kept["entry"])), Text(state, STATE_STYLES[state]), Text(plain(kept["host"] or "-")))
        table.add_row(Text(plain(worker_id)), *cells, _share(kept["rounds_accepted"], kept["rounds_expected"]))
    if len(workers) > MAX_WORKERS:
        table.add_row(Text(f"and {len(workers) - MAX_WORKERS} more", "dim"))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _state(kept: Mapping[str, Any]) -> str:
    if kept["is_live"]:
        return "in"
    return "silent" if kept["is_silent"] else "left"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "-"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _listed(items: Iterable[object]) -> str:
    return ", ".join(plain(item) for item in items)
