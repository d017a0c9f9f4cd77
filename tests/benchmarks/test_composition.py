import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import composition
from benchmarks.composition import ARMS, SIZES, flops_of, make_module, recipe_of, stored
from benchmarks.composition_flops import training_flops
from benchmarks.composition_table import final_ce, gap, paired, share_of_way, tables, verdicts
from lightning_blocktrain.demo.recipe import Recipe
from lightning_blocktrain.partition import as_layout, partition

TINY = SIZES["tiny"]
FEW = ["causal_full", "causal_block", "features", "denoise_features"]


def row(arm: str, seed: int, ce: float, **more: Any) -> dict[str, Any]:
    split = {"exits": [ce + 0.5, ce], "num_bytes": 8}
    costs = {"training_flops": 10, "tokens_per_block": 400}
    return {"arm": arm, "title": arm, "seed": seed, "val": split, "test": split, **costs, **more}


def counted_flops(name: str, recipe: Recipe, block_idx: int | None) -> int:
    """Return what torch counts in one training step of an arm, optimizer left out."""
    module = make_module(ARMS[name], recipe)
    text = torch.randint(256, (recipe.batch_size, recipe.window_bytes + 1))
    batch = text[:, :-1], text[:, 1:]
    # The fused kernel is not counted on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        if block_idx is None:
            module.training_step(batch, 0).backward()
        else:
            cut = partition(module, as_layout(module.configure_blocks()))
            for frozen in cut.read_by(block_idx):
                for parameter in cut.block_names[frozen]:
                    module.get_parameter(parameter).requires_grad_(False)
            module.block_training_step(batch, 0, block_idx).backward()
    return counter.get_total_flops()


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize(
    "name",
    [
        *("causal_full", "causal_block", "features", "residual", "denoise", "denoise_features"),
        *("ahead", "ahead 2", "ahead residual", "ahead shared"),
    ],
)
def test_flops_by_formula_are_near_those_that_torch_counts(name: str) -> None:
    recipe = replace(TINY, num_layers=4, num_blocks=4)
    blocks = [None] if ARMS[name].strategy is None else range(recipe.num_blocks)
    counted = sum(counted_flops(name, recipe, block_idx) for block_idx in blocks) * recipe.steps
    assert flops_of(name, recipe) == pytest.approx(counted, rel=0.1)


def test_features_cost_the_prefix_of_every_block() -> None:
    recipe = replace(TINY, num_layers=8, num_blocks=4)
    one_forward = (training_flops(recipe, "causal_full") - training_flops(recipe, "causal_block")) // 3 // 6
    readouts = 3 * 3 * 2 * recipe.width * 256 * recipe.tokens_per_block
    more = training_flops(recipe, "features") - training_flops(recipe, "causal_full")
    assert more == 12 * one_forward + readouts  # 2 + 4 + 6 frozen layers, and three readouts more


def test_equal_flops_take_fewer_steps_in_whole_rounds() -> None:
    recipe = SIZES["deep"]
    equal = recipe_of("features@flops", recipe)
    assert equal.steps % recipe.sync_every == 0
    assert training_flops(equal, "features") == pytest.approx(training_flops(recipe, "causal_full"), rel=0.02)
    assert recipe_of("causal_full", recipe) == recipe


def test_share_of_the_way_is_the_ratio_of_the_mean_gains() -> None:
    shallow, deep = {0: 2.0, 1: 2.1, 2: 2.2}, {0: 1.8, 1: 1.9, 2: 1.9, 7: 0.0}
    share, low, high = share_of_way(shallow, {0: 1.9, 1: 1.95, 2: 2.0, 8: 1.0}, deep)
    assert share == pytest.approx((0.1 + 0.15 + 0.2) / (0.2 + 0.2 + 0.3))
    assert 0.4 < low <= share <= high < 0.8
    assert share_of_way(shallow, {}, deep)[0] != share_of_way(shallow, {}, deep)[0]  # nan


def test_gaps_are_paired_by_seed() -> None:
    differences = paired({0: 2.0, 1: 2.2, 5: 9.0}, {0: 1.9, 1: 2.0, 6: 0.0})
    assert differences == pytest.approx([0.1, 0.2])
    assert gap(differences, {0: 1.9, 1: 2.0}).startswith("+0.150 +- 0.635 (+7.7%)")
    assert gap([], {}) == "-"


def test_verdicts_judge_every_target_by_its_number() -> None:
    seeds = range(3)
    rows = [row("causal_full", s, 1.80) for s in seeds] + [row("causal_block", s, 1.90 + 0.001 * s) for s in seeds]
    rows += [row("features", s, 1.815) for s in seeds] + [row("residual", s, 1.83) for s in seeds]
    rows += [row("ahead 2 replicas", s, 1.9) for s in seeds] + [row("ahead mild", s, 1.91) for s in seeds]
    rows += [row("ahead wan", s, 2.05, tokens_per_block=100) for s in seeds]
    said = "\n".join(verdicts(rows))
    assert "This size counts: causal L is 0.101 nats better" in said
    assert "features: +0.015 nats to causal L (at most 0.02 asked), 0.85 of the way (0.6 asked): met." in said
    assert "residual: +0.030 nats to causal L (at most 0.02 asked), 0.70 of the way (0.6 asked): missed." in said
    words = "nats to lockstep at equal rounds (at most"
    assert f"mild: +0.010 {words} 0.02), with 100% of its tokens accepted: met." in said
    assert f"wan: +0.150 {words} 0.1), with 25% of its tokens accepted: missed." in said
    assert "No target can be judged" in "\n".join(verdicts(rows[:3]))
    shallow = [row("causal_full", 0, 1.80), row("causal_block", 0, 1.81)]
    assert "This size does not count" in "\n".join(verdicts(shallow))


def test_runs_are_resumed_and_the_tables_are_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ["--quick", "--json", str(path), "--arms", *FEW]
    rows = composition.main(arguments)
    assert [r["arm"] for r in rows] == FEW
    assert [len(r["test"]["exits"]) for r in rows] == [2, 1, 2, 2]
    assert all(1 < final_ce(r) < 6 for r in rows)
    tokens = TINY.steps * TINY.batch_size * TINY.window_bytes
    assert [r["tokens_per_block"] for r in rows] == [tokens] * 4
    assert [r["total_tokens"] for r in rows] == [tokens, tokens, 2 * tokens, 2 * tokens]
    assert "z_noise_ce" in rows[-1]["test"]["sweep"]
    monkeypatch.setattr(composition, "run", None)  # nothing is left to run
    assert composition.main(arguments) == rows == [json.loads(line) for line in path.read_text().splitlines()]
    [main_table, sweep_table, said] = tables(rows, TINY, markdown=True)
    assert main_table.count("\n") == 1 + len(FEW)
    assert sweep_table.count("\n") == 2
    assert "denoise_features: replacing z by noise costs" in said
    assert stored(path, replace(TINY, lr=1.0), rows[0]["corpus_sha256"]) == []


def test_an_unknown_arm_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        composition.main(["--arms", "feature"])
    assert "unknown arm 'feature': choose from 'causal_full'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_can_be_built(name: str) -> None:
    recipe: Recipe = recipe_of(name, TINY)
    module = make_module(ARMS[name], recipe)
    assert module.num_blocks == (1 if name == "causal_block" else 2)
