import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import StrategyRegistry

from lightning_blocktrain import BlockTrainStrategy, BoundedHorizonStrategy
from lightning_blocktrain.registration import ALIASES, register_strategies


@pytest.fixture(scope="module")
def other_lightning() -> Iterator[Any]:
    """The other class tree, with our aliases in its registry for the time of the module's tests."""
    import pytorch_lightning

    register_strategies()
    yield pytorch_lightning
    for alias in ALIASES:
        pytorch_lightning.strategies.StrategyRegistry.remove(alias)


def resources() -> set[object]:
    """Return the threads, child processes and sockets of this process."""
    process = psutil.Process()
    return {*threading.enumerate(), *process.children(), *process.net_connections(kind="all")}


def test_alias_after_import_is_registered_with_a_description() -> None:
    assert StrategyRegistry["blocktrain"]["strategy"] is BlockTrainStrategy
    assert StrategyRegistry["blocktrain"]["description"] == (BlockTrainStrategy.__doc__ or "").splitlines()[0]


def test_register_strategies_second_call_changes_nothing() -> None:
    before = {alias: dict(data) for alias, data in StrategyRegistry.items()}
    register_strategies()
    assert {alias: dict(data) for alias, data in StrategyRegistry.items()} == before


def test_aliases_are_names_that_lightning_does_not_rewrite() -> None:
    assert all(alias == alias.lower() and "ddp" not in alias and "deepspeed" not in alias for alias in ALIASES)


@pytest.mark.parametrize("alias", ALIASES)
def test_strategy_from_its_alias_opens_nothing(alias: str) -> None:
    random_state, before = torch.get_rng_state(), resources()
    strategy = StrategyRegistry.get(alias)
    kind, options = ALIASES[alias]
    assert type(strategy) is kind
    assert all(getattr(strategy.settings, name) == value for name, value in options.items())
    assert resources() - before == set()
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("alias", ALIASES)
def test_trainer_with_an_alias_gets_its_strategy(make_trainer: Any, alias: str) -> None:
    before = resources()
    strategy = make_trainer(strategy=alias).strategy
    assert type(strategy) is ALIASES[alias][0]
    assert all(getattr(strategy.settings, name) == value for name, value in ALIASES[alias][1].items())
    assert resources() - before == set()


def test_every_alias_of_a_pipeline_is_another_one() -> None:
    pipelines = [options for kind, options in ALIASES.values() if kind is BoundedHorizonStrategy]
    assert len({tuple(sorted(options.items())) for options in pipelines}) == len(pipelines) == 6
    assert all(options.keys() == {"method", "mode"} for options in pipelines)


@pytest.mark.parametrize(("method", "mode"), [("rgc", "async"), ("broadcast", "async"), ("live", "serial")])
def test_strategy_without_a_mode_takes_the_method_s_own(method: Any, mode: str) -> None:
    assert BoundedHorizonStrategy(method).settings.mode == mode
    assert BoundedHorizonStrategy().settings.method == "rgc"


@pytest.mark.parametrize("alias", ALIASES)
def test_trainer_of_the_other_tree_names_the_right_import(other_lightning: Any, alias: str) -> None:
    words = (
        f"strategy='{alias}' works with the package 'lightning'; got a Trainer of 'pytorch_lightning'; import lightn"
    )
    with pytest.raises(MisconfigurationException, match=words):
        other_lightning.Trainer(strategy=alias, accelerator="cpu", logger=False)


def test_register_strategies_beside_the_other_tree_is_harmless_twice(other_lightning: Any) -> None:
    refusal = other_lightning.strategies.StrategyRegistry["blocktrain"]["strategy"]
    register_strategies()
    assert other_lightning.strategies.StrategyRegistry["blocktrain"]["strategy"] is refusal
    assert issubclass(refusal, other_lightning.strategies.Strategy)
    assert StrategyRegistry["blocktrain"]["strategy"] is BlockTrainStrategy
    assert not issubclass(refusal, L.pytorch.strategies.Strategy)


@pytest.mark.slow  # a fresh interpreter imports all of lightning
def test_import_registers_and_starts_nothing_even_without_docstrings() -> None:
    code = """
import threading, lightning
import psutil
from lightning.pytorch.strategies import StrategyRegistry
known, threads = "blocktrain" in StrategyRegistry, threading.active_count()
import lightning_blocktrain
print(known, "blocktrain" in StrategyRegistry, threading.active_count() - threads, len(psutil.Process().children()))
"""
    command = [sys.executable, "-OO", "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.split() == ["False", "True", "0", "0"]
