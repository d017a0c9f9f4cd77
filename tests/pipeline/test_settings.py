import pytest

from lightning_blocktrain.pipeline import settings as settings_module
from lightning_blocktrain.pipeline.settings import PipelineSettings

VALID = {
    "method": "rgc",
    "num_stages": 4,
    "mode": "async",
    "backend": "threads",
    "threads_per_stage": None,
    "snapshot_every": 1,
    "ring_slots": 2,
    "micro_batches": 1,
    "lag": "newest",
    "stage_split": "even",
    "consensus_weights": "uniform",
    "clip": None,
    "stage_timeout_s": 60.0,
}


def make(**changes):
    return PipelineSettings(**{**VALID, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_stages": None},
        {"mode": "serial", "lag": "pipeline"},
        {"method": "broadcast", "lag": "pinned"},
        {"backend": "processes", "micro_batches": 3},
        {"stage_split": "auto"},
        {"stage_split": [1, 2, 3, 4]},
        {"num_stages": None, "stage_split": (6, 7)},
        {"consensus_weights": "depth"},
        {"consensus_weights": [1, 2, 3, 4]},
        {"method": "live", "mode": "serial"},
        {"method": "bp", "mode": "serial", "num_stages": 1},
        {"method": "bp_groups", "mode": "serial"},
        {"clip": 0.5},
        {"clip": 1},
        {"consensus_weights": "final"},
        {"credit": "next_stage"},
        {"credit": "next_stage", "backend": "processes", "micro_batches": 2, "stage_split": "auto"},
        {"credit": "next_stage", "method": "live", "mode": "serial"},
        {"schedule": "local_then_bp"},
        {"schedule": "local_then_bp", "switch_frac": 0.75, "credit": "next_stage", "backend": "processes"},
    ],
)
def test_settings_that_go_together_are_accepted(changes):
    made = make(**changes)
    assert {name: getattr(made, name) for name in {**VALID, **changes}} == {**VALID, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "dfa"}, "method must be known; got method='dfa'; choose one of 'bp', 'live', 'broadcast', 'rgc'"),
        ({"mode": "parallel"}, "mode must be known; got mode='parallel'; choose one of 'serial', 'async'"),
        ({"backend": "mpi"}, "backend must be known; got backend='mpi'"),
        ({"lag": "old"}, "lag must be known; got lag='old'"),
        ({"stage_split": "odd"}, "stage_split must be known; got stage_split='odd'"),
        ({"snapshot_every": 0}, "snapshot_every must be at least 1, a whole number; got snapshot_every=0"),
        ({"ring_slots": 0}, "ring_slots must be at least 1"),
        ({"ring_slots": 1.5}, "ring_slots must be at least 1, a whole number; got ring_slots=1.5"),
        ({"micro_batches": True}, "micro_batches must be at least 1, a whole number; got micro_batches=True"),
        ({"num_stages": 0}, "num_stages must be at least 1"),
        ({"threads_per_stage": -1}, "threads_per_stage must be at least 1"),
        ({"clip": 0.0}, "clip must be finite and above 0; got clip=0.0"),
        ({"clip": float("nan")}, "clip must be finite and above 0; got clip=nan"),
        ({"stage_timeout_s": float("inf")}, "stage_timeout_s must be finite and above 0; got stage_timeout_s=inf"),
        ({"stage_timeout_s": None}, "stage_timeout_s must be finite and above 0; got stage_timeout_s=None"),
        ({"stage_timeout_s": "60"}, "stage_timeout_s must be finite and above 0; got stage_timeout_s='60'"),
        ({"stage_split": []}, r"stage_split must be 'even', 'auto' or the number of layers of each stage; got"),
        ({"stage_split": [2, 0, 1, 1]}, r"stage_split must be .*; got stage_split=\[2, 0, 1, 1\]"),
        (
            {"stage_split": [2, 2]},
            r"one number per stage; got stage_split=\[2, 2\], num_stages=4; leave num_stages out",
        ),
        ({"consensus_weights": [1, 1, 1]}, "per stage, the final one above 0; got .* for num_stages=4"),
        ({"consensus_weights": "last"}, "consensus_weights must be 'uniform', 'depth', 'final' or one number per"),
        ({"method": "live"}, "method='live', mode='async'; drop one"),
        ({"method": "live", "mode": "serial", "backend": "processes"}, "method='live', backend='processes'; drop one"),
        ({"method": "bp_groups", "mode": "serial", "micro_batches": 2}, "micro_batches=2; drop one"),
        ({"method": "broadcast", "consensus_weights": "depth"}, "has no consensus to weigh"),
        ({"lag": "pinned", "snapshot_every": 2}, "it needs method 'rgc' or 'broadcast' and snapshot_every=1"),
        ({"method": "live", "mode": "serial", "lag": "pinned"}, "method='live', lag='pinned'"),
        ({"mode": "serial", "stage_split": "auto"}, "only stages that run at the same time"),
        ({"credit": "two"}, "credit must be known; got credit='two'; choose one of 'local', 'next_stage'"),
        ({"schedule": "bp"}, "schedule must be known; got schedule='bp'; choose one of 'local', 'local_then_bp'"),
        ({"schedule": "local_then_bp", "switch_frac": 0}, "switch_frac must be between 0 and 1; got switch_frac=0;"),
        ({"schedule": "local_then_bp", "switch_frac": 1.0}, "switch_frac must be between 0 and 1"),
        ({"switch_frac": 0.5}, "schedule='local' has no switch; got method='rgc', switch_frac=0.5; drop one"),
        ({"method": "bp", "mode": "serial", "credit": "next_stage"}, "learn from the final loss already; got"),
        ({"method": "bp_groups", "mode": "serial", "schedule": "local_then_bp"}, "learn as one from the start"),
        ({"method": "bp", "mode": "serial", "num_stages": None, "stage_split": [4]}, "method='bp' has no stages"),
    ],
)
def test_settings_that_are_wrong_are_refused_with_rule_value_and_fix(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("cores", "changes", "num_stages", "expected"),
    [
        (8, {}, 4, 2),
        (8, {}, 3, 2),
        (2, {}, 4, 1),
        (8, {"threads_per_stage": 1}, 4, 1),
        (8, {"mode": "serial"}, 4, 8),
        (8, {"mode": "serial", "threads_per_stage": 3}, 4, 3),
        (8, {"method": "bp_groups", "mode": "serial"}, 4, 2),
    ],
)
def test_threads_of_a_stage_share_the_cores(monkeypatch, cores, changes, num_stages, expected):
    monkeypatch.setattr(settings_module, "num_cores", lambda: cores)
    assert make(**changes).num_threads(num_stages) == expected


def test_threads_beyond_the_cores_are_cut_down_with_a_warning(monkeypatch):
    monkeypatch.setattr(settings_module, "num_cores", lambda: 8)
    with pytest.warns(UserWarning, match="threads_per_stage=5, 4 at the same time on 8 cores: using 2"):
        assert make(threads_per_stage=5).num_threads(4) == 2


@pytest.mark.parametrize(("mode", "overlaps"), [("async", True), ("serial", False)])
def test_stages_overlap_in_async_mode(mode, overlaps):
    assert make(mode=mode).overlaps is overlaps


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"schedule": "local_then_bp"}, 20),
        ({"schedule": "local_then_bp", "switch_frac": 0.74}, 30),
        ({"schedule": "local_then_bp", "switch_frac": 0.01}, 0),
    ],
)
def test_switch_comes_after_its_share_of_the_steps(changes, expected):
    assert make(**changes).switch_step(40) == expected
