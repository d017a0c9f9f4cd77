import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import quality
from lightning_blocktrain.demo.recipe import BUDGETS


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.bin"
    path.write_bytes(bytes(range(32, 127)) * 200)
    return path


def test_quality_run_small_writes_one_row_per_run_and_skips_what_is_there(tmp_path, text, capsys):
    out = tmp_path / "rows.jsonl"
    options = [
        "--size",
        "tiny",
        "--json",
        str(out),
        "--train",
        str(text),
        "--val",
        str(text) + "2",
        "--test",
        str(text) + "3",
    ]
    for suffix in "23":
        text.with_name(text.name + suffix).write_bytes(text.read_bytes()[int(suffix) :])
    arms = ["causal_full", "diffusion_blocks"]
    rows = quality.main([*options, "--seeds", "0", "--arms", *arms])
    assert [row["arm"] for row in rows] == arms
    first = out.read_text()
    rows = quality.main([*options, "--seeds", "0", "1", "--arms", "causal_full"])
    assert out.read_text().startswith(first)
    assert sorted((row["arm"], row["seed"]) for row in rows) == [
        ("causal_full", 0),
        ("causal_full", 1),
        ("diffusion_blocks", 0),
    ]
    text.write_bytes(text.read_bytes()[::-1])
    rows = quality.main([*options, "--seeds", "0", "--arms", "causal_full"])
    assert len(rows) == 1 and len(out.read_text().splitlines()) == 4  # another corpus: nothing is there yet
    sweep = json.loads(first.splitlines()[1])["test"]["sweep"]
    assert sweep["composition_gain"] == pytest.approx(sweep["prior_ce_k"] - sweep["sweep_ce_k"])
    assert "gap to causal L" in capsys.readouterr().out


def row(arm: str, seed: int, ce: float) -> dict:
    scores = {"ce": ce, "num_bytes": 8}
    return {"arm": arm, "title": arm, "seed": seed, "tokens_per_block": 8, "val": scores, "test": scores}


def test_causal_model_is_scored_at_its_last_exit():
    recipe = BUDGETS["tiny"]
    module = quality.arms(recipe)["byte_transformer"].make_module()
    windows = torch.randint(256, (6, recipe.window_bytes + 1))
    batches = [(part[:, :-1], part[:, 1:]) for part in (windows[:3], windows[3:])]
    scores = quality.evaluate(module, SimpleNamespace(dataset=batches), 6, 3, seed=0)
    expected = torch.cat([module.evaluation_nats(batch, 0) for batch in batches]).double().mean()
    assert scores == {"ce": pytest.approx(float(expected), rel=1e-6), "num_bytes": 6 * recipe.window_bytes}


def test_gap_to_the_control_is_paired_by_seed_with_its_t_interval():
    """Gaps .1 and .3: mean .2, half width t(.975, 1) * .2 / 2 = 1.271."""
    group = [row("arm", 0, 1.1), row("arm", 1, 2.3), row("arm", 2, 9.0)]
    assert quality.cells(group, {0: 1.0, 1: 2.0})[7] == "+0.200 +- 1.271 (+12.5%)"
    assert quality.cells(group[:1], {0: 1.0})[3:8] == ["1.100"] * 4 + ["+0.100 (+10.0%)"]


def test_unknown_arm_is_refused_before_anything_is_trained(tmp_path, capsys):
    with pytest.raises(SystemExit):
        quality.main(["--json", str(tmp_path / "rows"), "--arms", "causal_half"])
    assert "causal_half" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in quality.VARIANTS if name != "reference"])
def test_every_variant_changes_one_choice_of_the_reference(name):
    known = quality.arms(BUDGETS["tiny"])
    base, changed = (dict(known[arm].make_module().hparams) for arm in ("reference", name))
    choices = {"sigma" if key.startswith("sigma") else key for key in base if base[key] != changed[key]}
    assert len(choices) == 1


def test_the_default_model_is_an_outcome_of_the_screening():
    known = quality.arms(BUDGETS["tiny"])
    default = dict(known["diffusion_blocks"].make_module().hparams)
    assert default in [dict(known[name].make_module().hparams) for name in quality.VARIANTS]
