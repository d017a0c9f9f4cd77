import json

import pytest

from benchmarks import performance


@pytest.mark.parametrize("options", [["--steps", "6"], ["--pairs", "0"]])
def test_performance_options_that_leave_nothing_to_measure_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        performance.main(options)
    assert "steps must outlast the warm-up and pairs be at least 1; got steps=" in capsys.readouterr().err


@pytest.mark.slow
def test_performance_run_quick_reports_every_ratio_and_the_memory(tmp_path):
    performance.main(["--quick", "--json", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["ratios"]) == 3
    assert all(row["ratio"] > 0 and row["num_pairs"] == 2 for row in report["ratios"])
    whole, blocks = report["memory"].values()
    # The state of two blocks of two layers out of three is what one worker does not hold; 8 bytes and a step each.
    model = performance.ByteTransformer(6, performance.WIDTH, performance.NUM_HEADS, performance.WINDOW_BYTES)
    elsewhere = sum(8 * p.numel() + 4 for layer in model.layers[2:] for p in layer.parameters())
    assert whole["optimizer_mem_bytes"] == sum(8 * p.numel() + 4 for p in model.parameters())
    assert blocks["optimizer_mem_bytes"] == whole["optimizer_mem_bytes"] - elsewhere
