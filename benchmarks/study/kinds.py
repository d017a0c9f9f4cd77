"""What a run of a study is: from its options and a corpus to its measures. One function a kind, in ``KINDS``.

A run's result is ``{"measures": {name: number}, "curve": [[tokens, seconds, value]], "corpus_sha256": text}``, with
whatever else the report shows of that kind. Nats per byte are ``ce``, bits ``bits``; of test, the whole model.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from benchmarks.composition import Arm, train
from benchmarks.composition_flops import training_flops
from benchmarks.cpu_pipeline import Runner
from benchmarks.cpu_pipeline import Shape as SpeedShape
from benchmarks.pipeline_corpora import Corpus
from benchmarks.pipeline_training import Shape, train_with
from benchmarks.study.corpora import sha256_of
from benchmarks.study.workers import train_on_hosts
from lightning_blocktrain import ByteDataModule, RoundMonitor
from lightning_blocktrain.demo.curves import CURVE_KEY
from lightning_blocktrain.demo.recipe import Recipe
from lightning_blocktrain.metrics import bits_per_token

Result = dict[str, Any]


def blocks(options: dict[str, Any], corpus: Corpus, seed: int) -> Result:
    """Train the blocks of a model apart from one another, or a control end to end; see ``benchmarks.composition``.

    Options: ``recipe`` (of ``Recipe``), ``model`` (``objective`` decides the class), ``strategy`` (of
    ``BlockTrainStrategy``; none: end to end), ``is_shallow``, ``curve`` (``points`` and the ``batches`` of each: held
    out, along the way; the training is the same without).
    """
    arm, recipe = blocks_of(options)
    asked = options.get("curve", {"points": 1, "batches": 0})
    recipe = replace(recipe, validate_every=recipe.steps // asked["points"])
    data = ByteDataModule(window_bytes=recipe.window_bytes, batch_size=recipe.batch_size, **corpus.options)  # type: ignore[arg-type]
    data.setup("fit")
    rounds, watch = RoundMonitor(), Watch(recipe)
    callbacks = [watch] if arm.strategy is None else [watch, rounds]
    found = train(arm, recipe, data, seed, callbacks, asked["batches"])
    result = blocks_result(arm, recipe, found)
    if watch.curve:
        result["curve"] = watch.curve
    if arm.strategy is not None:
        totals = rounds.summary()
        names = ("participation", "sent_bytes", "prefix_bytes", "accepted_tokens")
        result["measures"] |= {name: float(totals[name]) for name in names}
    return result


class Watch(L.Callback):
    """Keeps what every validation finds, and stands the clock still meanwhile.

    Args:
        recipe: Of the run.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.curve: list[list[float]] = []
        """Tokens, CPU seconds of training, bits per byte."""
        self._step_tokens = recipe.tokens_per_block // (recipe.steps // recipe.replicas)
        self._began_s = time.process_time()

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._began_s = time.process_time()

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._seconds = time.process_time() - self._began_s

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the point and let the clock go on."""
        bits = float(trainer.callback_metrics[CURVE_KEY])
        self.curve.append([trainer.global_step * self._step_tokens, self._seconds, bits])
        self._began_s = time.process_time() - self._seconds


def blocks_of(options: dict[str, Any]) -> tuple[Arm, Recipe]:
    """Return the arm and the recipe that options of ``blocks`` describe."""
    arm = Arm("", options.get("model", {}), options.get("strategy"), options.get("is_shallow", False))
    recipe = Recipe(**options["recipe"])
    return arm, replace(recipe, replicas=(arm.strategy or {}).get("replicas", recipe.replicas))


def blocks_result(arm: Arm, recipe: Recipe, found: dict[str, Any]) -> Result:
    """Return the result of a training of ``benchmarks.composition``."""
    test = found["test"]
    ce = float(test["exits"][-1])
    measures = {"ce": ce, "bits": bits_per_token(ce, 1), "tokens_per_block": float(found["tokens_per_block"])}
    measures |= {f"exit {idx}": value for idx, value in enumerate(test["exits"])}
    measures |= {key: value for key, value in test.get("sweep", {}).items() if isinstance(value, float)}
    if arm.model.get("layer", "attention") == "attention":
        name = "causal_block" if arm.is_shallow else arm.model.get("objective", "causal_full")
        shared = arm.model.get("exits") == "shared"
        measures["flops"] = float(training_flops(recipe, name, arm.model.get("lookahead", 0), shared))
    measures["seconds"] = float(found["train_s"])
    curve = [[recipe.tokens_per_block, found["train_s"], measures["bits"]]]
    return {"measures": measures, "curve": curve, "corpus_sha256": found["corpus_sha256"], "exits": test["exits"]}


def workers(options: dict[str, Any], corpus: Corpus, seed: int) -> Result:
    """Train blocks with a process per worker, on emulated hosts, and count what goes over their lines.

    Options: those of ``blocks``, and ``latencies_ms``, one way, per host; none: workers are simulated as in ``blocks``.
    """
    if "latencies_ms" not in options:
        return blocks(options, corpus, seed)
    arm, recipe = blocks_of(options)
    began_s = time.perf_counter()
    found = train_on_hosts(arm, recipe, corpus.options, seed, options["latencies_ms"])
    measures = {"ce": found["exits"][-1], "bits": bits_per_token(found["exits"][-1], 1)}
    measures |= {name: float(found[name]) for name in ("sent_bytes", "prefix_bytes", "up_bytes", "down_bytes")}
    measures["seconds"] = time.perf_counter() - began_s
    return {"measures": measures, "curve": [], "corpus_sha256": found["corpus_sha256"], "exits": found["exits"]}


def pipeline(options: dict[str, Any], corpus: Corpus, seed: int) -> Result:
    """Train the stages of a deep model from local losses, or end to end; see ``benchmarks.pipeline_training``.

    Options: ``shape`` (of ``Shape``), ``strategy`` (of ``BoundedHorizonStrategy``; none: end to end), ``exits``.
    """
    shape = Shape(**options["shape"])
    found = train_with(corpus, options.get("strategy"), options.get("exits", "shared"), seed, shape, with_test=True)
    return pipeline_result(shape, found, found["corpus_sha256"])


def pipeline_result(shape: Shape, found: dict[str, Any], corpus_sha256: str) -> Result:
    """Return the result of a training of ``benchmarks.pipeline_training``."""
    seconds = found["cpu_s"]
    curve = [[tokens, seconds * tokens / shape.tokens, bits] for tokens, bits in found["curve"]]
    measures = {"bits": found["test"], "valid_bits": found["valid"], "seconds": seconds}
    return {"measures": measures, "curve": curve, "corpus_sha256": corpus_sha256}


def speed(options: dict[str, Any], corpus: Corpus, seed: int) -> Result:
    """Time some steps of a deep model, then sample its memory; see ``benchmarks.cpu_pipeline``.

    Options: ``shape`` (of ``benchmarks.cpu_pipeline.Shape``), ``strategy``, ``threads`` of the process, and
    ``processes`` (that run side by side, summed: what the machine gives when nothing waits).
    """
    shape = SpeedShape(**options["shape"], corpus=corpus.options, seed=seed)
    fields = {key: value for key, value in vars(shape).items() if key != "num_stages"}
    strategy, number = options.get("strategy"), int(options.get("processes", 1))
    if strategy is not None:
        strategy = {"num_stages": shape.num_stages, **strategy}
    arms = [
        {"name": f"arm {idx}", "strategy": strategy, "threads": options["threads"], **fields} for idx in range(number)
    ]
    with Runner(options.get("wait_policy", "")) as runner:
        records = runner.run(arms)
    own = sum(record["cpu_frac"] for record in records)
    measures = {
        "tokens_per_s": sum(record["tokens_per_s"] for record in records),
        "foreign_cpu_frac": max(0.0, max(record["busy_frac"] for record in records) - own),
    }
    if len(records) == 1:
        measures["step_s"] = records[0]["step_s"]
        if work_s := records[0]["work_s"]:
            measures |= {"work_s": sum(work_s), "largest_work_s": max(work_s)}
            measures["closure_error"] = records[0]["closure_error"]
    memory = [record["peak_pss_mib"] for record in records if record["peak_pss_mib"] is not None]
    if memory:
        measures["peak_pss_mib"] = sum(memory)
    return {"measures": measures, "curve": [], "corpus_sha256": sha256_of(corpus)}


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Args:
        work: From options, corpus and seed to the result.
        is_timed: Whether nothing else may run beside it.
    """

    work: Callable[[dict[str, Any], Corpus, int], Result]
    is_timed: bool = False


KINDS = {
    "blocks": Kind(blocks),
    "workers": Kind(workers),
    "pipeline": Kind(pipeline),
    "speed": Kind(speed, is_timed=True),
}


def run(kind: str, options: dict[str, Any], corpus: Corpus, seed: int) -> Result:
    """Do one run on one thread, seeded."""
    torch.set_num_threads(1)
    L.seed_everything(seed, verbose=False)
    return KINDS[kind].work(options, corpus, seed)
