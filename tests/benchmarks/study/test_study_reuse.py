"""What other benchmarks have trained is taken over where it is the same training, and nowhere else."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.composition import SIZES
from benchmarks.pipeline_training import Shape
from benchmarks.study.protocol import Run, parse
from benchmarks.study.reuse import reused

RECIPE = {"steps": 1000, "num_layers": 4, "num_blocks": 4, "width": 64, "num_heads": 4, "window_bytes": 256}
RECIPE |= {"batch_size": 16, "lr": 8e-3, "warmup_steps": 50, "clip": 10.0, "test_windows": 256, "num_threads": 1}
SHAPE = Shape(24, 128, 4, 128, 8, 1_048_576, 3e-3, 8, 32, 0.5)
AHEAD = {"objective": "features", "exits": "own", "lookahead": 1}
HASHES = {"wikitext": "f" * 64, "enwik8": "e" * 64}


def runs_of(kind: str, corpus: str, arms: dict[str, Any], options: dict[str, Any]) -> list[Run]:
    part = {"title": "P", "kind": kind, "metric": "bits", "control": next(iter(arms)), "arms": arms}
    sizes = {"smoke": {"corpora": [corpus], "seeds": [3], "options": options}}
    told = {"title": "T", "question": "Q", "source": "S", "parts": {"one": {**part, "sizes": sizes}}}
    return parse("p", "smoke", yaml.safe_dump(told, sort_keys=False)).runs()


def composition_row(arm: str, **changes: Any) -> dict[str, Any]:
    found = {"exits": [2.0, 1.5]}
    row = {"arm": arm, "seed": 3, "recipe": asdict(SIZES["deep"]), "tokens_per_block": 7, "train_s": 9.0}
    return {**row, "corpus_sha256": HASHES["wikitext"], "test": found, "val": found, **changes}


def pipeline_row(method: str, **changes: Any) -> dict[str, Any]:
    found = {"curve": [[100, 3.0]], "valid": 2.5, "test": 2.25, "cpu_s": 60.0}
    return {**asdict(SHAPE), "corpus": "enwik8", "method": method, "seed": 3, **found, **changes}


def taken(runs: list[Run], rows: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {run.arm: result for run, result in reused(runs, path, HASHES)}


BLOCKS = {
    "L": {},
    "L_b": {"is_shallow": True},
    "ahead": {"model": AHEAD, "strategy": {}},
    "two": {"model": AHEAD, "strategy": {"replicas": 2}},
    "often": {"model": AHEAD, "strategy": {"sync_every": 2}},
}


def test_trainings_of_composition_are_found_by_what_they_are(tmp_path: Path) -> None:
    runs = runs_of("blocks", "wikitext", BLOCKS, {"recipe": RECIPE})
    names = ["causal_full", "causal_block", "ahead", "ahead 2 replicas", "ahead rounds of 2"]
    rows = [composition_row(name, test={"exits": [2.0, idx + 1.0]}) for idx, name in enumerate(names)]
    found = taken(runs, rows[::-1], tmp_path)
    assert [found[arm]["measures"]["ce"] for arm in BLOCKS] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert found["ahead"]["from"] == "rows.jsonl" and found["ahead"]["measures"]["exit 0"] == 2.0


def test_a_curve_is_not_there(tmp_path: Path) -> None:
    options = {"recipe": RECIPE, "curve": {"points": 10, "batches": 1}}
    runs = runs_of("blocks", "wikitext", {"ahead": BLOCKS["ahead"]}, options)
    assert not taken(runs, [composition_row("ahead")], tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 4},
        {"corpus_sha256": "0" * 64},
        {"arm": "ahead shared"},
        {"arm": "ahead@flops"},
        {"recipe": {**asdict(SIZES["deep"]), "steps": 999}},
    ],
    ids=str,
)
def test_another_training_of_composition_is_not_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    runs = runs_of("blocks", "wikitext", {"ahead": BLOCKS["ahead"]}, {"recipe": RECIPE})
    assert taken(runs, [composition_row("ahead")], tmp_path)
    assert not taken(runs, [composition_row("ahead") | changes], tmp_path)


PIPELINES = {
    "bp": {"strategy": None},
    "rgc": {"strategy": {"method": "rgc"}},
    "final": {"strategy": {"method": "rgc", "consensus_weights": "final"}},
    "private": {"strategy": {"method": "rgc"}, "exits": "norm"},
}


def test_trainings_of_pipeline_target_are_found_by_what_they_are(tmp_path: Path) -> None:
    runs = runs_of("pipeline", "enwik8", PIPELINES, {"shape": asdict(SHAPE)})
    methods = ["bp", "rgc", "rgc_final", "rgc_private"]
    rows = [pipeline_row(method, test=idx + 1.0) for idx, method in enumerate(methods)]
    found = taken(runs, rows, tmp_path)
    assert [found[arm]["measures"]["bits"] for arm in PIPELINES] == [1.0, 2.0, 3.0, 4.0]
    assert found["bp"]["curve"] == [[100, 60.0 * 100 / 1_048_576, 3.0]]


@pytest.mark.parametrize(
    "changes", [{"seed": 4}, {"corpus": "tinystories"}, {"test": None}, {"lr": 1e-3}, {"method": "rgc_next"}], ids=str
)
def test_another_training_of_pipeline_target_is_not_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    runs = runs_of("pipeline", "enwik8", {"rgc": PIPELINES["rgc"]}, {"shape": asdict(SHAPE)})
    assert taken(runs, [pipeline_row("rgc")], tmp_path)
    assert not taken(runs, [pipeline_row("rgc") | changes], tmp_path)
