"""The examples, run small: what they print and leave behind."""

import csv
import importlib.util
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import WandbLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_blocktrain.cli import main
from lightning_blocktrain.data import python_docs
from lightning_blocktrain.strategies import BoundedHorizonStrategy

EXAMPLES = Path(__file__).parents[2] / "examples"
UNTRAINED_BITS = 8.0  # a uniform guess over 256 byte values


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bits_per_byte(printed: str) -> float:
    [bits] = re.findall(r"([0-9.]+) bits per byte", printed)
    return float(bits)


def run_script(*argv: str, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run every example in an empty directory, with an empty home and an empty corpus cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "corpora"))
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def small_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``python-docs`` read the language reference and one package only, to be built in a moment."""
    package = python_docs.stdlib_path() / "asyncio"
    monkeypatch.setattr(python_docs, "stdlib_path", lambda: package)


# swap_strategy.py


@pytest.mark.usefixtures("small_docs")
@pytest.mark.parametrize("strategy", ["blocktrain", pytest.param("auto", marks=pytest.mark.slow)])
def test_swap_strategy_either_string_learns(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--steps", "40", "--num-layers", "2", "--width", "32", "--window-bytes", "64"]
    load("swap_strategy").main(["--strategy", strategy, *sizes])
    printed = capsys.readouterr().out
    assert f"{strategy}: " in printed
    assert 2 < bits_per_byte(printed) < UNTRAINED_BITS - 0.5  # 40 steps learn letter frequencies, not English


def test_swap_strategy_source_is_short_and_names_the_string_once() -> None:
    source = (EXAMPLES / "swap_strategy.py").read_text()
    assert len(source.splitlines()) <= 40
    assert source.count("strategy=args.strategy") == 1


# cpu_pipeline.py


PIPELINE = ["--num-stages", "2", "--num-layers", "4", "--width", "32", "--window-bytes", "64", "--batch-size", "8"]


@pytest.mark.usefixtures("small_docs")
@pytest.mark.parametrize(
    "strategy",
    [
        "rgc",
        "auto",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("rgc_serial", "broadcast", "broadcast_serial", "live", "bp_groups")
        ),
    ],
)
def test_cpu_pipeline_every_string_learns_and_prints_its_costs(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load("cpu_pipeline").main(["--strategy", strategy, "--steps", "40", *PIPELINE])
    printed = capsys.readouterr().out
    assert f"{strategy}: " in printed
    assert 2 < bits_per_byte(printed) < UNTRAINED_BITS - 0.5
    [(rate, mib)] = re.findall(r"; (\d+) tokens/s, peak [PUR]SS (\d+) MiB", printed)
    assert int(rate) > 0
    assert int(mib) > 50  # torch alone, however it is measured
    exits = [float(bits) for bits in printed.rsplit("each stage: ", 1)[1].split()]
    assert len(exits) == 2
    assert exits[-1] == pytest.approx(bits_per_byte(printed), abs=0.002)  # both are rounded to 0.001


@pytest.mark.usefixtures("small_docs")
def test_cpu_pipeline_num_stages_reaches_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    setup = BoundedHorizonStrategy.setup

    def record(self: BoundedHorizonStrategy, trainer: L.Trainer) -> None:
        setup(self, trainer)
        if trainer.training:
            sizes.append(self.cut.sizes)

    monkeypatch.setattr(BoundedHorizonStrategy, "setup", record)
    load("cpu_pipeline").main(["--steps", "1", *PIPELINE])
    assert sizes == [(2, 2)]


def test_cpu_pipeline_one_stage_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load("cpu_pipeline").main(["--num-stages", "1"])
    assert stopped.value.code == 2
    assert "use --strategy auto" in capsys.readouterr().err.splitlines()[-1]


def test_cpu_pipeline_source_is_short_and_names_the_string_once() -> None:
    source = (EXAMPLES / "cpu_pipeline.py").read_text()
    assert len(source.splitlines()) <= 70
    assert source.count("strategy=args.strategy") == 1


# own_module.py


def test_own_module_blocktrain_learns_and_saves_plain_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load("own_module").main(["--steps", "40", "--width", "16", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert 2 < bits_per_byte(printed) < UNTRAINED_BITS - 1
    path = tmp_path / "own_module.ckpt"
    assert str(path) in printed
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == 40
    assert set(checkpoint["blocktrain"]["workers"])  # trained by blocks: the workers' own state is in it


@pytest.mark.slow  # a second interpreter
def test_own_module_checkpoint_loads_without_package_and_gives_same_outputs(tmp_path: Path) -> None:
    own = load("own_module")
    own.main(["--steps", "2", "--width", "16", "--out", str(tmp_path)])
    inputs = torch.arange(256).view(2, 128)
    with torch.no_grad():
        expected = own.ConvLanguageModel.load_from_checkpoint(tmp_path / "own_module.ckpt").eval()(inputs)
    script = f"""
