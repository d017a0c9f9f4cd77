"""Trainings that other benchmarks have done already, as runs of a study: the same model, method, seed, budget and text.

``benchmarks.composition`` and ``benchmarks.pipeline_target`` train with the functions of the kinds ``blocks`` and
``pipeline``, and write one JSON line a training. What a study asks for and they have is not trained again.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.composition import ARMS, FLOPS
from benchmarks.pipeline_training import METHODS, Shape, strategy_options
from benchmarks.study.kinds import blocks_of, blocks_result, pipeline_result
from benchmarks.study.protocol import Run
from lightning_blocktrain.demo.recipe import Recipe


def reused(runs: Sequence[Run], path: Path, corpora: Mapping[str, str]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Yield runs with what a file of another benchmark holds of them.

    Args:
        runs: Those that are wanted.
        path: Rows of ``benchmarks.composition`` or ``benchmarks.pipeline_target``.
        corpora: SHA-256 of every corpus by name. Rows that do not name their text's count as of the corpus they name.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for run in runs:
        found = next((result for row in rows if (result := _result(run, row, corpora[run.corpus])) is not None), None)
        if found is not None:
            yield run, {**found, "from": path.name}


def _result(run: Run, row: Mapping[str, Any], sha256: str) -> dict[str, Any] | None:
    """Return what a row says of a run; None if it is of another one."""
    if row["seed"] != run.seed or row.get("corpus_sha256", sha256) != sha256:
        return None
    if run.kind == "blocks" and "recipe" in row:
        return _blocks(run, row)
    if run.kind == "pipeline" and "num_stages" in row and row["corpus"] == run.corpus and row.get("test") is not None:
        return _pipeline(run, row, sha256)
    return None


def _blocks(run: Run, row: Mapping[str, Any]) -> dict[str, Any] | None:
    own, name = blocks_of(run.options), row["arm"]
    if name.endswith(FLOPS) or "curve" in run.options:
        return None
    arm = replace(ARMS[name], title="")
    recipe = replace(Recipe(**row["recipe"]), replicas=own[1].replicas)
    return blocks_result(*own, dict(row)) if (arm, recipe) == own else None


def _pipeline(run: Run, row: Mapping[str, Any], sha256: str) -> dict[str, Any] | None:
    shape = Shape(**run.options["shape"])
    theirs = Shape(**{name: row[name] for name in Shape.__dataclass_fields__})
    exits = "norm" if "private" in row["method"] else "shared"
    same = strategy_options(METHODS[row["method"]], theirs) == strategy_options(run.options.get("strategy"), shape)
    if not same or theirs != shape or exits != run.options.get("exits", "shared"):
        return None
    return pipeline_result(shape, dict(row), sha256)
