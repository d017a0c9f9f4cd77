"""A run as its users start it: ``blocktrain coordinator``, a process per worker, and relays that count their bytes.

Owns starting and ending the processes. Every host is a relay in front of the coordinator, whose line may be long: hosts
are emulated, bytes are real, headers and what is sent twice among them.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.composition import Arm, evaluate, make_module, make_strategy
from benchmarks.relay import Line, Relay
from lightning_blocktrain import BlockTrainStrategy, ByteDataModule
from lightning_blocktrain.demo.arms import Arm as DemoArm
from lightning_blocktrain.demo.arms import fit_trainer, fresh_logger
from lightning_blocktrain.demo.recipe import Recipe
from lightning_blocktrain.transport.address import TOKEN, URL

PATIENT_S = 600.0
"""A deadline that no worker of a busy machine misses."""


def train_on_hosts(
    arm: Arm, recipe: Recipe, corpus: dict[str, Any], seed: int, latencies_ms: Sequence[float]
) -> dict[str, Any]:
    """Train one arm with ``num_blocks * replicas`` worker processes and return what was found.

    Args:
        arm: The arm.
        recipe: Of this arm.
        corpus: Options of ``ByteDataModule``.
        seed: Of weights.
        latencies_ms: One way, per host; worker k is on host k modulo their number.

    Returns:
        ``exits`` on test, ``sent_bytes`` and ``prefix_bytes``, as encoded, ``up_bytes`` and ``down_bytes``, of all
        lines, and ``corpus_sha256``.

    Raises:
        RuntimeError: If a worker ended without a result.
    """
    told = {"arm": asdict(arm), "recipe": asdict(recipe), "corpus": corpus, "seed": seed}
    token = secrets.token_urlsafe(16)
    with ExitStack() as stack:
        state = stack.enter_context(tempfile.TemporaryDirectory())
        num_workers = recipe.num_blocks * recipe.replicas
        num_rounds = recipe.steps // recipe.replicas // _sync_every(arm, recipe)
        command = [
            "-m",
            "lightning_blocktrain.cli",
            "coordinator",
            "--state",
            f"{state}/run",
            "--listen",
            "127.0.0.1:0",
        ]
        command += ["--num-workers", f"{num_workers}", "--max-rounds", f"{num_rounds}"]
        coordinator = _start(stack, command, {TOKEN: token})
        assert coordinator.stdout is not None
        url = _word_with(coordinator.stdout.readline(), "http://").rstrip(",")
        host, _, port = url.removeprefix("http://").rpartition(":")
        lines = [Line(latency_ms=latency_ms) for latency_ms in latencies_ms]
        relays = [stack.enter_context(Relay((host, int(port)), line, line)) for line in lines]
        workers = []
        for idx in range(num_workers):
            environment = {TOKEN: token, URL: relays[idx % len(relays)].url}
            worker = _start(stack, ["-m", "benchmarks.study.workers"], environment)
            assert worker.stdin is not None
            worker.stdin.write(json.dumps({**told, "evaluates": idx == 0}) + "\n")
            worker.stdin.flush()
            workers.append(worker)
        found = results_of(workers)
        traffic = {f"{way}_bytes": sum(relay.traffic[way] for relay in relays) for way in ("up", "down")}
    totals = {name: sum(one[name] for one in found) for name in ("sent_bytes", "prefix_bytes")}
    return {"exits": found[0]["exits"], "corpus_sha256": found[0]["corpus_sha256"], **totals, **traffic}


def _start(stack: ExitStack, command: Sequence[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    """Start Python with a command; it is killed when the stack closes."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )

    def end() -> None:
        process.kill()
        process.communicate()

    stack.callback(end)
    return process


def _word_with(line: str, begin: str) -> str:
    found = [word for word in line.split() if word.startswith(begin)]
    if not found:
        raise RuntimeError(f"the coordinator was to say where it listens; got {line!r}")
    return found[0]


def results_of(workers: "Sequence[subprocess.Popen[str]]") -> list[dict[str, Any]]:
    """Return what each worker has written as its last line.

    Raises:
        RuntimeError: As soon as one has ended without; the others are killed, which would go on without it.
    """

    def result(idx: int) -> dict[str, Any]:
        said, _ = workers[idx].communicate()
        if workers[idx].returncode or not said:
            raise RuntimeError(f"worker {idx} ended with exit code {workers[idx].returncode}")
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found

    with ThreadPoolExecutor(len(workers)) as pool:
        results = [pool.submit(result, idx) for idx in range(len(workers))]
        _, others = wait(results, return_when=FIRST_EXCEPTION)
        if others:
            for worker in workers:
                worker.kill()
        return [future.result() for future in sorted(results, key=lambda future: future in others)]


def _sync_every(arm: Arm, recipe: Recipe) -> int:
    return int((arm.strategy or {}).get("sync_every", recipe.sync_every))


def work(told: dict[str, Any]) -> dict[str, Any]:
    """Be one worker: train until the run is over and return what this process counted."""
    torch.set_num_threads(1)
    recipe, seed = Recipe(**told["recipe"]), told["seed"]
    arm = Arm(**told["arm"])
    # Each process is one worker: how many there are of a block follows from their number.
    own = {"deadline_s": PATIENT_S, **(arm.strategy or {}), "replicas": 1}
    data = ByteDataModule(window_bytes=recipe.window_bytes, batch_size=recipe.batch_size, **told["corpus"])
    L.seed_everything(seed, workers=True, verbose=False)
    module = make_module(arm, recipe)
    demo_arm = DemoArm(arm.title, arm.title, lambda: module, lambda: make_strategy(replace(arm, strategy=own), recipe))
    # The coordinator ends the run: a worker that counts to its own end might leave before the others' last updates.
    longer = replace(recipe, steps=recipe.steps + _sync_every(arm, recipe) * recipe.replicas, val_batches=0)
    with tempfile.TemporaryDirectory() as log:
        trainer = fit_trainer(demo_arm, longer, [], fresh_logger(Path(log), "log"))
        trainer.fit(module, data)
    assert isinstance(trainer.strategy, BlockTrainStrategy)
    result: dict[str, Any] = {name: getattr(trainer.strategy, name) for name in ("sent_bytes", "prefix_bytes")}
    if told["evaluates"]:
        data.setup("test")
        found = evaluate(module, data.test_dataloader().dataset, recipe, seed)
        result |= {"exits": found["exits"], "corpus_sha256": data.corpus_info.sha256}
    return result


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print(json.dumps(work(json.loads(sys.stdin.readline()))), flush=True)
