"""Coordinators: what stands around the ledgers and decides when they open, hear and close."""

from lightning_blocktrain.coordinator.network import (
    PARTICIPATION,
    NetworkModel,
    WorkerLink,
    preset_network,
    update_bytes_of,
)
from lightning_blocktrain.coordinator.simulation import RoundOutcome, SimulatedCoordinator
from lightning_blocktrain.coordinator.timeline import WorkerRound

__all__ = [
    "PARTICIPATION",
    "NetworkModel",
    "RoundOutcome",
    "SimulatedCoordinator",
    "WorkerLink",
    "WorkerRound",
    "preset_network",
    "update_bytes_of",
]
