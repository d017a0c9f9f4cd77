"""Protocols: what is shipped can be run, what decides a number is in the digest, and nonsense is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.composition import make_module, make_strategy
from benchmarks.cpu_pipeline import Shape as SpeedShape
from benchmarks.pipeline_training import Shape, strategy_of
from benchmarks.study import figures, kinds
from benchmarks.study.protocol import FIGURES, FOLDER, KINDS, SIZES, ProtocolError, Run, load, names, parse
from lightning_blocktrain import BoundedHorizonStrategy

PART: dict[str, Any] = {
    "title": "A part",
    "kind": "pipeline",
    "metric": "bits",
    "control": "bp",
    "arms": {"bp": {"strategy": None}, "rgc": {"strategy": {"method": "rgc"}}, "live": None},
    "contrasts": [["rgc", "live"]],
    "criteria": [{"contrast": ["rgc", "bp"], "rule": "non_inferior", "limit": 1}],
    "options": {"shape": {"width": 8, "lr": 0.1}},
    "sizes": {
        "smoke": {"corpora": ["a", "b"], "seeds": [1, 2], "options": {"shape": {"lr": 0.2}}},
        "cpu": {"corpora": ["a"], "seeds": [1], "arms": ["bp", "live"]},
    },
}


def text_of(*, head: dict[str, Any] | None = None, **changes: Any) -> str:
    told = {"title": "T", "question": "Q", "source": "S", "parts": {"one": {**PART, **changes}}}
    return yaml.safe_dump({**told, **(head or {})}, sort_keys=False)


def check_runs(run: Run) -> None:
    """Build what a run would train, without training it."""
    options = run.options
    if run.kind in ("blocks", "workers"):
        arm, recipe = kinds.blocks_of(options)
        assert recipe.steps % options.get("curve", {"points": 1})["points"] == 0
        if "latencies_ms" in options:
            assert recipe.steps % (recipe.replicas * recipe.sync_every) == 0  # the coordinator counts whole rounds
        with torch.device("meta"):
            make_module(arm, recipe)
        if arm.strategy is not None:
            make_strategy(arm, recipe)
    elif run.kind == "pipeline":
        shape = Shape(**options["shape"])
        strategy_of(options["strategy"], shape)
        stages = (options["strategy"] or {}).get("num_stages", shape.num_stages)
        assert shape.num_layers % stages == 0 and shape.tokens % (shape.batch_size * shape.window_bytes) == 0
    else:
        SpeedShape(**options["shape"], corpus={}, seed=run.seed)
        if options["strategy"] is not None:
            BoundedHorizonStrategy(**options["strategy"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", names())
def test_what_is_shipped_can_be_run_and_shown(name: str, size: str) -> None:
    protocol = load(name, size)
    assert protocol.runs()
    for run in protocol.runs():
        check_runs(run)
    for part in protocol.parts:
        told = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["parts"][part.name]
        assert part.published.keys() <= told["arms"].keys()


def test_kinds_and_figures_are_those_that_there_are() -> None:
    assert set(KINDS) == kinds.KINDS.keys() and set(FIGURES) == figures.FIGURES.keys()


def test_runs_are_interleaved_each_once_and_turned_round() -> None:
    runs = parse("p", "smoke", text_of()).runs()
    assert [(run.seed, run.corpus, run.arm) for run in runs] == [
        *((1, corpus, arm) for corpus in "ab" for arm in ("bp", "rgc", "live")),
        *((2, corpus, arm) for corpus in "ab" for arm in ("live", "rgc", "bp")),
    ]
    assert runs[0].options == {"shape": {"width": 8, "lr": 0.2}, "strategy": None}
    two = yaml.safe_load(text_of())
    two["parts"]["two"] = {**PART, "arms": {"bp": {"strategy": None}, "more": {"exits": "norm"}}, "contrasts": []}
    two["parts"]["two"]["criteria"] = []
    both = parse("p", "smoke", yaml.safe_dump(two, sort_keys=False)).runs()
    assert len(both) == len(runs) + 4  # bp is the same run in both parts
    assert [run.seed for run in both] == sorted(run.seed for run in both)


def test_a_size_takes_its_arms_and_leaves_what_it_lacks() -> None:
    [part] = parse("p", "cpu", text_of()).parts
    assert list(part.arms) == ["bp", "live"] and part.contrasts == () and part.criteria == ()
    assert list(part.pairs()) == [("live", "bp")]
    assert part.options == {"shape": {"width": 8, "lr": 0.1}}


def test_the_digest_names_what_decides_a_number() -> None:
    digest = parse("p", "smoke", text_of()).digest
    said = {"title": "Another", "note": "N", "published": {"rgc": "2"}, "show": ["gaps"]}
    assert parse("p", "smoke", text_of(**said, head={"question": "Another?"})).digest == digest
    criteria = [{"contrast": ["rgc", "bp"], "rule": "non_inferior", "limit": 2}]
    for change in ({"criteria": criteria}, {"options": {"shape": {"width": 9}}}, {"metric": "valid_bits"}):
        assert parse("p", "smoke", text_of(**change)).digest != digest
    assert parse("p", "cpu", text_of()).digest != digest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"control": "nobody"}, "one: control must be one of the arms; got 'nobody'"),
        ({"compare": "odds"}, "compare must be one of difference, ratio; got 'odds'"),
        ({"criteria": [{"contrast": ["rgc", "bp"], "rule": "nice", "limit": 1}]}, "rule must be one of .* got 'nice'"),
        (
            {"criteria": [{"contrast": ["rgc", "bp"], "rule": "at_most", "limit": 1, "corpora": ["c"]}]},
            "corpora must be the part's; got",
        ),
        ({"sizes": {"smoke": {"corpora": ["a"], "seeds": [1, 1]}}}, r"seeds must be one at least, .* got \[1, 1\]"),
        ({"sizes": {"smoke": {"corpora": [], "seeds": [1]}}}, "corpora must be one at least"),
        ({"sizes": {"cpu": {"corpora": ["a"], "seeds": [1]}}}, "a size must be that of a part; got 'smoke'"),
        ({"sizes": {"smoke": {"corpora": ["a"]}}}, "must have the keys of its form; got KeyError"),
        ({"sizes": {"smoke": {"corpora": ["a"], "seeds": [1], "arms": ["x"]}}}, "KeyError"),
        ({"kind": "guess"}, "kind must be one of .*; got 'guess'"),
        ({"show": ["nothing"]}, "show must name figures: .*; got 'nothing'"),
    ],
)
def test_a_part_that_cannot_be_judged_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        parse("p", "smoke", text_of(**changes))


def test_what_is_no_protocol_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match=r"one of blocktrain, bounded-horizon or a YAML file; got 'nothing'"):
        load("nothing", "smoke")
    with pytest.raises(ProtocolError, match="must be YAML"):
        parse("p", "smoke", "a: [")
    with pytest.raises(ProtocolError, match="keys of its form"):
        parse("p", "smoke", "just text")
    (tmp_path / "mine.yaml").write_text(text_of())
    assert load(str(tmp_path / "mine.yaml"), "smoke").name == "mine"
