"""The errors this package raises, in one tree, and the one form their messages take.

Owns the exception classes. Arguments that are wrong on their own raise ``ValueError`` (or a subclass of it);
what a Lightning user configured wrongly raises Lightning's ``MisconfigurationException``.
"""


class BlockTrainError(Exception):
    """Base class of every error that only this package raises."""


class CorpusError(BlockTrainError, ValueError):
    """A corpus is missing, unreadable, empty or too short."""


class LedgerError(BlockTrainError, RuntimeError):
    """The round protocol was used out of order, or a stored ledger does not fit."""


class NonFiniteError(BlockTrainError, RuntimeError):
    """A loss or a gradient is NaN or infinite; raised before the update that it would have spoilt."""


class StageError(BlockTrainError, RuntimeError):
    """A stage of a pipeline failed, died or made no progress; its message names stage and step."""


class CheckpointMismatchError(BlockTrainError, ValueError):
    """A checkpoint belongs to another model, block count or noise partition."""


def explain(rule: str, got: str, fix: str) -> str:
    """Return the message of an error about bad input: the rule, what was given and what to do.

    Args:
        rule: What must hold, beginning with the name of the argument.
        got: The offending values, as ``name=value`` pairs.
        fix: What to change.
    """
    return f"{rule}; got {got}; {fix}"
