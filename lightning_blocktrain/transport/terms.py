"""What a run is and how it is coordinated, as values that travel as JSON: the terms that all its members share.

Owns the checks and the JSON form. Owns neither secrets (a run's token is no term) nor addresses.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from lightning_blocktrain.errors import explain
from lightning_blocktrain.rounds import INTERFACE, OuterSGD, RoundRules, block_entry
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.rounds.pace import LocalSteps, check_local_steps
from lightning_blocktrain.rounds.values import check_value_codec
from lightning_blocktrain.rounds.verdicts import is_count

OnMissingBlock = Literal["warn", "fail"]

MAX_BLOCKS = 4096
MAX_WORKERS = 4096
"""Most worker ids of a run: what a coordinator keeps per worker stays bounded, whoever joins."""


@dataclass(frozen=True)
class RunTerms:
    """The terms of a run.

    Args:
        num_blocks: B.
        sync_every: Inner steps per round; with the version of a block it says where a learning rate schedule stands.
        rules: Of every entry's rounds.
        outer: Of every entry.
        interface_every: Block rounds from one merge of the interface to the next.
        num_workers: Workers that must have joined before the first round, ids 0 to ``num_workers - 1``; None: as many
            as the rules need for one merge of every block.
        max_rounds: Rounds of every block after which the run ends; None: no end.
        join_timeout_s: How long the first round waits for its workers.
        silent_after_s: A worker that should give a sign of life and has not for so long is not waited for; None: three
            quarters of the deadline, at most 15.
        on_missing_block: A block without a live worker keeps its parameters (``warn``), or ends the run (``fail``).
        codec: How updates travel to the coordinator; the masters of what a worker trains travel as they are.
        prefix_every: Rounds from one fetch of frozen blocks to the next; a worker may read an older one where the
            next is not there yet.
        prefix_codec: How frozen blocks travel, and how a worker keeps them.
        local_steps: Whether a worker that is short of time sends fewer steps (``until_deadline``) or all, too late.
        identity: What must agree between the members, by name (a hash of the model, its noise bands); plain values.
        worker_settings: What the workers are told beside, unread by the coordinator; plain values.

    Raises:
        ValueError: If a value is out of range.
    """

    num_blocks: int
    sync_every: int
    rules: RoundRules
    outer: OuterSGD = field(default_factory=OuterSGD)
    interface_every: int = 1
    num_workers: int | None = None
    max_rounds: int | None = None
    join_timeout_s: float = 300.0
    silent_after_s: float | None = None
    on_missing_block: OnMissingBlock = "warn"
    codec: Codec = field(default_factory=lambda: Codec("fp32"))
    prefix_every: int = 1
    prefix_codec: Codec = field(default_factory=lambda: Codec("bf16"))
    local_steps: LocalSteps = "fixed"
    identity: Mapping[str, Any] = field(default_factory=dict)
    worker_settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_count("num_blocks", self.num_blocks, MAX_BLOCKS)
        _check_count("sync_every", self.sync_every)
        _check_count("interface_every", self.interface_every)
        _check_count("prefix_every", self.prefix_every)
        check_value_codec("prefix_codec", self.prefix_codec)
        if self.max_rounds is not None:
            _check_count("max_rounds", self.max_rounds)
        if self.num_workers is not None:
            _check_count("num_workers", self.num_workers, MAX_WORKERS)
            if self.num_workers < self.num_blocks:
                got = f"num_workers={self.num_workers}, num_blocks={self.num_blocks}"
                raise ValueError(explain("num_workers must be at least num_blocks", got, "give every block a worker"))
            self.rules.check_replicas(self.num_workers // self.num_blocks)
        for name in ("join_timeout_s", "silent_after_s"):
            _check_seconds(name, getattr(self, name))
        if self.on_missing_block not in get_args(OnMissingBlock):
            got = f"on_missing_block={self.on_missing_block!r}"
            raise ValueError(explain("on_missing_block must be 'warn' or 'fail'", got, "choose one"))
        check_local_steps(self.local_steps)

    @property
    def silence_s(self) -> float:
        """Seconds without a sign of life after which a worker counts as gone; below the deadline."""
        if self.silent_after_s is not None:
            return self.silent_after_s
        return min(15.0, 0.75 * self.rules.deadline_s)

    @property
    def beat_every_s(self) -> float:
        """Seconds between two signs of life: several fit into ``silence_s``, so that one may be lost."""
        return min(2.0, self.silence_s / 4)

    def entries(self, with_interface: bool) -> list[str]:
        """Return the names of the run's entries, the interface last."""
        blocks = [block_entry(block_idx) for block_idx in range(self.num_blocks)]
        return [*blocks, INTERFACE] if with_interface else blocks

    def blocks_in(self, entries: Collection[str]) -> tuple[int, ...]:
        """Return the blocks whose entries are among these, ascending."""
        return tuple(block_idx for block_idx in range(self.num_blocks) if block_entry(block_idx) in entries)

    def interface_due(self, block_version: int) -> bool:
        """Tell whether the round of this block version ends with a submission to the interface."""
        return self.interface_round(block_version + 1) > self.interface_round(block_version)

    def interface_round(self, block_version: int) -> int:
        """Return how many interface rounds belong to the first ``block_version`` rounds of a block."""
        if self.max_rounds is not None and block_version >= self.max_rounds:
            return math.ceil(self.max_rounds / self.interface_every)
        return block_version // self.interface_every

    def interface_due_version(self, interface_version: int) -> int:
        """Return the version of a block whose round ends with the submission to this interface version."""
        due = (interface_version + 1) * self.interface_every - 1
        return due if self.max_rounds is None else min(due, self.max_rounds - 1)

    def rounds_before_due(self, interface_version: int) -> int:
        """Return how many rounds a block has after this interface version before the one that ends with the next."""
        return self.interface_due_version(interface_version) - interface_version * self.interface_every

    def prefix_version(self, block_version: int) -> int:
        """Return the version of other blocks that a block should read, at least, in its round of a version."""
        return block_version - block_version % self.prefix_every

    @property
    def full_identity(self) -> dict[str, Any]:
        """All that must agree between the members, by name."""
        names = ("num_blocks", "sync_every", "interface_every")
        return {**self.identity, **{name: getattr(self, name) for name in names}}

    def to_json(self) -> dict[str, Any]:
        """Return the terms as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RunTerms":
        """Return the terms that plain values say.

        Raises:
            ValueError: If a name is missing or unknown, or a value out of range.
        """
        known = {item.name for item in fields(cls)}
        if not isinstance(values, Mapping) or values.keys() != known:
            got = f"names={sorted(map(str, values))[:20] if isinstance(values, Mapping) else type(values).__name__}"
            raise ValueError(
                explain("terms must have exactly the names of RunTerms", got, "use one version everywhere")
            )
        try:
            parts = {"rules": RoundRules, "outer": OuterSGD, "codec": Codec, "prefix_codec": Codec}
            return cls(**{**values, **{name: kind(**values[name]) for name, kind in parts.items()}})
        except (TypeError, AttributeError) as exc:
            raise ValueError(explain("terms must be of the types of RunTerms", str(exc)[:200], "use RunTerms")) from exc


def identity_differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return what differs between two identities, one ``name: here=..., there=...`` each; names of both only."""
    return [
        f"{name}: here={own[name]!r:.80}, there={other[name]!r:.80}"
        for name in sorted(own.keys() & other.keys())
        if own[name] != other[name]
    ]


def differing_terms(own: RunTerms, run: RunTerms) -> list[str]:
    """Return what a worker would have had otherwise than the run it joins, one ``name: here=..., there=...`` each."""
    here, there = ({**asdict(terms.rules), **_rest(terms)} for terms in (own, run))
    return identity_differences(here, there)


def _rest(terms: RunTerms) -> dict[str, Any]:
    outer = asdict(terms.outer)
    return {
        **{f"outer_optimizer.{name}": value for name, value in outer.items() if name != "spared"},
        "codec": terms.codec.meta,
        "prefix_codec": terms.prefix_codec.meta,
        "prefix_every": terms.prefix_every,
        "local_steps": terms.local_steps,
        "on_missing_block": terms.on_missing_block,
    }


def _check_count(name: str, value: object, at_most: int | None = None) -> None:
    if not is_count(value, at_least=1) or (at_most is not None and value > at_most):
        bound = "" if at_most is None else f" and at most {at_most}"
        raise ValueError(
            explain(f"{name} must be a whole number of at least 1{bound}", f"{name}={value!r}", "change it")
        )


def _check_seconds(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ValueError(explain(f"{name} must be finite and above 0", f"{name}={value!r}", "give seconds"))
