"""What a study does, fixed before its first run: parts, arms, seeds, contrasts, criteria; read from YAML.

A protocol file holds parts. A part compares arms on corpora with seeds; its ``sizes`` say how large. Everything that
decides a number is in the digest; titles and notes are not.

=============  ======================================================================================================
key of a part  meaning
=============  ======================================================================================================
kind           what a run is: a key of ``benchmarks.study.kinds.KINDS``
metric         the measure that is compared: a key of a run's measures
compare        difference (the default), or ratio for measures of speed: less is better, or more
arms           per arm, its options; those of the size come below them
control        the arm that all others are compared with
contrasts      further pairs [arm, control]
criteria       {contrast: [arm, control], rule, limit, corpora}: see ``benchmarks.study.judge``
sizes          per size: {corpora, seeds, options, arms}; ``arms`` picks some of the part's
published      per arm, the paper's figure, as text
show           what the report draws: keys of ``benchmarks.study.figures.FIGURES``
=============  ======================================================================================================
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "protocols"
RULES = ("non_inferior", "equivalent", "at_most", "at_least", "ratio_at_least")
COMPARISONS = ("difference", "ratio")
KINDS = ("blocks", "workers", "pipeline", "speed")
FIGURES = ("curve_tokens", "curve_time", "gap_tokens", "gaps", "exits", "frontier", "participation", "traffic")
SIZES = ("smoke", "cpu", "paper")


class ProtocolError(ValueError):
    """A protocol that says what it cannot mean."""


@dataclass(frozen=True)
class Criterion:
    """What must hold for a part to have met its aim.

    Args:
        contrast: Arm and control.
        rule: ``non_inferior``: the one-sided 95 % upper bound of the relative gap is at most ``limit`` per cent.
            ``equivalent``: two one-sided tests place the difference within ``limit`` of the metric's unit.
            ``at_most``, ``at_least``: the mean difference is; ``ratio_at_least``: the geometric mean ratio is.
        limit: The number that the rule names.
        corpora: Those it is asked of; empty: all of the part.
    """

    contrast: tuple[str, str]
    rule: str
    limit: float
    corpora: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One training, or one measurement: a process of its own.

    Args:
        part: Name of its part.
        kind: What it is.
        arm: Name of its arm.
        corpus: Name of its corpus.
        seed: Of weights, data order and whatever else it draws.
        options: Everything else that decides its result.
    """

    part: str
    kind: str
    arm: str
    corpus: str
    seed: int
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """What identifies its result, whichever protocol asks for it."""
        return digest_of([self.kind, self.arm, self.corpus, self.seed, self.options])[:16]


@dataclass(frozen=True)
class Part:
    """A comparison; see the module docstring."""

    name: str
    title: str
    kind: str
    metric: str
    compare: str
    control: str
    arms: dict[str, dict[str, Any]]
    corpora: tuple[str, ...]
    seeds: tuple[int, ...]
    options: dict[str, Any]
    contrasts: tuple[tuple[str, str], ...]
    criteria: tuple[Criterion, ...]
    published: dict[str, str]
    show: tuple[str, ...]
    note: str

    def runs(self) -> Iterator[Run]:
        """Yield the runs, arms interleaved: a study that is stopped has pairs, and what drifts meets all arms."""
        for idx, seed in enumerate(self.seeds):
            arms = list(self.arms.items())
            for corpus in self.corpora:
                for arm, own in arms if idx % 2 == 0 else arms[::-1]:
                    yield Run(self.name, self.kind, arm, corpus, seed, merged(self.options, own))

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield every pair [arm, control] that is compared, the control's first."""
        pairs = [(arm, self.control) for arm in self.arms if arm != self.control]
        yield from dict.fromkeys([*pairs, *self.contrasts])


