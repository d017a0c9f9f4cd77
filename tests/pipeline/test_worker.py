import pytest

from lightning_blocktrain.pipeline.worker import Pace, num_snapshots_kept
from tests.pipeline.tiny import open_backend, stages_of, tiny


@pytest.mark.parametrize(
    ("method", "sizes", "lag", "expected"),
    [
        ("rgc", (1, 1, 1, 1), "newest", 1),
        ("broadcast", (2, 2), "newest", 1),
        ("rgc", (1, 1, 1, 1), "pinned", 4),  # stage 0 reads the fourth newest
        ("live", (2, 2), "newest", 0),
        ("bp", (4,), "newest", 0),
    ],
)
def test_snapshots_are_kept_as_far_back_as_a_stage_reads(method, sizes, lag, expected):
    stages = stages_of(tiny(), sizes, method)
    assert num_snapshots_kept(stages, Pace(lag=lag)) == expected


def test_final_stage_copies_no_readout_that_nobody_reads(monkeypatch):
    pipeline = open_backend("turns", tiny(), method="live")
    monkeypatch.setattr("torch.Tensor.clone", lambda tensor: pytest.fail("a readout was copied"))
    assert pipeline.drain() != []
