import json

import pytest

from benchmarks import performance


@pytest.mark.slow
def test_performance_run_quick_reports_every_ratio_and_the_memory(tmp_path):
    performance.main(["--quick", "--json", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["ratios"]) == 3
    assert all(row["ratio"] > 0 and row["num_pairs"] == 2 for row in report["ratios"])
    whole, blocks = report["memory"].values()
    # Two moments for every parameter of the largest worker: a block and the interface.
    assert 0 < blocks["optimizer_mem_bytes"] < whole["optimizer_mem_bytes"]
