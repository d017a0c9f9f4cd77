"""What a blocktrain checkpoint holds beside Lightning's own entries: every worker's state, by block and name.

A checkpoint's ``state_dict`` and ``optimizer_states`` are plain Lightning: the merged masters and one optimizer state
per parameter. The extra entry ``blocktrain`` holds tensors, dicts, lists, str, int, float and None only, so that it
loads with ``weights_only=True`` where this package is not installed.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_blocktrain.coordinator.standing import standing
from lightning_blocktrain.errors import CheckpointMismatchError, explain
from lightning_blocktrain.rounds import block_entry
from lightning_blocktrain.rounds.feedback import ErrorFeedback
from lightning_blocktrain.strategies.workers import SimulatedWorkers, Worker

KEY = "blocktrain"
MEMBER_KEY = "blocktrain_member"
"""The same where the workers are processes: rank 0's worker, the position in the data of all, and, where a checkpoint
callback asked for it, the workers that rank 0 has started and what their coordinator keeps beside the masters."""
_COUNTERS = ("num_steps", "num_tokens")


def worker_key(workers: SimulatedWorkers, worker: Worker) -> str:
    """Return ``block{b}/replica{r}``."""
    return f"block{worker.block_idx}/replica{worker.worker_id // workers.partition.num_blocks}"


def worker_states(workers: SimulatedWorkers) -> dict[str, Any]:
    """Return every worker's tensors, optimizer state, gradients and random stream."""
    return {
        worker_key(workers, worker): {
            "local": dict(worker.local),
            "gradients": dict(worker.gradients),
            "optimizer": workers.named_state(worker),
            "random_state": worker.random_state,
            "feedback": {entry: feedback.state_dict() for entry, feedback in worker.feedback.items()},
            **{name: getattr(worker, name) for name in _COUNTERS},
        }
        for worker in workers
    }


def own_states(workers: SimulatedWorkers, keeps_interface: bool = False) -> dict[str, Any]:
    """Return ``worker_states`` between two rounds, without the tensors that are the masters bit for bit.

    Args:
        workers: Of this process.
        keeps_interface: Whether the interface is to be there in any case.
    """
    states = worker_states(workers)
    for worker in workers:
        # Without a base nobody knows whether the interface was merged in this round.
        sure = workers.interface_names if keeps_interface or not workers.holds_base else ()
        own = {n: t for n, t in worker.local.items() if n in sure or not torch.equal(t, workers.merged[n])}
        states[worker_key(workers, worker)]["local"] = own
    return states


def saved_run(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a checkpoint holds of a run in rounds, of processes or of simulated workers; empty if of none."""
    saved: Mapping[str, Any] = checkpoint.get(MEMBER_KEY) or checkpoint.get(KEY, {})
    return saved


def standing_of(saved: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return where the coordinator of a saved run stood, as ``coordinator.standing`` has it; None: it is not saved.

    Args:
        saved: What ``saved_run`` returned.
    """
    kept: dict[str, Any] | None = saved.get("coordinator")
    if kept is None or "timelines" not in kept:
        return kept
    ledgers = {entry: timeline["ledger"] for entry, timeline in kept["timelines"].items()}
    first = block_entry(0)
    return standing(ledgers[first]["version"], ledgers, {first: kept["accepted_tokens"]})


def load_worker_states(
    workers: SimulatedWorkers, optimizer: Optimizer, param_groups: list[dict[str, Any]], saved: Mapping[str, Any]
) -> None:
    """Give every worker what ``worker_states`` returned; ``optimizer`` takes the saved hyper-parameters."""
    for worker in workers:
        state = saved[worker_key(workers, worker)]
        for name, tensor in state["local"].items():
            worker.local[name].copy_(tensor)
        worker.gradients = {name: grad.to(worker.local[name].device) for name, grad in state["gradients"].items()}
        worker.optimizer_state = _load_named(workers, optimizer, param_groups, state["optimizer"])
        worker.random_state = state["random_state"]
        worker.feedback = {entry: ErrorFeedback.of_state(kept) for entry, kept in state["feedback"].items()}
        for name in _COUNTERS:
            setattr(worker, name, state[name])


def share_plain_state(workers: SimulatedWorkers, optimizer: Optimizer) -> None:
    """Start every worker with its share of a state that ``optimizer`` has loaded from a plain checkpoint."""
    plain = optimizer.state_dict()
    names = _parameter_names(workers, optimizer)
    by_name = {names[idx]: state for idx, state in plain["state"].items() if idx in names}
    for worker in workers:
        mine = {name: state for name, state in by_name.items() if name in worker.local}
        worker.optimizer_state = _load_named(workers, optimizer, plain["param_groups"], mine)


def plain_optimizer_state(workers: SimulatedWorkers, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of ``optimizer`` with one worker's state for each parameter."""
    before = optimizer.state
    optimizer.state = workers.first_state()
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state = before


def refuse_other_shape(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to resume a run of another shape.

    Raises:
        CheckpointMismatchError: Naming every field that differs.
    """
    pairs = {name: (saved.get(name), value) for name, value in current.items()}
    differing = [f"{name}: saved {old}, now {new}" for name, (old, new) in pairs.items() if old != new]
    if differing:
        raise CheckpointMismatchError(
            explain(
                "a blocktrain run resumes in the shape in which it was saved",
                "; ".join(differing),
                "use the saved values, or start a new run from the weights alone (load_from_checkpoint)",
            )
        )


def _load_named(
    workers: SimulatedWorkers, optimizer: Optimizer, param_groups: list[dict[str, Any]], by_name: Mapping[str, Any]
) -> defaultdict[Tensor, dict[str, Any]]:
    """Return an optimizer state built from ``by_name``, cast and placed as the optimizer itself does it."""
    indices = {name: idx for idx, name in _parameter_names(workers, optimizer).items()}
    copied = {
        indices[name]: {key: v.clone() if isinstance(v, Tensor) else v for key, v in state.items()}
        for name, state in by_name.items()
    }
    optimizer.load_state_dict({"state": copied, "param_groups": param_groups})
    state, optimizer.state = optimizer.state, defaultdict(dict)
    return state


def _parameter_names(workers: SimulatedWorkers, optimizer: Optimizer) -> dict[int, str]:
    """Return the optimizer's own parameter index to our name, for the parameters that workers train."""
    names = {id(tensor): name for name, tensor in workers.tensors.items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {idx: names[id(p)] for idx, p in enumerate(parameters) if id(p) in names}
