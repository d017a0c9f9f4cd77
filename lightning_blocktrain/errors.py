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


class WorkerDiedError(BlockTrainError, RuntimeError):
    """A worker process ended before the run began; the message names its rank, block and exit code."""


class CheckpointMismatchError(BlockTrainError, ValueError):
    """A checkpoint belongs to another model, block count or noise partition."""


class StateError(BlockTrainError, RuntimeError):
    """A coordinator's state directory is in use by another process, or damaged."""


class PortInUseError(BlockTrainError, OSError):
    """The address to listen on is taken; the message names it."""


class WireError(BlockTrainError, ValueError):
    """Bytes that are no whole, undamaged message within the limits."""


class TransportError(BlockTrainError, RuntimeError):
    """A worker's request to its coordinator failed; base class of the reasons."""


class CoordinatorUnreachableError(TransportError):
    """No answer within ``reconnect_timeout_s``, in spite of retries."""


class UnauthorisedError(TransportError):
    """The coordinator does not take the token."""


class WrongRunError(TransportError):
    """The coordinator at this address serves another run."""


class NotFoundedError(TransportError):
    """The coordinator has no masters yet: a worker that builds the whole model has to bring them."""


class NotJoinedError(TransportError):
    """The worker has not joined, or has left."""


class SupersededError(TransportError):
    """A newer incarnation of this worker has taken its place."""


class RequestRefusedError(TransportError):
    """The coordinator understood the request and refuses it; asking again gives the same answer."""


class RunEndedError(TransportError):
    """The run is over: there will be no newer version."""


class RunFailedError(RunEndedError):
    """The run was given up; the message says why."""


def explain(rule: str, got: str, fix: str) -> str:
    """Return the message of an error about bad input: the rule, what was given and what to do.

    Args:
        rule: What must hold, beginning with the name of the argument.
        got: The offending values, as ``name=value`` pairs.
        fix: What to change.
    """
    return f"{rule}; got {got}; {fix}"
