"""The running average of an entry's masters: what frozen copies are made of, and what the assembled model is.

A block that is trained on the newest version of the blocks before it meets other features every round. An average moves
less from round to round, so that blocks can build on one another although they exchange rarely (measured:
``benchmarks.composition``, arm ``ahead no average``). Owns the arithmetic; ledgers own the tensors.

Source: Polyak averaging with polynomial decay (Shamir and Zhang, arXiv 1212.1824): while the decay is below its limit,
the average covers about the last tenth of the rounds.
"""

from lightning_blocktrain.rounds.merge import Params

FRESH = 9
"""The newest of n masters weighs ``FRESH / (n + FRESH)``, or ``1 - average_decay`` if that is more."""


def decay_after(num_rounds: int, limit: float) -> float:
    """Return what the average keeps of itself when the master after ``num_rounds`` rounds, 1 or more, is added."""
    return min(limit, num_rounds / (num_rounds + FRESH))


def move_average(average: Params, master: Params, num_rounds: int, limit: float) -> Params:
    """Return the average with one more master in it, in memory of its own; what is not floating is the master's.

    Args:
        average: Of the masters before.
        master: After ``num_rounds`` rounds, same names and shapes.
        num_rounds: 1 or more.
        limit: In [0, 1); see ``RoundRules.average_decay``.
    """
    kept = decay_after(num_rounds, limit)
    return {
        name: tensor.lerp(average[name], kept) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in master.items()
    }
