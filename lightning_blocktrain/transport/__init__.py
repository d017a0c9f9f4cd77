"""How a worker and its coordinator talk: the contract, the messages, and the ways to carry them."""

from lightning_blocktrain.transport.base import Fetched, Submission, Transport, Welcome, WorkerFacts
from lightning_blocktrain.transport.terms import RunTerms

__all__ = ["Fetched", "RunTerms", "Submission", "Transport", "Welcome", "WorkerFacts"]
