"""What the runs say together: the report, its sentences and its tables.

Owns the schema that ``lightning_blocktrain.demo`` documents. Nothing here is judged by hand: every sentence is
computed from the numbers beside it.
"""

import importlib.metadata
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import lightning
import torch
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lightning_blocktrain.callbacks.sweep_eval import SweepReport
from lightning_blocktrain.data import CorpusInfo
from lightning_blocktrain.demo.arms import NUM_DRAWS, ArmResult
from lightning_blocktrain.demo.recipe import Recipe
from lightning_blocktrain.metrics import bits_per_token

SCHEMA_VERSION = 1
DIFFUSION = "diffusion_blocks"
MIXTURE = f"{DIFFUSION}_k{NUM_DRAWS}"
METHODS = (DIFFUSION, MIXTURE, "byte_transformer")
CONTROLS = ("causal_full", "causal_block")
LEVEL_BITS = 0.005
"""Gaps smaller than this are called level: they round to 0.00 or 0.01."""
LEVEL_NATS = 0.01
"""Composition gains smaller than this are called nothing."""


@dataclass(frozen=True)
class Setting:
    """The circumstances of a report.

    Args:
        recipe: Of all runs.
        corpus: What they were trained on.
        seed: Of all runs.
        budget: What the user asked for.
        wall_s: Seconds from the first run to the report.
    """

    recipe: Recipe
    corpus: CorpusInfo
    seed: int
    budget: str
    wall_s: float


