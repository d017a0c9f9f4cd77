"""Registers the strategy aliases with Lightning.

Lightning has no entry point for strategies, so the aliases exist once this package is imported.
"""

import sys
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_blocktrain.errors import explain
from lightning_blocktrain.strategies import BlockTrainStrategy, BoundedHorizonStrategy

ALIASES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "blocktrain": (BlockTrainStrategy, {}),
    "rgc": (BoundedHorizonStrategy, {"method": "rgc", "mode": "async"}),
    "rgc_serial": (BoundedHorizonStrategy, {"method": "rgc", "mode": "serial"}),
    "broadcast": (BoundedHorizonStrategy, {"method": "broadcast", "mode": "async"}),
    "broadcast_serial": (BoundedHorizonStrategy, {"method": "broadcast", "mode": "serial"}),
    "live": (BoundedHorizonStrategy, {"method": "live", "mode": "serial"}),
    "bp_groups": (BoundedHorizonStrategy, {"method": "bp_groups", "mode": "serial"}),
}
"""Per alias, the strategy and the options that make it."""


def register_strategies() -> None:
    """Register every alias, once; a second call changes nothing.

    ``pytorch_lightning`` is another class tree: where it is already imported, its registry gets the same aliases, and
    using one there is an error that names the right import.
    """
    for alias, (strategy, options) in ALIASES.items():
        if alias not in StrategyRegistry:
            description = (strategy.__doc__ or alias).splitlines()[0]
            StrategyRegistry.register(alias, strategy, description=description, **options)
    if "pytorch_lightning" in sys.modules:
        _register_refusals(sys.modules["pytorch_lightning"])


def _register_refusals(other: Any) -> None:
    for alias in ALIASES:
        if alias not in other.strategies.StrategyRegistry:
            other.strategies.StrategyRegistry.register(alias, _refuse(alias), description="wrong import")


def _refuse(alias: str) -> type:
    class WrongLightning(sys.modules["pytorch_lightning"].strategies.SingleDeviceStrategy):  # type: ignore[misc]
        """Stands in for the strategy in the other class tree, and says so."""

        def __init__(self) -> None:
            rule = f"strategy={alias!r} works with the package 'lightning'"
            raise MisconfigurationException(explain(rule, "a Trainer of 'pytorch_lightning'", "import lightning as L"))

    return WrongLightning
