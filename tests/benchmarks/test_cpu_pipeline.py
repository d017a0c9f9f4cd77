import json
import math
from typing import Any

import pytest

from benchmarks import cpu_pipeline
from benchmarks.cpu_pipeline import METHODS, limit_record, main, parse, print_table, shape_of, summary


def record(name: str, tokens_per_s: float, **changes: Any) -> dict[str, Any]:
    base = {
        "name": name,
        "tokens_per_s": tokens_per_s,
        "step_s": 1000 / tokens_per_s,
        "cpu_s_per_step": 2.0,
        "peak_pss_mib": 100.0,
        "bits_per_token": 5.0,
        "num_steps": 10,
        "foreign_cpu_frac": 0.001,
        "cpu_frac": 0.5,
        "busy_frac": 0.5,
        "work_s": [1.0, 1.0],
        "closure_error": 0.002,
    }
    return {**base, **changes}


def two_rounds() -> list[list[dict[str, Any]]]:
    return [
        [record("bp", 100.0), record("rgc", 150.0, peak_pss_mib=110.0), limit_record([record("a", 90.0)] * 2)],
        [record("bp", 200.0), record("rgc", 300.0, peak_pss_mib=112.0), limit_record([record("a", 160.0)] * 2)],
    ]


def quick_shape() -> cpu_pipeline.Shape:
    _, args = parse(["--quick"])
    return shape_of(args)


def test_summary_ratio_is_taken_inside_each_round() -> None:
    rgc = summary(two_rounds(), quick_shape(), bp_threads=2, cores=2)["rgc"]
    assert math.isclose(rgc["ratio_vs_bp"], 1.5)
    assert math.isclose(rgc["ratio_low"], 1.5) and math.isclose(rgc["ratio_high"], 1.5)
    assert math.isclose(rgc["pss_ratio_vs_bp"], 1.11)
    assert math.isclose(rgc["fraction_of_limit"], (150 / 180 + 300 / 320) / 2)


def test_summary_ratio_per_thread_divides_by_the_threads_used() -> None:
    rgc = summary(two_rounds(), quick_shape(), bp_threads=2, cores=2)["rgc"]
    assert rgc["threads"] == 4  # four stages of one thread each
    assert math.isclose(rgc["ratio_per_thread"], 1.5 / 2)


def test_summary_parts_of_the_speed_up_multiply_to_the_ratio_of_step_times() -> None:
    rgc = summary(two_rounds()[:1], quick_shape(), bp_threads=2, cores=2)["rgc"]
    assert math.isclose(rgc["work"] * rgc["parallelism"] * rgc["orchestration"], 1.5)
    assert rgc["closure_error"] == 0.002


def test_summary_of_one_round_has_no_interval_and_is_strict_json() -> None:
    methods = summary(two_rounds()[:1], quick_shape(), bp_threads=2, cores=2)
    assert methods["rgc"]["ratio_low"] is None and methods["rgc"]["ratio_high"] is None
    json.dumps(methods, allow_nan=False)


def test_runner_that_ends_names_its_arm_and_shows_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    code = ["sh", "-c", "read line; echo out of luck >&2; exit 3"]
    start = cpu_pipeline.subprocess.Popen
    monkeypatch.setattr(cpu_pipeline.subprocess, "Popen", lambda command, **options: start(code, **options))
    with (
        cpu_pipeline.Runner() as runner,
        pytest.raises(RuntimeError, match=r"(?s)arm bp: its process ended.*out of luck"),
    ):
        runner.run([quick_shape().arm("bp", 1)])


def test_summary_run_beside_foreign_work_is_not_called_idle() -> None:
    rounds = two_rounds()
    rounds[1][1]["foreign_cpu_frac"] = 0.05
    methods = summary(rounds, quick_shape(), bp_threads=2, cores=2)
    assert methods["bp"]["idle"] and not methods["rgc"]["idle"]


def test_limit_adds_the_speeds_of_processes_that_ran_together() -> None:
    both = limit_record([record("a", 90.0, cpu_frac=0.4, busy_frac=0.95), record("b", 80.0)])
    assert both["tokens_per_s"] == 170.0
    assert math.isclose(both["foreign_cpu_frac"], 0.95 - 0.9)


def test_arm_of_every_method_names_options_that_the_strategy_takes() -> None:
    from lightning_blocktrain import BoundedHorizonStrategy

    shape = quick_shape()
    for name in METHODS:
        arm = shape.arm(name, threads=1)
        if arm["strategy"] is not None:
            settings = BoundedHorizonStrategy(**arm["strategy"]).settings
            assert settings.num_stages == (None if settings.method in ("bp", "bp_groups") else shape.num_stages)


def test_table_of_a_machine_that_was_not_idle_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    shape = quick_shape()
    methods = summary(two_rounds(), shape, 2, 2)
    report = {"shape": vars(shape), "cores": 2, "rounds": 2, "idle": False, "methods": methods, "bp": {"swept": []}}
    print_table(report)
    assert "NOT idle" in capsys.readouterr().out


def test_command_in_a_report_holds_no_path_of_this_machine() -> None:
    command = cpu_pipeline.command_of(["--width", "128", "--json", "/home/me/out.json", "--train", "texts/a.txt"])
    assert command == "python -m benchmarks.cpu_pipeline --width 128 --json out.json --train a.txt"


@pytest.mark.parametrize("wrong", [["--train", "a.txt"], ["--num-layers", "10"], ["--pairs", "0"], ["--methods", "x"]])
def test_wrong_options_are_refused_before_anything_runs(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(wrong)
    assert caught.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.slow
def test_quick_run_writes_every_measure(tmp_path: Any) -> None:
    path = tmp_path / "report.json"
    main(["--quick", "--methods", "rgc", "--json", str(path)])
    report = json.loads(path.read_text())
    assert isinstance(report["idle"], bool)
    usual = {"tokens_per_s", "ratio_vs_bp", "fraction_of_limit", "peak_pss_mib", "pss_ratio_vs_bp", "bits_per_token"}
    for name, extra in {"bp": set(), "rgc": {"work", "parallelism", "orchestration", "closure_error"}}.items():
        row = report["methods"][name]
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in usual)
        assert extra <= row.keys()
    assert abs(report["methods"]["rgc"]["closure_error"]) < 0.01
    assert 4 < report["methods"]["rgc"]["bits_per_token"] < 8  # 8 would be a uniform guess
