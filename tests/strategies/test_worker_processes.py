"""What a Lightning user expects to keep working on three processes of one script; few starts, many assertions."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.strategies.conftest import assert_same
from tests.strategies.test_launcher import END_WITHIN_S, environment, processes_of

SCRIPT = Path(__file__).with_name("acceptance_script.py")
CLI_SCRIPT = Path(__file__).with_name("cli_script.py")
TIMEOUT_S = 600.0

LOADS_ALONE = """
import sys
sys.modules["lightning_blocktrain"] = None  # importing it is an error from now on
from tests.strategies.acceptance_model import AcceptanceModel
module = AcceptanceModel.load_from_checkpoint(sys.argv[1])
print(module.hparams.width, float(sum(parameter.sum() for parameter in module.parameters())))
"""


def run(folder: Path, *command: str, code: int = 0) -> str:
    """Run a command to its end, and see that nothing is left of it."""
    path = folder / "output"  # a pipe that nobody reads would fill up
    with path.open("w") as output:
        done = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment(folder), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        ended = done.wait(TIMEOUT_S)
        psutil.wait_procs(processes_of(folder), timeout=END_WITHIN_S)
    finally:
        left = processes_of(folder)
        for process in left:
            process.kill()
    text = path.read_text()
    assert ended == code, text
    assert left == []
    assert list(folder.glob("blocktrain-*")) == []
    return text


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]], str]:
    """Return the folder, the results by name and the output of the one run of the script."""
    folder = tmp_path_factory.mktemp("acceptance")
    output = run(folder, str(SCRIPT), str(folder))
    told = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")]
    return folder, {result["name"]: result for result in told}, output


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)]


def test_scenario_32_resumed_processes_equal_the_uninterrupted_run(ran: Any) -> None:
    """The checkpoint was taken inside an epoch and between two merges of the interface, with outer momentum."""
    folder, results, output = ran
    whole, resumed = results["whole3"], results["resumed"]
    for name in ("digest", "step", "rounds", "metrics"):
        assert resumed[name] == whole[name], name
    assert "start afresh" not in output
    for name in ("step=12", "last"):
        assert_same(weights_in(folder / "resumed" / f"{name}.ckpt"), weights_in(folder / "whole3" / f"{name}.ckpt"))


def test_processes_equal_the_simulator_with_clipping_accumulation_schedule_and_bf16(ran: Any) -> None:
    # Of the first epoch: the second one's order is drawn from a stream that the simulator's worker 0 draws from too.
    folder, results, _ = ran
    assert_same(*(weights_in(folder / f"whole{devices}" / "step=6.ckpt") for devices in (1, 3)))
    assert results["whole1"]["step"] == results["whole3"]["step"] == 16
    assert results["whole1"]["rounds"] == results["whole3"]["rounds"] == 8


def test_scenario_35_steps_count_as_one_worker_sees_them_and_one_process_writes(ran: Any) -> None:
    folder, results, _ = ran
    assert results["whole3"]["step"] == 2 * 48 // 3 // 2  # epochs, batches, workers, accumulated
    assert sorted(path.name for path in (folder / "whole3").iterdir()) == [
        "best.ckpt",
        "last.ckpt",
        "step=12.ckpt",
        "step=6.ckpt",
        "version_0",
    ]
    with (folder / "whole3" / "version_0" / "metrics.csv").open() as file:
        rates = [float(row["lr-AdamW"]) for row in csv.DictReader(file) if row["lr-AdamW"]]
    assert rates == pytest.approx([0.02 * 0.9 ** (batch // 2 // 3) for batch in range(32)])
    saved = torch.load(folder / "whole3" / "step=12.ckpt", weights_only=True)
    assert saved["global_step"] == saved["lr_schedulers"][0]["last_epoch"] == 12
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.02 * 0.9**4)


def test_scenario_35_early_stopping_of_rank_0_ends_all_and_last_is_found_by_all(ran: Any) -> None:
    _, results, output = ran
    assert results["stopped"]["stopped_epoch"] == 2  # resumed after one epoch; of its own the second was no better
    assert results["stopped"]["step"] == 24
    assert "exit code" not in output


def test_scenario_31_process_out_of_data_counts_with_what_it_has(ran: Any) -> None:
    _, results, _ = ran
    assert results["uneven"]["step"] == 8
    assert results["uneven"]["accepted_tokens"] == 10 * (16 + 16 + 10)


def test_metrics_flags_modes_and_evaluation_after_the_fit_are_as_ever(ran: Any) -> None:
    _, results, _ = ran
    for name in ("whole1", "whole3"):
        assert results[name]["states"] and results[name]["frozen"]
        assert {"train/loss_step", "train/loss_epoch", "train/accuracy", "val/mean"} <= results[name]["metrics"].keys()
    evaluated = results["evaluated"]
    metrics = results["whole3"]["metrics"]
    for name in ("val/loss", "val/mean", "val/accuracy"):
        assert evaluated["validated"][name] == metrics[name]  # all of the data, on one process
    assert evaluated["predicted"] == [[4, 5], [4, 5]]
    assert evaluated["tested"].keys() == {"test/loss", "test/mean", "test/accuracy"}


def test_checkpoint_of_processes_loads_without_this_package(ran: Any) -> None:
    folder, _, _ = ran
    command = [sys.executable, "-c", LOADS_ALONE, str(folder / "after.ckpt")]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    width, total = done.stdout.split()
    weights = weights_in(folder / "after.ckpt")
    assert (int(width), float(total)) == (8, pytest.approx(float(sum(t.sum() for t in weights.values())), rel=1e-5))
    held = torch.load(folder / "after.ckpt", weights_only=True)["blocktrain_member"]
    assert list(held["workers"]) == [f"block{b}/replica0" for b in (1, 2, 0)]
    assert held["coordinator"]["version"] == 8


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--trainer.strategy=blocktrain"], {"step": 4, "rounds": 1, "sync_every": 20}),
        (
            [
                "--trainer.strategy.class_path=lightning_blocktrain.BlockTrainStrategy",
                "--trainer.strategy.init_args.sync_every=2",
            ],
            {"step": 4, "rounds": 2, "sync_every": 2},
        ),
    ],
)
def test_command_line_of_lightning_starts_processes(tmp_path: Path, options: list[str], expected: Any) -> None:
    quiet = ["--trainer.enable_progress_bar=false", f"--trainer.default_root_dir={tmp_path}"]
    fit = ["fit", "--seed_everything=1", "--trainer.accelerator=cpu", "--trainer.devices=3", "--trainer.max_steps=4"]
    output = run(tmp_path, str(CLI_SCRIPT), *fit, *options, *quiet)
    [told] = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")]
    assert told == expected
    assert len(list(tmp_path.rglob("config.yaml"))) == 1


def test_command_line_with_an_unknown_argument_is_a_parser_error(tmp_path: Path) -> None:
    wrong = ["--trainer.strategy=BlockTrainStrategy", "--trainer.strategy.init_args.sync_evry=2"]
    output = run(tmp_path, str(CLI_SCRIPT), "fit", *wrong, code=2)
    assert "sync_evry" in output
