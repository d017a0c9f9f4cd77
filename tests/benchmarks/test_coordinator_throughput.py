import json

import pytest

from benchmarks import coordinator_throughput


@pytest.mark.parametrize("num_bytes", [2e6, 53e6])
def test_coordinator_throughput_body_has_the_size_that_was_asked_for(num_bytes):
    tensors = coordinator_throughput.block_of(int(num_bytes))
    assert sum(4 * tensor.numel() for tensor in tensors.values()) == pytest.approx(num_bytes, rel=0.01)


@pytest.mark.parametrize("options", [["--pairs", "0"], ["--mb", "0"]])
def test_coordinator_throughput_options_that_leave_nothing_to_measure_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        coordinator_throughput.main(options)
    assert "pairs must be at least 1 and mb in (0, 4096]; got" in capsys.readouterr().err


@pytest.mark.slow
def test_coordinator_throughput_run_quick_times_every_arm(tmp_path):
    coordinator_throughput.main(["--quick", "--json", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["num_pairs"] == 2
    assert all(report[name] > 0 for name in ("a_s", "b_s", "with_state_s", "ratio"))
    assert report["message_bytes"] > 1.9e6