import sys
sys.modules["lightning_blocktrain"] = None  # any import of it, or of a part of it, is an ImportError now
try:
    import lightning_blocktrain.errors
except ImportError:
    pass
else:
    raise SystemExit("the package is importable")
sys.path.insert(0, {str(EXAMPLES)!r})
import torch
from own_module import ConvLanguageModel
module = ConvLanguageModel.load_from_checkpoint({str(tmp_path / "own_module.ckpt")!r}, weights_only=True).eval()
with torch.no_grad():
    torch.save(module(torch.arange(256).view(2, 128)), {str(tmp_path / "outputs.pt")!r})
"""
    run_script("-c", script, cwd=tmp_path, env={"OMP_NUM_THREADS": "1", "PATH": ""})
    # Another process may sum in another order (threads): one float32 rounding of logits of order 1.
    torch.testing.assert_close(torch.load(tmp_path / "outputs.pt"), expected, rtol=0, atol=1e-5)


def test_own_module_block_loss_reaches_its_block_and_readout_only() -> None:
    module = load("own_module").ConvLanguageModel(num_layers=4, num_blocks=2, width=8)
    module.log = lambda *args, **kwargs: None
    batch = (torch.randint(256, (2, 16)), torch.randint(256, (2, 16)))
    module.block_training_step(batch, 0, block_idx=1).backward()
    moved = {name.rsplit(".", 2)[0] for name, parameter in module.named_parameters() if parameter.grad is not None}
    assert moved == {"layers.2", "layers.3", "readout"}


def test_own_module_rgc_learns_and_checkpoint_continues_under_auto(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = load("own_module")
    own.main(["--strategy", "rgc", "--steps", "40", "--width", "16", "--out", str(tmp_path)])
    assert 2 < bits_per_byte(capsys.readouterr().out) < UNTRAINED_BITS - 1
    path = tmp_path / "own_module.ckpt"
    module = own.ConvLanguageModel.load_from_checkpoint(path, weights_only=True)
    train = own.byte_loader(b"the old fox ran home. " * 200, shuffle=False)
    trainer = L.Trainer(max_steps=41, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(module, train, ckpt_path=path, weights_only=True)
    assert trainer.global_step == 41
    [optimizer] = trainer.optimizers
    assert {int(state["step"]) for state in optimizer.state.values()} == {41}  # every stage's state had arrived


def test_own_module_stage_hooks_around_its_layers_give_the_training_loss() -> None:
    module = load("own_module").ConvLanguageModel(num_layers=4, width=8)
    batch = (torch.randint(256, (2, 16)), torch.randint(256, (2, 16)))
    layout = module.configure_blocks()
    hidden = module.stage_embed(batch)
    for layer in layout["layers"]:
        hidden = layer(hidden)
    assert torch.equal(module.stage_loss(layout["readout"](hidden), batch), module.training_step(batch, 0))


def test_own_module_source_imports_registration_only() -> None:
    source = (EXAMPLES / "own_module.py").read_text()
    imports = [line.split("#")[0].strip() for line in source.splitlines() if re.match(r"\s*(import|from) light", line)]
    assert [line for line in imports if "lightning_blocktrain" in line] == ["import lightning_blocktrain"]


# own_corpus.py


TINY = ["--steps", "6", "--width", "16", "--window-bytes", "32"]


def test_own_corpus_without_files_trains_on_glob_and_parquet_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = load("own_corpus")
    own.main([*TINY, "--window-bytes", "128"])
    printed = capsys.readouterr().out
    assert "argparse.txt and 2 more" in printed
    assert bits_per_byte(printed) < UNTRAINED_BITS + 0.5  # six steps of warm-up: near the uniform guess
    assert "test: " not in printed
    assert list(tmp_path.iterdir()) == []


def test_own_corpus_fractions_cut_pool_and_score_both_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "book.txt"
    text.write_bytes(bytes(range(97, 123)) * 800)  # 20800 bytes
    fractions = ["--val-fraction", "0.1", "--test-fraction", "0.2"]
    load("own_corpus").main([str(text), *fractions, *TINY, "--cache-dir", str(tmp_path / "cache")])
    printed = capsys.readouterr().out
    assert "{'train': 14560, 'val': 2080, 'test': 4160}" in printed
    assert re.search(r"val: [0-9.]+ bits per byte", printed) and re.search(r"test: [0-9.]+ bits per byte", printed)


def test_own_corpus_explicit_splits_are_read_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, num_bytes in {"a.txt": 6000, "b.txt": 4000, "held.txt": 900, "last.txt": 700}.items():
        (tmp_path / name).write_bytes(b"abcdefghij" * (num_bytes // 10))
    pool = str(tmp_path / "[ab].txt")
    splits = ["--val", str(tmp_path / "held.txt"), "--test", str(tmp_path / "last.txt")]
    load("own_corpus").main([*TINY, *splits, "--", pool])
    assert "a.txt and 1 more: {'train': 10000, 'val': 900, 'test': 700}" in capsys.readouterr().out


def test_own_corpus_missing_file_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load("own_corpus").main(["no_such_file.txt", *TINY])
    assert stopped.value.code == 2
    assert "no_such_file.txt" in capsys.readouterr().err.splitlines()[-1]


# hf_gpt2.py


def test_hf_gpt2_without_transformers_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # any import of it is an ImportError now
    with pytest.raises(SystemExit) as stopped:
        load("hf_gpt2")
    message = stopped.value.code  # Python prints it and exits with 1
    assert isinstance(message, str)
    assert "needs transformers" in message and "pip install" in message and "\n" not in message


@pytest.fixture(scope="session")
def hf_gpt2() -> ModuleType:
    """Load the example, or skip where the extra ``hf`` is not installed."""
    pytest.importorskip("transformers", reason="transformers is not installed (extra hf)")
    return load("hf_gpt2")


def byte_pairs() -> DataLoader[tuple[torch.Tensor, ...]]:
    windows = torch.randint(256, (12, 17), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(windows[:, :-1], windows[:, 1:]), batch_size=4)


def hf_weights_after_3_steps(hf_gpt2: ModuleType, strategy: str | BoundedHorizonStrategy) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = hf_gpt2.GPT2Bytes(num_layers=2, width=16, num_heads=2, window_bytes=16)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=3, logger=False, enable_checkpointing=False
    )
    trainer.fit(module, byte_pairs())
    assert trainer.global_step == 3
    after: dict[str, torch.Tensor] = module.state_dict()
    assert all(not torch.equal(after[name], before[name]) for name in before)  # nothing was left out
    return after


def test_hf_gpt2_rgc_with_one_stage_equals_auto_bit_for_bit(hf_gpt2: ModuleType) -> None:
    one_stage = BoundedHorizonStrategy(method="rgc", num_stages=1, threads_per_stage=1)
    expected, got = (hf_weights_after_3_steps(hf_gpt2, strategy) for strategy in ("auto", one_stage))
    assert {name: torch.equal(tensor, expected[name]) for name, tensor in got.items()} == dict.fromkeys(expected, True)


def test_hf_gpt2_logits_depend_on_earlier_and_present_inputs_only(hf_gpt2: ModuleType) -> None:
    module = hf_gpt2.GPT2Bytes(num_layers=2, width=16, num_heads=2, window_bytes=16).eval()
    inputs = torch.randint(256, (2, 16))
    changed_at = 6
    changed = inputs.clone()
    changed[:, changed_at] = (inputs[:, changed_at] + 1) % 256
    with torch.no_grad():
        difference = (module(changed) - module(inputs)).abs().amax(dim=(0, 2))  # (T,)
    assert difference[:changed_at].tolist() == [0.0] * changed_at
    assert (difference[changed_at:] > 0).all()  # and every later position attends to it


@pytest.mark.usefixtures("small_docs")
@pytest.mark.parametrize("strategy", ["rgc", pytest.param("rgc_serial", marks=pytest.mark.slow)])
def test_hf_gpt2_stages_learn(strategy: str, hf_gpt2: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--steps", "40", "--num-layers", "2", "--width", "32", "--window-bytes", "64"]
    hf_gpt2.main(["--strategy", strategy, *sizes])
    printed = capsys.readouterr().out
    assert f"{strategy}: " in printed
    assert 2 < bits_per_byte(printed) < UNTRAINED_BITS - 0.5


# wandb_logging.py


def write_text(path: Path) -> str:
    path.write_bytes(b"The quick brown fox jumps over the lazy dog. " * 2000)
    return str(path)


@pytest.mark.slow  # starts W&B's own process
def test_wandb_logging_nobody_logged_in_writes_offline_run_with_all_keys_and_no_network(tmp_path: Path) -> None:
    corpus = write_text(tmp_path / "fox.txt")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        env = {
            "HOME": str(tmp_path / "home"),
            "BLOCKTRAIN_CACHE": str(tmp_path / "corpora"),
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin",
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), url),
        }
        script = str(EXAMPLES / "wandb_logging.py")
        printed = run_script(script, "--steps", "4", "--width", "16", "--corpus", corpus, cwd=tmp_path, env=env)
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has connected
            proxy.accept()
    [run] = (tmp_path / "wandb").glob("offline-run-*")
    [record] = run.glob("*.wandb")
    assert record.stat().st_size > 0
    assert f"offline run in {run}" in printed
    keys = printed.rsplit("keys: ", 1)[1].strip().split(", ")
    for key in (
        "blocktrain/accepted_tokens",
        "rounds/participation",
        "rounds/delta_norm/block2",
        "throughput/accepted_tokens_per_s",
        "throughput/worker_tokens_per_s",
        "train/local_ce/block0",
        "val/bits_per_byte",
        "val/composition_gain",
        "val/leak_accuracy",
        "val/prior_ce",
        "val/sweep_ce_k1",
        "val/sweep_ce_k16",
    ):
        assert key in keys
    assert any(re.fullmatch("memory/peak_(pss|uss|rss)_mib", key) for key in keys)


def test_wandb_logging_login_is_found_in_environment_and_netrc(tmp_path: Path) -> None:
    is_logged_in = load("wandb_logging").is_logged_in
    assert not is_logged_in({})
    assert is_logged_in({"WANDB_API_KEY": "x" * 40})
    assert not is_logged_in({"WANDB_API_KEY": ""})
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    assert is_logged_in({"NETRC": str(netrc)})
    assert not is_logged_in({"NETRC": str(netrc), "WANDB_BASE_URL": "https://wandb.example.org"})
    netrc.write_text("machine\n")
    assert not is_logged_in({"NETRC": str(netrc)})


@pytest.mark.parametrize(("key", "argv", "offline"), [("", [], True), ("k", [], False), ("k", ["--offline"], True)])
def test_wandb_logging_is_online_only_when_logged_in(
    key: str, argv: list[str], offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    def receive(self: WandbLogger, **options: Any) -> None:
        raise Stop(options)

    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setattr(WandbLogger, "__init__", receive)
    with pytest.raises(Stop) as stopped:
        load("wandb_logging").main(argv)
    assert stopped.value.args[0]["offline"] is offline


# lightning_cli.yaml


SMALL_FIT = [
    *("--model.width", "16", "--model.window_bytes", "32", "--data.window_bytes", "32"),
    *("--trainer.max_steps", "20", "--trainer.val_check_interval", "20", "--trainer.limit_val_batches", "4"),
    *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
]


def fit_config(*argv: str) -> int:
    return main(["fit", "--config", str(EXAMPLES / "lightning_cli.yaml"), *SMALL_FIT, *argv])


def last_logged(run_dir: Path) -> dict[str, str]:
    """Return the newest value of every column of the run's metrics."""
    newest: dict[str, str] = {}
    with (run_dir / "runs" / "lightning_cli" / "version_0" / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            newest |= {key: value for key, value in row.items() if value}
    return newest


@pytest.mark.usefixtures("small_docs")
def test_lightning_cli_config_trains_with_options_of_strategy(tmp_path: Path) -> None:
    assert fit_config() == 0
    newest = last_logged(tmp_path)
    assert float(newest["blocktrain/worker_steps"]) == 20 * 2 * 3  # steps, replicas, blocks
    assert float(newest["rounds/round"]) == 2  # sync_every=10, which is not the default
    assert float(newest["val/bits_per_byte"]) < UNTRAINED_BITS
    assert "throughput/worker_tokens_per_s" in newest


@pytest.mark.slow  # two runs
@pytest.mark.usefixtures("small_docs")
@pytest.mark.filterwarnings("ignore:RoundMonitor has nothing to report")
@pytest.mark.parametrize(("alias", "key"), [("blocktrain", "train/local_ce/block2"), ("auto", "train/loss")])
def test_lightning_cli_alias_on_command_line_replaces_class_of_config(alias: str, key: str, tmp_path: Path) -> None:
    assert fit_config("--trainer.strategy", alias) == 0
    newest = last_logged(tmp_path)
    assert key in newest
    # The alias has one replica of each block; without the strategy there are no rounds.
    assert newest.get("blocktrain/worker_steps") == ("60" if alias == "blocktrain" else None)


def test_lightning_cli_wrong_type_in_strategy_is_parser_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit_config("--trainer.strategy.init_args.replicas", "two") == 2
    assert "replicas" in capsys.readouterr().err
