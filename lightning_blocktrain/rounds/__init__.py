"""The round protocol without network, clock or disk: verdicts, merge rules, membership and the ledger."""

from lightning_blocktrain.rounds.ledger import Ledger, Store
from lightning_blocktrain.rounds.merge import OuterSGD, Params, RoundRules
from lightning_blocktrain.rounds.roster import Roster
from lightning_blocktrain.rounds.verdicts import INTERFACE, Receipt, RoundReport, Update, Verdict, block_entry

__all__ = [
    "INTERFACE",
    "Ledger",
    "OuterSGD",
    "Params",
    "Receipt",
    "Roster",
    "RoundReport",
    "RoundRules",
    "Store",
    "Update",
    "Verdict",
    "block_entry",
]