@dataclass(frozen=True)
class Protocol:
    """A study.

    Args:
        name: Of its file.
        size: One of ``SIZES``.
        title: For people.
        question: What it asks.
        source: Where the published figures come from.
        limits: What it cannot show, one sentence each.
        parts: Those that have this size.
    """

    name: str
    size: str
    title: str
    question: str
    source: str
    limits: tuple[str, ...]
    parts: tuple[Part, ...]

    @property
    def digest(self) -> str:
        """Tell protocols apart by what decides their numbers and verdicts."""
        ignored = ("title", "note", "published", "show")
        parts = [{key: value for key, value in asdict(part).items() if key not in ignored} for part in self.parts]
        return digest_of([self.name, self.size, parts])[:16]

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of all corpora."""
        return tuple(dict.fromkeys(corpus for part in self.parts for corpus in part.corpora))

    def runs(self) -> list[Run]:
        """Return all runs, each once: the first seed of every part before the second of any."""
        by_key: dict[str, Run] = {}
        queues = [list(part.runs()) for part in self.parts]
        depth = max((len(part.seeds) for part in self.parts), default=0)
        for idx in range(depth):
            for part, queue in zip(self.parts, queues, strict=True):
                per_seed = len(part.corpora) * len(part.arms)
                for run in queue[idx * per_seed : (idx + 1) * per_seed]:
                    by_key.setdefault(run.key, run)
        return list(by_key.values())


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return two nested mappings as one; where both have a value, that of ``above`` counts."""
    found = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if both else value
    return found


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def names() -> list[str]:
    """Return the protocols that are shipped."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str, size: str) -> Protocol:
    """Return a shipped protocol, or that of a YAML file.

    Args:
        name: Of the protocol, or a path that ends in ``.yaml``.
        size: One of ``SIZES``.

    Raises:
        ProtocolError: If there is none, or if it says what it cannot mean.
    """
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise ProtocolError(f"a study must be one of {', '.join(names())} or a YAML file; got {name!r}; correct it")
    return parse(path.stem, size, path.read_text(encoding="utf-8"))


def parse(name: str, size: str, text: str) -> Protocol:
    """Return the protocol that a YAML text holds.

    Raises:
        ProtocolError: If it says what it cannot mean.
    """
    try:
        told = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ProtocolError(f"{name}: a protocol must be YAML; got {error}") from None
    try:
        parts = [_part(part_name, part, size) for part_name, part in told["parts"].items() if size in part["sizes"]]
        heads = {key: str(told[key]).strip() for key in ("title", "question", "source")}
        limits = tuple(told.get("limits", ()))
    except (AttributeError, KeyError, TypeError) as error:
        raise ProtocolError(f"{name}: a protocol must have the keys of its form; got {error!r}") from None
    if not parts:
        raise ProtocolError(f"{name}: a size must be that of a part; got {size!r}; choose from {', '.join(SIZES)}")
    return Protocol(name, size, **heads, limits=limits, parts=tuple(parts))


def _part(name: str, told: Mapping[str, Any], size: str) -> Part:
    own = told["sizes"][size]
    arms = {arm: dict(told["arms"][arm] or {}) for arm in own.get("arms", told["arms"])}
    contrasts = tuple((arm, control) for arm, control in told.get("contrasts", ()) if {arm, control} <= arms.keys())
    criteria = tuple(
        Criterion(tuple(one["contrast"]), one["rule"], float(one["limit"]), tuple(one.get("corpora", ())))
        for one in told.get("criteria", ())
        if set(one["contrast"]) <= arms.keys()
    )
    part = Part(
        name,
        told["title"],
        told["kind"],
        told["metric"],
        told.get("compare", "difference"),
        told["control"],
        arms,
        tuple(own["corpora"]),
        tuple(own["seeds"]),
        merged(told.get("options", {}), own.get("options", {})),
        contrasts,
        criteria,
        {arm: str(text) for arm, text in told.get("published", {}).items()},
        tuple(told.get("show", ())),
        str(told.get("note", "")).strip(),
    )
    _check(part)
    return part


def _check(part: Part) -> None:
    """Refuse a part that cannot be judged, before anything runs."""
    for name, value, known in (("kind", part.kind, KINDS), ("compare", part.compare, COMPARISONS)):
        if value not in known:
            raise ProtocolError(f"{part.name}: {name} must be one of {', '.join(known)}; got {value!r}")
    if strange := [name for name in part.show if name not in FIGURES]:
        raise ProtocolError(f"{part.name}: show must name figures: {', '.join(FIGURES)}; got {strange[0]!r}")
    if part.control not in part.arms:
        raise ProtocolError(f"{part.name}: control must be one of the arms; got {part.control!r}; add it")
    _distinct(part.name, "seeds", part.seeds)
    _distinct(part.name, "corpora", part.corpora)
    for criterion in part.criteria:
        if criterion.rule not in RULES:
            raise ProtocolError(f"{part.name}: rule must be one of {', '.join(RULES)}; got {criterion.rule!r}")
        if not set(criterion.corpora) <= set(part.corpora):
            raise ProtocolError(f"{part.name}: a criterion's corpora must be the part's; got {criterion.corpora}")


def _distinct(part: str, what: str, values: Sequence[Any]) -> None:
    if not values or len(set(values)) < len(values):
        raise ProtocolError(f"{part}: {what} must be one at least, each once; got {list(values)}")
