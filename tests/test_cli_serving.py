"""The commands around serving: what they print, write and refuse."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_blocktrain.cli import main
from lightning_blocktrain.models.block_files import load_blocks, read_manifest
from lightning_blocktrain.models.loading import Model, save_model
from lightning_blocktrain.transport.address import TOKEN as VARIABLE
from tests.models.cases import causal, noisy
from tests.serving.local import TOKEN, route_of, serving

GENERATE = ["--prompt", "Hello ", "--num-bytes", "12", "--chunk-bytes", "4", "--sweeps", "2", "--seed", "5"]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)


def saved(model: Model, folder: Path) -> str:
    path = folder / "model.ckpt"
    save_model(model, path)
    return str(path)


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("blocktrain: error: ")
    return err


@pytest.mark.parametrize("options", [[], ["--wire", "fp32", "--step-by-step"], ["--num-draws", "2", "--exit", "2"]])
def test_generate_prints_the_same_from_hosts_as_from_the_checkpoint(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = noisy("denoise")
    here = [option for option in options if option not in ("--wire", "fp32", "--step-by-step")]
    assert main(["generate", saved(model, tmp_path), *GENERATE, *here]) == 0
    expected = capsys.readouterr().out
    assert expected.startswith("Hello ")
    with serving(model, [0, 1], [2]) as servers:
        assert main(["generate", "--route", route_of(servers), *GENERATE, *options]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "CKPT", "--route", "h:1", "--prompt", "a"], "needs a checkpoint or --route, one of them"),
        (["generate", "--prompt", "a"], "needs a checkpoint or --route, one of them"),
        (["generate", "CKPT", "--wire", "bf16", "--prompt", "a"], "say how hosts are used"),
        (["generate", "CKPT", "--step-by-step", "--prompt", "a"], "say how hosts are used"),
        (["generate", "--route", "nowhere", "--prompt", "a"], "must be host:port or tls://host:port"),
        (["generate", "--route", "h:1,h:1", "--prompt", "a"], "hosts of a route must be different ones"),
        (["export", "CKPT", "OUT", "--exit", "1", "--dtype", "bf16"], "--dtype is for a folder of blocks"),
        (["serve", "CKPT", "--blocks", "3"], "0 to 2, each once; got blocks=[3]"),
        (["serve", "CKPT", "--listen", "nowhere"], "listen must be HOST:PORT"),
        (["serve", "CKPT", "--keyfile", "key.pem"], "keyfile needs a certfile"),
        (["serve", "CKPT", "--certfile", "none.pem"], "certfile and keyfile must be PEM files that belong together"),
        (["serve", "OUT"], "must be a checkpoint or a folder that 'blocktrain export' wrote"),
        (["serve", "CKPT", "--listen", "29500"], "the default is 127.0.0.1:29500"),
        (
            ["generate", "CKPT", "--prompt", "a", "--exit", "4"],
            "(--exit) must be in 1 .. 3; got num_blocks=4",
        ),
        (["export", "CKPT", ".", "--exit", "1"], "must be written to a file; got ., a folder"),
        (["serve", "."], "must hold an exported model"),
        (
            ["serve", "CKPT", "--listen", "a..b:29500"],
            "listen must be HOST:PORT with a port of 0 to 65535; got listen='a..b:29500'",
        ),
        (["completions", "--route", "a..b:1"], "must be host:port or tls://host:port; got address='a..b:1'"),
        (["serve", "CKPT", "--threads", "100000"], "for each core; got --threads 100000; use one per core"),
        (
            ["plan", "--width", "64", "--num-layers", "3", "--window-bytes", "2000000"],
            "window_bytes in 1 .. 1048576; got",
        ),
    ],
    ids=str,
)
def test_wrong_input_is_one_line_and_leaves_no_file(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = {"CKPT": saved(causal("features"), tmp_path), "OUT": str(tmp_path / "out")}
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    assert main([known.get(word, word) for word in arguments]) == 2
    assert words in one_error_line(capsys)
    assert {entry.name for entry in tmp_path.rglob("*")} == {"model.ckpt", "empty"}


def test_an_authority_that_is_not_there_is_refused_before_anything_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKTRAIN_CAFILE", "/nope/ca.pem")
    assert main(["serve", saved(causal("features"), tmp_path)]) == 2
    assert "the file of the authority must exist; got BLOCKTRAIN_CAFILE=/nope/ca.pem" in one_error_line(capsys)


@pytest.mark.parametrize("text", ["1e308", "1e-320", "0", "nan", "fast"])
def test_a_speed_that_no_host_has_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--width", "64", "--num-layers", "3", "--tflops", text, "--memory-gb-s", "10"]) == 2
    assert f"'{text}' is not a number in 0.001 .. 1000000" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["serve", "CKPT"], ["generate", "--route", "127.0.0.1:1", "--prompt", "a"]])
def test_without_a_token_nothing_is_served_or_asked(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE)
    known = {"CKPT": saved(causal("features"), tmp_path)}
    assert main([known.get(word, word) for word in arguments]) == 2
    assert f"must be in the environment variable {VARIABLE}; got none; export {VARIABLE}=" in one_error_line(capsys)


def test_hosts_that_cannot_do_it_are_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(causal("features"), [0], [2]) as servers:
        assert main(["generate", "--route", route_of(servers), "--prompt", "a"]) == 2
        assert "Block 1 is served by no host" in one_error_line(capsys)


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_export_writes_a_folder_that_can_be_served(
    dtype: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = causal("features")
    options = [] if dtype is None else ["--dtype", dtype]
    assert main(["export", saved(model, tmp_path), str(tmp_path / "blocks"), *options]) == 0
    manifest = read_manifest(tmp_path / "blocks")
    assert capsys.readouterr().out == f"{tmp_path / 'blocks'}: 3 blocks, version {manifest.version}\n"
    part, _ = load_blocks(tmp_path / "blocks", None)
    same = part.generate(b"abc", 8, seed=1) == model.generate(b"abc", 8, seed=1)
    assert same or dtype == "bf16"
    sizes = {file.stem: file.stat().st_size for file in (tmp_path / "blocks").glob("*.safetensors")}
    assert sorted(sizes) == ["block0", "block1", "block2", "interface"]


def serve(path: str, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "lightning_blocktrain.cli", "serve", path, "--listen", "127.0.0.1:0", *options]
    environment: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_three_processes_serve_a_fourth_and_end_at_a_signal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(noisy("denoise_features"), tmp_path)
    assert main(["export", path, str(tmp_path / "blocks")]) == 0
    assert main(["generate", path, *GENERATE]) == 0
    expected = capsys.readouterr().out.splitlines()[1]
    hosts = [serve(str(tmp_path / "blocks"), "--blocks", str(block_idx)) for block_idx in range(3)]
    try:
        lines = [host.stdout.readline() for host in hosts if host.stdout is not None]
        route = ",".join(line.rsplit(" ", 1)[1].strip() for line in lines)
        assert [line.startswith(f"Block {idx} of 3, version ") for idx, line in enumerate(lines)] == [True] * 3
        assert main(["generate", "--route", route, *GENERATE]) == 0
        assert capsys.readouterr().out.strip("\n") == expected
        for host, number in zip(hosts, (signal.SIGINT, signal.SIGTERM, signal.SIGINT), strict=True):
            host.send_signal(number)
        for host in hosts:
            _, err = host.communicate(timeout=60)
            assert host.returncode == 0 and err == "blocktrain serve: ended\n"
    finally:
        for host in hosts:
            host.kill()
            host.communicate()


def test_plan_prints_what_to_expect_and_that_nothing_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--width",
        "10240",
        "--num-layers",
        "60",
        "--dtype",
        "fp16",
        "--tflops",
        "100",
        "--memory-gb-s",
        "1500",
    ]
    assert main(["plan", *arguments, "--rtt-ms", "50", "--mbit-s", "1000", "--output-bytes", "128"]) == 0
    out = capsys.readouterr().out
    assert "logical: nothing is trained" in out and "75,723,468,800 parameters, fp16" in out
    assert "MiB" in out and "predicted" in out and "as given" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-layers", "13"], "num_blocks must divide num_layers; got num_blocks=3, num_layers=13"),
        (["--num-layers", "6", "--tflops", "1"], "--tflops and --memory-gb-s describe a host together"),
        (["--num-layers", "6", "--dtype", "fp16"], "the speed of fp16 is not measured on a CPU"),
        (["--num-layers", "6", "--tflops", "1", "--memory-gb-s", "1", "--output-bytes", "300"], "fit into the window"),
    ],
)
def test_a_plan_of_what_is_no_shape_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--width", "64", *arguments]) == 2
    assert words in one_error_line(capsys)


@pytest.mark.slow
def test_completions_answer_from_hosts_and_end_at_a_signal() -> None:
    import openai

    model = causal("features")
    command = [sys.executable, "-m", "lightning_blocktrain.cli", "completions", "--listen", "127.0.0.1:0", "--route"]
    with serving(model, [0, 1], [2]) as servers:
        process = subprocess.Popen([*command, route_of(servers)], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url, name = process.stdout.readline().strip().split("/completions, model ")
            with openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
                answer = client.completions.create(model=name, prompt="Hello", max_tokens=8, seed=3)
            assert answer.choices[0].text == model.generate(b"Hello", 8, seed=3).decode(errors="replace")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.communicate()
