"""The command line: exit codes, one clear line for bad input, and what each command prints."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_blocktrain.demo
from lightning_blocktrain import cli
from lightning_blocktrain.cli import input_error, main
from lightning_blocktrain.models import ByteTransformer, DiffusionBlocks
from lightning_blocktrain.models.loading import load_model, save_model

SIZES: dict[str, Any] = {"num_layers": 2, "num_blocks": 2, "width": 16, "num_heads": 2, "window_bytes": 8}
MODELS = {"ByteTransformer": ByteTransformer, "DiffusionBlocks": DiffusionBlocks}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="ascii")
    return str(path)


@pytest.fixture(params=list(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def checkpoint(tmp_path: Path, name: str, **options: Any) -> str:
    torch.manual_seed(0)
    path = tmp_path / f"{name}.ckpt"
    save_model(MODELS[name](**{**SIZES, **options}), path)
    return str(path)


def trained_like(tmp_path: Path, name: str) -> str:
    """Return a checkpoint whose exits differ clearly, as those of trained blocks do."""
    torch.manual_seed(0)
    model = MODELS[name](**{**SIZES, "num_layers": 3, "num_blocks": 3})
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.4)
    path = tmp_path / f"{name}.ckpt"
    save_model(model, path)
    return str(path)


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("blocktrain: error: ")
    return lines[0]


def test_help_names_every_command_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("demo", "fit", "validate", "test", "predict", "evaluate", "generate", "export"):
        assert re.search(rf"^    {command} ", text, re.MULTILINE), command
    assert "blocktrain evaluate demo_out/diffusion_blocks.ckpt" in text


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["generate", "a.ckpt", "--prompt", "a", "--num-bytes", "0"]])
def test_wrong_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "error" in capsys.readouterr().err


def test_evaluate_untrained_model_prints_its_code_length_and_the_corpus(
    name: str, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(tmp_path, name)
    arguments = ["evaluate", path, "--corpus", corpus, "--num-windows", "8", "--batch-size", "4"]
    assert main([*arguments, *(["--num-draws", "2"] if name == "DiffusionBlocks" else [])]) == 0
    text = capsys.readouterr().out
    bits = re.search(r"bits per byte +(\d+\.\d+)", text)
    # DiffusionBlocks' readout starts at zero: exactly 8 bits; the causal model's is small, so near it.
    assert bits is not None and abs(float(bits[1]) - 8) < (1e-4 if name == "DiffusionBlocks" else 0.2)
    assert re.search(r"bytes evaluated +64\b", text)
    assert "text.txt, test split" in text
    assert re.search(r"sha256 of the corpus: [0-9a-f]{64}\n", text)
    assert f"{name}, objective {'denoise' if name == 'DiffusionBlocks' else 'features'}" in text
    quantities = ("local_ce", "sweep_ce, K=1", "sweep_ce, K=2", "prior_ce, K=2", "composition gain", "leak accuracy")
    quantities += ("without z",)
    assert all((quantity in text) == (name == "DiffusionBlocks") for quantity in quantities)


def test_evaluate_prints_what_every_exit_pays(
    name: str, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained_like(tmp_path, name)
    arguments = ["--corpus", corpus, "--num-windows", "8", "--batch-size", "4"]
    assert main(["evaluate", path, *arguments]) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"at exit (\d) \((\d) layers?\) +(\d+\.\d+)", text)
    assert [(exit, layers) for exit, layers, _ in rows] == [("1", "1"), ("2", "2")]
    bits = [float(value) for *_, value in rows]
    whole = re.search(r"bits per byte +(\d+\.\d+)", text)
    assert whole is not None and len({*bits, float(whole[1])}) == 3
    # The model that ends there, evaluated by itself, pays the same.
    for exit_idx, paid in enumerate(bits):
        smaller = tmp_path / f"{exit_idx + 1}.ckpt"
        assert main(["export", path, str(smaller), "--exit", str(exit_idx + 1)]) == 0
        assert main(["evaluate", str(smaller), *arguments]) == 0
        own = re.search(r"bits per byte +(\d+\.\d+)", capsys.readouterr().out)
        assert own is not None and float(own[1]) == paid


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_export_writes_the_model_that_generates_as_the_exit_does(
    num_blocks: int, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = trained_like(tmp_path, name), tmp_path / "small.ckpt"
    out.write_bytes(b"replaced")
    assert main(["export", path, str(out), "--exit", str(num_blocks)]) == 0
    smaller = load_model(out)
    num_parameters = sum(parameter.numel() for parameter in smaller.parameters())
    words = ("1 block, 1 layer", "2 blocks, 2 layers", "3 blocks, 3 layers")[num_blocks - 1]
    assert capsys.readouterr().out == f"{out}: {words}, {num_parameters:,} parameters\n"
    assert (len(smaller.layers), smaller.num_blocks) == (num_blocks, num_blocks)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([Path(path).name, out.name])
    for options in (["--exit", str(num_blocks)], []):
        assert main(["generate", str(path if options else out), "--prompt", "ab", "--num-bytes", "20", *options]) == 0
    both = capsys.readouterr().out
    assert both[: len(both) // 2] == both[len(both) // 2 :]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["export", "CKPT", "OUT", "--exit", "3"],
            "num_blocks before an exit (--exit) must be in 1 .. 2; got num_blocks=3",
        ),
        (["export", "CKPT", "OUT/missing/a.ckpt", "--exit", "1"], "a directory that exists"),
        (["export", "CKPT", ".", "--exit", "1"], "the checkpoint must be written to a file"),
        (["export", "CKPT", "DIRECTORY", "--exit", "1"], "the checkpoint must be written to a file"),
        (["export", "missing.ckpt", "OUT", "--exit", "1"], "the checkpoint must be a file"),
        (["generate", "CKPT", "--prompt", "a", "--exit", "3"], "num_blocks before an exit (--exit) must be in 1 .. 2"),
        (["generate", "CKPT", "--prompt", "a", "--chunk-bytes", "2"], "a model that was trained on unknown bytes"),
    ],
)
def test_what_a_model_or_the_disk_refuses_is_one_line_and_leaves_no_file(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = checkpoint(tmp_path, "ByteTransformer")
    directory = tmp_path / "directory"
    directory.mkdir()
    monkeypatch.chdir(directory)
    known = {"CKPT": path, "OUT": str(tmp_path / "out"), "DIRECTORY": str(directory)}
    words = [argument.replace("OUT/", f"{known['OUT']}/") for argument in arguments]
    assert main([known.get(word, word) for word in words]) == 2
    assert message in one_error_line(capsys)
    assert {entry.name for entry in tmp_path.rglob("*")} == {"directory", "ByteTransformer.ckpt"}


def test_export_of_an_exit_that_is_no_number_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "CKPT", "OUT", "--exit", "0"]) == 2
    assert "--exit" in capsys.readouterr().err


def test_evaluate_of_another_file_is_one_line_and_exit_2(corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", corpus]) == 2
    assert "must be a checkpoint" in one_error_line(capsys)


def test_evaluate_of_unknown_corpus_is_one_line_and_exit_2(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", checkpoint(tmp_path, "ByteTransformer"), "--corpus", f"{corpus}.missing"]) == 2
    assert "corpus must be a named corpus or an existing file" in one_error_line(capsys)


def test_generate_prints_prompt_and_same_bytes_for_same_seed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", checkpoint(tmp_path, name), "--prompt", "Hello ", "--num-bytes", "12"]
    outputs = []
    for seed in ("1", "1", "2"):
        assert main([*arguments, "--seed", seed]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0].startswith("Hello ")
    assert outputs[0] == outputs[1] != outputs[2]
    assert "\x1b" not in outputs[0]


def test_generate_passes_chunks_and_sweeps_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def record(self: DiffusionBlocks, prompt: bytes, num_bytes: int, **options: Any) -> bytes:
        asked.update(prompt=prompt, num_bytes=num_bytes, **options)
        return b"\x1b[2Jdone"

    monkeypatch.setattr(DiffusionBlocks, "generate", record)
    path = checkpoint(tmp_path, "DiffusionBlocks")
    options = ["--num-bytes", "9", "--chunk-bytes", "4", "--sweeps", "2", "--temperature", "0", "--seed", "3"]
    options += ["--exit", "1"]
    assert main(["generate", path, "--prompt", "ab", *options]) == 0
    expected = {"prompt": b"ab", "num_bytes": 9, "chunk_bytes": 4, "sweeps": 2, "temperature": 0.0, "seed": 3}
    expected |= {"num_blocks": 1, "num_draws": 1}
    assert asked == expected
    # A generated escape sequence must not reach the terminal.
    assert capsys.readouterr().out == "ab\N{REPLACEMENT CHARACTER}[2Jdone\n"


@pytest.mark.parametrize("arguments", [["evaluate", "CKPT", "--num-draws", "4"], ["evaluate", "CKPT", "--seed", "1"]])
def test_options_that_a_causal_model_would_ignore_are_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(tmp_path, "ByteTransformer")
    assert main([path if argument == "CKPT" else argument for argument in arguments]) == 2
    assert "is for DiffusionBlocks only" in one_error_line(capsys)


def test_generate_with_argument_the_model_refuses_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(tmp_path, "DiffusionBlocks")
    assert main(["generate", path, "--prompt", "a", "--num-bytes", "1", "--chunk-bytes", "9"]) == 2
    assert "chunk_bytes must be in 1 .. window_bytes" in one_error_line(capsys)


def test_demo_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(lightning_blocktrain.demo, "run_demo", lambda *arguments: asked.extend(arguments))
    assert main(["demo", "--budget", "0.5", "--corpus", "a.txt", "--out", "here", "--seed", "4"]) == 0
    assert asked == ["0.5", "a.txt", Path("here"), 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--budget", "huge"], "budget must be tiny, small, medium"), (["--out", "FILE"], "out must be a directory")],
)
def test_demo_refuses_bad_options_before_training(
    arguments: list[str], message: str, corpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lightning_blocktrain.demo, "run_arms", lambda *_: pytest.fail("training began"))
    assert main(["demo", *[corpus if argument == "FILE" else argument for argument in arguments]]) == 2
    assert message in one_error_line(capsys)


FIT_SIZES = ["--model.num_layers=2", "--model.width=16", "--model.num_heads=2", "--model.window_bytes=8"]
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.accelerator=cpu"]


def test_fit_trains_by_blocks_and_evaluate_reads_its_checkpoint(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = [f"--data.corpus={corpus}", "--data.window_bytes=8", "--data.batch_size=4"]
    trainer = ["--trainer.strategy=blocktrain", "--trainer.max_steps=2", "--trainer.limit_val_batches=1", *QUIET]
    assert main(["fit", "--model=DiffusionBlocks", *FIT_SIZES, "--model.num_blocks=2", *data, *trainer]) == 0
    named = re.search(r"^checkpoint: (.+)$", capsys.readouterr().out, re.MULTILINE)
    assert named is not None
    saved = torch.load(named[1], weights_only=True)
    assert saved["blocktrain"]["shape"]["num_blocks"] == 2
    assert main(["evaluate", named[1], "--corpus", corpus, "--num-windows=4", "--num-draws=1"]) == 0
    assert "DiffusionBlocks" in capsys.readouterr().out


@pytest.mark.slow
def test_fit_reads_strategy_from_config_file(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
model:
  class_path: ByteTransformer
  init_args: {{num_layers: 2, width: 16, num_heads: 2, window_bytes: 8, num_blocks: 2}}
data: {{corpus: {corpus}, window_bytes: 8, batch_size: 4}}
trainer:
  max_steps: 2
  limit_val_batches: 1
  strategy:
    class_path: lightning_blocktrain.BlockTrainStrategy
    init_args: {{replicas: 2}}
""",
        encoding="utf-8",
    )
    assert main(["fit", f"--config={config}", *QUIET]) == 0
    named = re.search(r"^checkpoint: (.+)$", capsys.readouterr().out, re.MULTILINE)
    assert named is not None
    assert torch.load(named[1], weights_only=True)["blocktrain"]["shape"]["replicas"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=ByteTransformer", "--data.window_bytes=512"], "must not exceed the model's window_bytes"),
        (["--model=ByteTransformer", "--trainer.strategy=blocktrian"], "invalid strategy name"),
        (["--model=Nonsense"], "Nonsense"),
        (["--model=DiffusionBlocks", "--model.objective=residual"], "objective"),
        (["--model=ByteTransformer", "--model.p_span=2"], "p_span must be in [0, 1]; got p_span=2"),
        (["--model=ByteTransformer", "--bogus=1"], "--bogus"),
        (
            ["--model=ByteTransformer", "--model.width=10", "--model.num_heads=3"],
            "width must be a multiple of 2 * num_heads",
        ),
    ],
)
def test_fit_with_bad_input_is_one_line_and_exit_2(
    arguments: list[str], message: str, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["fit", *arguments, f"--data.corpus={corpus}", *QUIET]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("blocktrain: error: ")]
    assert len(errors) == 1 and message in errors[0]


