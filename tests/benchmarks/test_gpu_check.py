"""The check of a GPU, tiny and on the CPU: that it trains what it says, and refuses what it cannot do."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import ARMS, PAPER, TINY, main, trained_of, worker_mib
from lightning_blocktrain import ByteTransformer


def test_the_shape_is_the_papers() -> None:
    assert (PAPER.width, PAPER.num_blocks, PAPER.num_layers, PAPER.window_bytes) == (512, 3, 12, 256)


@pytest.mark.slow
def test_all_arms_are_trained_on_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_bytes(b"the old fox ran home. " * 1000)
    options = ["--accelerator", "cpu", "--tiny", "--corpus", str(tmp_path / "text"), "--json", str(tmp_path / "rows")]
    rows = main(options)
    assert [row["arm"] for row in rows] == list(ARMS)
    assert {row["tokens"] for row in rows} == {TINY.tokens_per_block}
    assert [len(row["exits"]) for row in rows] == [1, 1, 2, 2, 2]
    assert all(2 < row["exits"][-1] < 6 and row["tokens_per_s"] > 0 for row in rows)
    whole, _, worker, *_ = rows
    assert 0 < worker["worker_mib"] < whole["worker_mib"] and whole["peak_mib"] is None
    assert json.loads((tmp_path / "rows").read_text())["rows"] == rows
    assert "| lookahead, rounds of 2 | 384 |" in capsys.readouterr().out


def test_memory_of_a_worker_is_that_of_its_block_and_the_interface() -> None:
    model = ByteTransformer(num_layers=4, num_blocks=2, width=16, num_heads=2, window_bytes=16, exits="own")
    assert len(trained_of(model)) == 2
    sizes = [sum(t.numel() for t in worker) for worker in trained_of(model)]
    assert all(size < sum(parameter.numel() for parameter in model.parameters()) for size in sizes)
    assert worker_mib(model, True, 0) == 8 * max(sizes) / 2**20
    assert worker_mib(model, False, 2**20) == 1 + 8 * sum(p.numel() for p in model.parameters()) / 2**20


def test_arms_that_would_take_too_long_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"tokens": 1, "exits": [1.0], "tokens_per_s": 1.0, "worker_tokens_per_s": 1.0, "worker_mib": 1.0}
    monkeypatch.setattr(gpu_check, "run", lambda name, *options: {**row, "arm": name, "peak_mib": 2.0})
    assert [row["arm"] for row in main(["--accelerator", "cpu", "--tiny", "--seconds", "0"])] == ["causal L"]
    assert "denoise: left out, 0 s would not do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--accelerator", "cpu", "--steps", "20"], "--steps must be above 20, which are not timed; got 20"),
        ([], "--accelerator gpu needs a CUDA device"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(options)
    assert words in capsys.readouterr().err
