import pytest

from lightning_blocktrain.pipeline import backends
from lightning_blocktrain.pipeline.backends import open_pipeline
from lightning_blocktrain.pipeline.settings import PipelineSettings
from lightning_blocktrain.pipeline.worker import Pace
from tests.pipeline.test_settings import VALID


@pytest.mark.parametrize(
    ("changes", "name", "pace"),
    [
        ({}, "ThreadPipeline", Pace(False, "newest", 1)),
        ({"lag": "pinned"}, "ThreadPipeline", Pace(False, "pinned", 1)),
        ({"mode": "serial"}, "TurnsPipeline", Pace(True, "newest", 1)),
        ({"mode": "serial", "lag": "pipeline"}, "TurnsPipeline", Pace(True, "pinned", 1)),
        ({"backend": "processes", "snapshot_every": 3}, "ProcessPipeline", Pace(False, "newest", 3)),
        ({"backend": "processes", "mode": "serial"}, "ProcessPipeline", Pace(True, "newest", 1)),
        ({"method": "bp_groups", "mode": "serial"}, "GroupsPipeline", None),
    ],
)
def test_settings_choose_the_backend_and_its_pace(monkeypatch, changes, name, pace):
    made = {}
    for kind in ("ThreadPipeline", "TurnsPipeline", "ProcessPipeline", "GroupsPipeline"):
        monkeypatch.setattr(backends, kind, lambda *args, kind=kind: made.update({kind: args}))
    stages = ["stage"] * 2
    open_pipeline(PipelineSettings(**{**VALID, "num_stages": 2, **changes}), stages, 7, 128, 64)
    ((opened, args),) = made.items()
    assert opened == name
    assert args[0] is stages
    assert 7 in args
    assert [arg for arg in args if isinstance(arg, Pace)] == ([pace] if pace else [])
    if name == "ProcessPipeline":
        assert args[-2:] == (128, 64)