def raised(function: Any) -> Exception:
    try:
        function()
    except Exception as exc:
        return exc
    raise AssertionError("nothing was raised")


def test_value_errors_are_about_input_only_if_this_package_raised_them() -> None:
    ours = raised(lambda: ByteTransformer(window_bytes=0))
    foreign = raised(lambda: int("x"))
    assert input_error(ours) is ours
    assert input_error(foreign) is None
    foreign.__cause__ = ours
    assert input_error(foreign) is ours


def test_defect_is_not_hidden_behind_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> int:
        raise ValueError("a defect")

    monkeypatch.setattr(cli, "run_demo_command", broken)
    with pytest.raises(ValueError, match="a defect"):
        main(["demo"])


def test_fit_with_a_bad_strategy_argument_is_one_line_and_exit_2(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "trainer:\n  strategy:\n    class_path: lightning_blocktrain.BlockTrainStrategy\n"
        "    init_args:\n      sync_every: 0\n"
    )
    assert main(["fit", f"--config={config}", "--model=ByteTransformer", f"--data.corpus={corpus}"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "sync_every must be at least 1" in error and "Traceback" not in error


PIPELINE = "trainer:\n  strategy:\n    class_path: lightning_blocktrain.BoundedHorizonStrategy\n    init_args: "


@pytest.mark.parametrize("strategy", ["alias", "class_path"])
def test_fit_trains_by_stages_and_evaluate_reads_its_checkpoint(
    strategy: str, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(PIPELINE + "{stage_split: [1, 1], consensus_weights: depth, lag: pinned}\n", encoding="ascii")
    chosen = "--trainer.strategy=rgc" if strategy == "alias" else f"--config={config}"
    data = [f"--data.corpus={corpus}", "--data.window_bytes=8", "--data.batch_size=4"]
    trainer = ["--trainer.max_steps=3", "--trainer.limit_val_batches=1", *QUIET]
    assert main(["fit", "--model=ByteTransformer", *FIT_SIZES, chosen, *data, *trainer]) == 0
    named = re.search(r"^checkpoint: (.+)$", capsys.readouterr().out, re.MULTILINE)
    assert named is not None
    saved = torch.load(named[1], weights_only=True)
    assert "bounded_horizon" in saved and saved["global_step"] == 3
    assert {float(state["step"]) for state in saved["optimizer_states"][0]["state"].values()} == {3.0}
    assert main(["evaluate", named[1], "--corpus", corpus, "--num-windows=4"]) == 0
    assert "ByteTransformer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{ring_slots: 0}", "ring_slots must be at least 1"),
        ("{ring_slots: many}", "ring_slots"),
        ("{method: sgd}", "method"),
        ("{num_stage: 2}", "num_stage"),
        ("{stage_split: [2, 0]}", "stage_split must be"),
        ("{method: live, mode: async}", "does not overlap batches"),
    ],
)
def test_fit_with_a_bad_argument_of_the_pipeline_is_one_line_and_exit_2(
    arguments: str, message: str, tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(PIPELINE + arguments + "\n", encoding="ascii")
    assert main(["fit", f"--config={config}", "--model=ByteTransformer", f"--data.corpus={corpus}"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("blocktrain: error: ")]
    assert len(errors) == 1 and message in errors[0] and "Traceback" not in errors[0]


def test_interrupted_command_says_so_and_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lightning_blocktrain.demo, "run_demo", interrupt)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err