def build_report(results: Sequence[ArmResult], setting: Setting, samples: Mapping[str, str]) -> dict[str, Any]:
    """Return the report of the four arms, ready for JSON; numbers that do not exist are None.

    Args:
        results: One per arm, DiffusionBlocks and both controls among them.
        setting: Circumstances.
        samples: Generated text by model.
    """
    sweep = next(result.sweep for result in results if result.sweep is not None)
    bits = {result.arm.name: bits_per_token(result.nats_per_byte, 1) for result in results}
    bits[MIXTURE] = sweep.bits_per_byte_k
    gaps = gaps_to_controls(bits)
    report = {
        "schema_version": SCHEMA_VERSION,
        "budget": setting.budget,
        "seeds": [setting.seed],
        "bits_per_byte": bits,
        "gaps": gaps,
        **sweep_entries(sweep),
        f"sweep_ce_k{NUM_DRAWS}": sweep.sweep_ce_k,
        **cost_entries(results),
        "models": {result.arm.name: model_entry(result) for result in results},
        "participation": {r.arm.name: r.rounds["participation"] for r in results if r.rounds},
        "network": {"name": setting.recipe.network, "simulated": True},
        "test": {"num_windows": sweep.num_bytes // setting.recipe.window_bytes, "num_bytes": sweep.num_bytes},
        "corpus": asdict(setting.corpus),
        "recipe": asdict(setting.recipe),
        "threads": setting.recipe.num_threads or torch.get_num_threads(),
        "versions": versions(),
        "wall_s": setting.wall_s,
        "samples": dict(samples),
        "summary": summary(bits, gaps, sweep, setting.recipe),
    }
    finite: dict[str, Any] = _finite(report)
    return finite


def sweep_entries(sweep: SweepReport) -> dict[str, Any]:
    """Return the sweep quantities by their names in the report, nats per byte."""
    return {
        "local_ce": list(sweep.local_ce),
        "sweep_ce_k1": sweep.sweep_ce_k1,
        "sweep_ce_k": sweep.sweep_ce_k,
        "prior_ce_k1": sweep.prior_ce_k1,
        "prior_ce": sweep.prior_ce_k,
        "composition_gain": sweep.composition_gain,
        "leak_accuracy": sweep.leak_accuracy,
        "span_ce": sweep.span_ce,
        "ablations": {
            "z_noise_ce": sweep.z_noise_ce,
            "z_zero_ce": sweep.z_zero_ce,
            "no_z_ce": sweep.no_z_ce,
            "context_scrambled_ce": sweep.context_scrambled_ce,
        },
    }


def cost_entries(results: Sequence[ArmResult]) -> dict[str, Any]:
    """Return speed and memory by model."""
    return {
        "tokens_per_s": {r.arm.name: r.throughput["accepted_tokens_per_s"] for r in results},
        "peak_pss_mib": {r.arm.name: r.peak_mib if r.memory_measure == "pss" else None for r in results},
        "peak_memory": {r.arm.name: {"measure": r.memory_measure, "mib": r.peak_mib} for r in results},
        "optimizer_bytes": {
            r.arm.name: {"per_worker": r.worker_optimizer_bytes, "whole_model": r.model_optimizer_bytes}
            for r in results
        },
    }


def model_entry(result: ArmResult) -> dict[str, Any]:
    """Return what was trained and how much, for one model."""
    return {
        "title": result.arm.title,
        "num_parameters": result.num_parameters,
        "steps": result.steps,
        "tokens_per_block": result.tokens_per_block,
        "total_tokens": result.total_tokens,
        "nats_per_byte": result.nats_per_byte,
        "worker_tokens_per_s": result.throughput["worker_tokens_per_s"],
        "train_s": result.throughput["train_s"],
        "train_wall_s": result.train_wall_s,
        "rounds": dict(result.rounds),
    }


def versions() -> dict[str, str]:
    """Return the versions that decide the numbers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "lightning_blocktrain": importlib.metadata.version("lightning-blocktrain"),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def gaps_to_controls(bits: Mapping[str, float]) -> dict[str, dict[str, dict[str, float]]]:
    """Return each method's gap to each control: ``bits_per_byte`` (above 0: the method is worse), ``relative_frac``."""
    return {
        method: {
            control: {
                "bits_per_byte": bits[method] - bits[control],
                "relative_frac": bits[method] / bits[control] - 1,
            }
            for control in CONTROLS
        }
        for method in METHODS
        if method in bits
    }


def summary(
    bits: Mapping[str, float],
    gaps: Mapping[str, Mapping[str, Mapping[str, float]]],
    sweep: SweepReport,
    recipe: Recipe,
) -> list[str]:
    """Return what the numbers say, one sentence each."""
    depth = {"causal_full": recipe.num_layers, "causal_block": recipe.layers_per_block}
    subjects = {
        DIFFUSION: "DiffusionBlocks (one sweep)",
        MIXTURE: f"DiffusionBlocks ({NUM_DRAWS} sweeps)",
        "byte_transformer": "ByteTransformer, block-trained,",
    }
    sentences = []
    for method, by_control in gaps.items():
        parts = [f"{in_words(gap)} causal L={depth[control]}" for control, gap in by_control.items()]
        sentences.append(f"{subjects[method]} at {bits[method]:.3f} bits per byte is {' and '.join(parts)}.")
    sentences.append(gain_in_words(sweep.composition_gain))
    sentences.append(
        f"One seed and {sweep.num_bytes:,} test bytes: no confidence interval, so small differences may be chance."
    )
    return sentences


def in_words(gap: Mapping[str, float]) -> str:
    """Return a gap as ``0.42 bits per byte (14 %) behind``, ``... ahead of`` or ``level with``."""
    if abs(gap["bits_per_byte"]) < LEVEL_BITS:
        return "level with"
    place = "behind" if gap["bits_per_byte"] > 0 else "ahead of"
    return f"{abs(gap['bits_per_byte']):.2f} bits per byte ({abs(gap['relative_frac']):.1%}) {place}"


def gain_in_words(gain: float) -> str:
    """Return what the composition gain says about the blocks after the first."""
    if abs(gain) < LEVEL_NATS:
        verdict = "the blocks after the first add nothing"
    elif gain < 0:
        verdict = "the blocks after the first make it worse"
    else:
        verdict = "the blocks after the first help"
    return f"Composition gain {gain:+.3f} nats per byte: {verdict}."


def tables(report: Mapping[str, Any]) -> Group:
    """Return the report as tables and sentences that fit 80 columns."""
    corpus = report["corpus"]
    threads = f"{report['threads']} thread{'s' * (report['threads'] > 1)}"
    heading = (
        f"{corpus['name']} (sha256 {corpus['sha256'][:12]}), tested on {report['test']['num_bytes']:,} bytes. Workers "
        f"and their network ({report['network']['name']}) are simulated: they take turns on {threads}."
    )
    sentences = Text("\n".join(report["summary"]))
    blank = Text("")
    parts = (Text(heading), blank, model_table(report), blank, sweep_table(report), blank, sentences)
    return Group(*parts)


def model_table(report: Mapping[str, Any]) -> Table:
    """Return one column per model: quality, tokens, speed, memory."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for model in report["models"].values():
        table.add_column(Text(model["title"].replace(", ", "\n")), justify="right")
    for label, cells in model_rows(report).items():
        table.add_row(label, *cells)
    return table


def model_rows(report: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the cells of the models' table by row, one per model."""
    names, models = list(report["models"]), report["models"].values()
    bits, memory, optimizer = report["bits_per_byte"], report["peak_memory"], report["optimizer_bytes"]
    measure = memory[names[0]]["measure"].upper()
    return {
        "bits per byte": [_number(bits[name], ".3f") for name in names],
        f"with {NUM_DRAWS} sweeps": [_number(bits.get(f"{name}_k{NUM_DRAWS}"), ".3f") for name in names],
        "tokens per block": [f"{model['tokens_per_block']:,}" for model in models],
        "tokens, total": [f"{model['total_tokens']:,}" for model in models],
        "training, s": [_number(model["train_s"], ",.1f") for model in models],
        "tokens/s, total": [_number(report["tokens_per_s"][name], ",.0f") for name in names],
        f"peak {measure}, MiB": [_number(memory[name]["mib"], ",.0f") for name in names],
        "optimizer, MiB": [f"{optimizer[name]['whole_model'] / 2**20:.2f}" for name in names],
        " of one worker": [f"{optimizer[name]['per_worker'] / 2**20:.2f}" for name in names],
    }


def sweep_table(report: Mapping[str, Any], num_draws: int = NUM_DRAWS) -> Table:
    """Return the quantities of a sweep evaluation, nats per byte, each with what it means.

    Args:
        report: The entries that ``sweep_entries`` makes.
        num_draws: K behind its mixtures.
    """
    mixture, ablations = f"K={num_draws}", report["ablations"]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("DiffusionBlocks", no_wrap=True)
    table.add_column("nats per byte", justify="right")
    table.add_column("meaning")
    local = " / ".join(f"{value:.3f}" for value in report["local_ce"])
    table.add_row("local_ce by block", local, "its input holds the target")
    for name, value, meaning in (
        ("sweep_ce, K=1", report["sweep_ce_k1"], "comparable with a causal model"),
        (f"sweep_ce, {mixture}", report["sweep_ce_k"], "mean probability of the draws"),
        ("prior_ce, K=1", report["prior_ce_k1"], "block 0 alone; z carries nothing"),
        (f"prior_ce, {mixture}", report["prior_ce"], "mean probability of the draws"),
        ("composition gain", report["composition_gain"], f"prior_ce - sweep_ce, {mixture}"),
        ("z made noise", ablations["z_noise_ce"], f"after block 0, {mixture}"),
        ("z made zero", ablations["z_zero_ce"], f"after block 0, {mixture}"),
        ("without z", ablations["no_z_ce"], "no block is shown z"),
        ("context scrambled", ablations["context_scrambled_ce"], f"inputs permuted, {mixture}"),
        ("span_ce", report["span_ce"], "second half unknown, K=1"),
        ("leak accuracy", report["leak_accuracy"], "a ratio; chance is 0.004"),
    ):
        table.add_row(name, _number(value, ".3f"), meaning)
    return table


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print tables, sentences and samples."""
    console.print(tables(report))
    for name, text in report["samples"].items():
        console.print(Text(f"\nSample of {name}:\n{text}"))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _finite(value: Any) -> Any:
    """Return ``value`` with every nan or infinity replaced by None: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
