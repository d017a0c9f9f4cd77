"""The folder of a study: the protocol it began with, its corpora, and one JSON line per finished run.

Owns resuming: what is there is never run again, and a protocol that has changed is refused, or forked into a new folder
that takes over the runs that both ask for.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.study.protocol import Protocol, ProtocolError, Run
from lightning_blocktrain.demo.curves import write_whole

HEAD, ROWS = "study.json", "results.jsonl"


class Ledger:
    """What a study has found so far.

    Args:
        folder: Of the study; made if it is missing.
        protocol: What it does.
        corpora: SHA-256 of every corpus that is to be used, by name.

    Raises:
        ProtocolError: If the folder belongs to another protocol or to other corpora.
    """

    def __init__(self, folder: Path, protocol: Protocol, corpora: dict[str, str]) -> None:
        self._path, self._digest = folder / ROWS, protocol.digest
        head = {"protocol": protocol.digest, "corpora": corpora, "runs": asdict(protocol)}
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / HEAD).exists():
            _check(folder, json.loads((folder / HEAD).read_text()), head)
        elif self._path.exists():
            raise ProtocolError(f"a folder with {ROWS} must have {HEAD}; got {folder}; use another --out")
        else:
            write_whole(folder / HEAD, (json.dumps(head, indent=1) + "\n").encode())
        self._rows = {row["key"]: row for row in rows_of(folder)}

    def __contains__(self, run: Run) -> bool:
        return run.key in self._rows

    def add(self, run: Run, result: dict[str, Any]) -> dict[str, Any]:
        """Append what a run found and return its row."""
        row = {"protocol": self._digest, "key": run.key, **asdict(run), **result}
        self._append([row])
        return row

    def adopt(self, rows: Iterable[dict[str, Any]], runs: Iterable[Run], corpora: dict[str, str]) -> int:
        """Take over the rows of another study that this one asks for, on the same corpora; return how many."""
        by_key = {run.key: run for run in runs}
        taken = [
            {**row, "protocol": self._digest, "part": by_key[row["key"]].part}
            for row in rows
            if row["key"] in by_key.keys() - self._rows.keys() and row["corpus_sha256"] == corpora[row["corpus"]]
        ]
        self._append(taken)
        return len(taken)

    def _append(self, rows: list[dict[str, Any]]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self._rows |= {row["key"]: row for row in rows}

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows in the order in which they came."""
        return list(self._rows.values())


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the finished runs of a folder; a line that a kill cut off is left out, and the file mended."""
    path = folder / ROWS
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    if cut := lines.pop():
        write_whole(path, "".join(f"{line}\n" for line in lines).encode())
        print(f"{path}: a last line of {len(cut)} characters, cut off, was removed", flush=True)
    return [json.loads(line) for line in lines]


def _check(folder: Path, there: dict[str, Any], now: dict[str, Any]) -> None:
    if there["protocol"] != now["protocol"]:
        raise ProtocolError(
            f"a study must end with the protocol it began with; got {now['protocol']}, and {folder} holds "
            f"{there['protocol']}; use another --out, with --fork {folder} to take over what both ask for"
        )
    for name, sha256 in now["corpora"].items():
        if there["corpora"].get(name) != sha256:
            raise ProtocolError(
                f"a study must end with the corpora it began with; got another {name} ({sha256[:12]}, and {folder} "
                f"holds {str(there['corpora'].get(name))[:12]}); give the same files, or another --out"
            )
