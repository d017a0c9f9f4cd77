import json
from typing import Any

import pytest

from lightning_blocktrain.rounds import OuterSGD, RoundRules
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.transport.terms import RunTerms, differing_terms, identity_differences

RULES = RoundRules(deadline_s=40.0)


def terms(**changes: Any) -> RunTerms:
    return RunTerms(**{"num_blocks": 3, "sync_every": 5, "rules": RULES, **changes})


def test_json_round_trip_is_the_same_terms() -> None:
    sent = terms(
        outer=OuterSGD(0.7, 0.9, nesterov=True),
        rules=RoundRules(12.5, min_replicas=2, clip_norm=1.0),
        num_workers=6,
        max_rounds=9,
        on_missing_block="fail",
        identity={"model": "m"},
        worker_settings={"codec": {"codec": "fp32"}},
        prefix_every=3,
        prefix_codec=Codec("int8", block=64, spared=("norm.mean",)),
    )
    assert RunTerms.from_json(json.loads(json.dumps(sent.to_json()))) == sent


@pytest.mark.parametrize(
    "change",
    [
        {"rules": {"deadline_s": -1.0}},
        {"rules": None},
        {"rules": {"unknown": 1}},
        {"outer": []},
        {"num_blocks": "3"},
        {"sync_every": None},
        {"unknown": 1},
        {"silent_after_s": "soon"},
        {"on_missing_block": []},
        {"prefix_codec": {"name": "topk"}},
        {"prefix_codec": "bf16"},
        {"prefix_every": 0},
    ],
)
def test_json_of_strangers_gives_one_error(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        RunTerms.from_json({**terms().to_json(), **change})
    with pytest.raises(ValueError, match="exactly the names"):
        RunTerms.from_json([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be a whole number of at least 1"),
        ({"num_blocks": 10**6}, "at most 4096"),
        ({"sync_every": True}, "sync_every must be"),
        ({"interface_every": 0}, "interface_every must be"),
        ({"max_rounds": 0}, "max_rounds must be"),
        ({"num_workers": 2}, "num_workers must be at least num_blocks"),
        ({"num_workers": 3, "rules": RoundRules(1.0, min_replicas=2)}, "needs 2 replicas"),
        ({"join_timeout_s": float("inf")}, "join_timeout_s must be finite"),
        ({"silent_after_s": 0.0}, "silent_after_s must be finite"),
        ({"prefix_every": 0}, "prefix_every must be"),
        ({"prefix_codec": Codec("topk")}, "prefix_codec must be a codec for whole values; got prefix_codec='topk'"),
        ({"on_missing_block": "wait"}, "on_missing_block must be 'warn' or 'fail'"),
    ],
)
def test_terms_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        terms(**change)


@pytest.mark.parametrize(
    ("interface_every", "max_rounds", "due"),
    [
        (1, None, [0, 1, 2, 3, 4, 5, 6]),
        (3, None, [2, 5]),
        (3, 7, [2, 5, 6]),
        (2, 6, [1, 3, 5]),
        (10, 4, [3]),
    ],
)
def test_interface_is_due_every_so_many_rounds_and_at_the_end(
    interface_every: int, max_rounds: int | None, due: list[int]
) -> None:
    run = terms(interface_every=interface_every, max_rounds=max_rounds)
    versions = range(7 if max_rounds is None else max_rounds)
    assert [version for version in versions if run.interface_due(version)] == due
    assert [run.interface_due_version(idx) for idx in range(len(due))] == due
    assert [run.interface_round(version) for version in due] == list(range(len(due)))


@pytest.mark.parametrize(
    ("deadline_s", "silence_s", "beat_s"), [(40.0, 15.0, 2.0), (4.0, 3.0, 0.75), (2.0, 1.5, 0.375)]
)
def test_silence_is_noticed_before_the_deadline_and_after_several_beats(
    deadline_s: float, silence_s: float, beat_s: float
) -> None:
    run = terms(rules=RoundRules(deadline_s))
    assert (run.silence_s, run.beat_every_s) == (silence_s, beat_s)
    assert terms(silent_after_s=1.0).silence_s == 1.0


def test_identity_differences_compares_the_names_of_both() -> None:
    assert identity_differences({"a": 1, "b": 2, "c": 3}, {"b": 2, "c": 4, "d": 5}) == ["c: here=3, there=4"]


@pytest.mark.parametrize(("prefix_every", "wanted"), [(1, [0, 1, 2, 3, 4]), (3, [0, 0, 0, 3, 3]), (9, [0] * 5)])
def test_prefix_is_wanted_in_the_version_of_every_nth_round(prefix_every: int, wanted: list[int]) -> None:
    assert [terms(prefix_every=prefix_every).prefix_version(version) for version in range(5)] == wanted


def test_differing_terms_names_what_a_joining_worker_asked_for_in_vain() -> None:
    run = terms(
        codec=Codec("int8"),
        prefix_every=4,
        prefix_codec=Codec("fp32"),
        rules=RoundRules(deadline_s=9.0, clip_norm=2.0),
        max_rounds=5,
    )
    own = terms(rules=RoundRules(deadline_s=9.0), outer=OuterSGD(momentum=0.5))
    assert differing_terms(own, run) == [
        "clip_norm: here=None, there=2.0",
        "codec: here={'codec': 'fp32'}, there={'codec': 'int8', 'block': '256'}",
        "outer_optimizer.momentum: here=0.5, there=0.0",
        "prefix_codec: here={'codec': 'bf16'}, there={'codec': 'fp32'}",
        "prefix_every: here=1, there=4",
    ]
    assert differing_terms(run, run) == []
