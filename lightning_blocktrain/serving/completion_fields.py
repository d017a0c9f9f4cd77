"""What a request for completions asks for: its JSON body, checked field by field. Pure, and without a socket.

A token is a byte: ``max_tokens`` counts bytes, and text is UTF-8. A field of the value null is one that was left out.

=====================  ======================================  ========================================================
field                  value                                   meaning
=====================  ======================================  ========================================================
model                  text                                    as /v1/models names it
prompt                 text, or a list of texts                what to continue; an empty one counts as a newline
max_tokens             0 .. ``completion_bytes``; 16           bytes of each completion
temperature            number from 0; 1                        0 is greedy
seed                   0 .. 2**63 - ``choices``; at random     choice i is drawn with ``seed + i``
n                      1 up to ``choices`` in all; 1           choices of each prompt
stop                   text, or up to 4 in a list              a completion ends before the first one
stream                 true or false; false                    as server-sent events
stream_options         {"include_usage": true or false}        usage in an event of its own, the last one
logprobs               0 .. 5                                  the log-probability of each byte, of no alternatives
echo                   true or false; false                    the text begins with the prompt; not with logprobs
chunk_bytes, sweeps    as ``BlockModel.generate`` has them     bytes decided at once, and traversals for each chunk
num_draws, num_blocks  as ``BlockModel.generate`` has them     noise draws that are averaged, and the exit that decides
user                   text                                    nothing
=====================  ======================================  ========================================================

What clients send by default is taken at the values of ``NEUTRAL``, which ask for nothing; other fields are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_blocktrain.errors import explain
from lightning_blocktrain.models.generation_arguments import MAX_DRAWS, MAX_SEED, is_temperature
from lightning_blocktrain.rounds.verdicts import shown

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "suffix": ("",),
    "top_p": (1,),
}
"""Fields that nothing here does, and the values at which that makes no difference."""
FIELDS = (
    *("model", "prompt", "max_tokens", "temperature", "seed", "n", "stop", "stream", "stream_options", "logprobs"),
    *("echo", "chunk_bytes", "sweeps", "num_draws", "num_blocks", "user"),
)
DEFAULT_BYTES = 16
MAX_STOPS = 4
MAX_STOP_BYTES = 256
MAX_LOGPROBS = 5
MAX_COUNT = 2**31
SEEDS = MAX_SEED + 1
"""A host takes seeds below."""


@dataclass(frozen=True)
class CompletionLimits:
    """What a server of completions takes.

    Args:
        running: Completions that are computed at once; each has a thread.
        under_way: Most completions that are computed or wait for it.
        choices: Most of one request, over all its prompts.
        completion_bytes: Longest completion.
        body_bytes: Longest body of a request.
        stall_timeout_s: A transfer without progress for so long is given up.
        failed_tokens: Wrong tokens per address and minute that are answered.
    """

    running: int = 8
    under_way: int = 64
    choices: int = 16
    completion_bytes: int = 4096
    body_bytes: int = 2**20
    stall_timeout_s: float = 60.0
    failed_tokens: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.choices <= self.under_way or self.running < 1:
            got = f"choices={self.choices}, under_way={self.under_way}, running={self.running}"
            rule = "choices must be in 1 .. under_way, or the longest request never fits, and running at least 1"
            raise ValueError(explain(rule, got, "lower choices or raise under_way"))


@dataclass(frozen=True)
class Asked:
    """What a request asks for; see the table of fields.

    Args:
        model: The model's name.
        prompts: What to continue.
        num_bytes: Of each completion.
        temperature: 0 is greedy.
        seed: Of the first choice; None: any.
        num_choices: Of each prompt.
        stops: What ends a completion.
        stream: Whether the answer comes in events.
        include_usage: Whether usage is the last of them.
        logprobs: Whether log-probabilities are wanted.
        echo: Whether a text begins with its prompt.
        chunk_bytes: Bytes decided at once.
        sweeps: Traversals for each chunk.
        num_draws: Noise draws that are averaged.
        num_blocks: Blocks before the exit that decides; None: all.
    """

    model: str
    prompts: tuple[str, ...]
    num_bytes: int
    temperature: float
    seed: int | None
    num_choices: int
    stops: tuple[bytes, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: bool
    chunk_bytes: int
    sweeps: int
    num_draws: int
    num_blocks: int | None

    @property
    def prompt_bytes(self) -> int:
        """Bytes of all prompts, each counted once."""
        return sum(len(prompt.encode()) for prompt in self.prompts)


def asked_of(body: Mapping[str, Any], limits: CompletionLimits) -> Asked:
    """Return what a request asks for.

    Args:
        body: The request's JSON object.
        limits: Of the server.

    Raises:
        ValueError: If a field is wrong; the first word of the message is its name.
    """
    given = {name: value for name, value in body.items() if value is not None}
    prompts = _texts(given, "prompt", limits.choices)
    num_choices = _count(given, "n", 1, 1, limits.choices // len(prompts))
    _refuse_others(body, num_choices)
    stream, echo = _flag(given, "stream"), _flag(given, "echo")
    logprobs = _count(given, "logprobs", -1, 0, MAX_LOGPROBS) >= 0
    if echo and logprobs:
        rule = "echo must be false where logprobs are asked for: a prompt's bytes have none"
        raise ValueError(explain(rule, f"echo=True, logprobs={given['logprobs']}", "leave out one of them"))
    return Asked(
        model=_model(given),
        prompts=prompts,
        num_bytes=_count(given, "max_tokens", DEFAULT_BYTES, 0, limits.completion_bytes),
        temperature=_temperature(given),
        seed=_count(given, "seed", 0, 0, SEEDS - limits.choices) if "seed" in given else None,
        num_choices=num_choices,
        stops=_stops(given),
        stream=stream,
        include_usage=_include_usage(given, stream),
        logprobs=logprobs,
        echo=echo,
        chunk_bytes=_count(given, "chunk_bytes", 1, 1, MAX_COUNT),
        sweeps=_count(given, "sweeps", 1, 1, MAX_COUNT),
        num_draws=_count(given, "num_draws", 1, 1, MAX_DRAWS),
        num_blocks=_count(given, "num_blocks", 1, 1, MAX_COUNT) if "num_blocks" in given else None,
    )


def _refuse_others(body: Mapping[str, Any], num_choices: int) -> None:
    """Refuse fields that nothing here does, but where they ask for nothing."""
    neutral = {**NEUTRAL, "best_of": (1,) if num_choices == 1 else (1, num_choices)}  # the best n of n are all of them
    for name, value in body.items():
        if name in neutral:
            values = neutral[name]
            if value is not None and (isinstance(value, bool) or value not in values):
                rule = f"{name} must be left out or {' or '.join(map(repr, values))}"
                raise ValueError(explain(rule, f"{name}={shown(value)}", "nothing else is offered here"))
        elif name not in FIELDS:
            rule = f"{name[:60]} must be left out, for it is no field that is known here"
            raise ValueError(explain(rule, f"{name[:60]}={shown(value)}", f"choose from {', '.join(FIELDS)}"))
    if not isinstance(body.get("user", ""), str | None):
        raise _wrong("user", "text", body["user"])


def _wrong(name: str, rule: str, value: Any, fix: str = "correct it or leave it out") -> ValueError:
    return ValueError(explain(f"{name} must be {rule}", f"{name}={shown(value)}", fix))


def _count(given: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise _wrong(name, f"an integer in {low} .. {high}", value)
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _temperature(given: Mapping[str, Any]) -> float:
    value = given.get("temperature", 1.0)
    if not is_temperature(value):
        raise _wrong("temperature", "a finite number from 0 on", value)
    return float(value)


def _model(given: Mapping[str, Any]) -> str:
    value = given.get("model")
    if not isinstance(value, str):
        raise _wrong("model", "text", value, "name a model that /v1/models lists")
    return value


def _texts(given: Mapping[str, Any], name: str, at_most: int) -> tuple[str, ...]:
    """Return a field that is text or a list of texts, all of which have UTF-8."""
    value = given.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not 1 <= len(texts) <= at_most or not all(isinstance(t, str) for t in texts):
        held = f"a list of {len(value)}" if isinstance(value, list) else shown(value)
        rule = f"{name} must be text, or a list of 1 to {at_most} texts"
        raise ValueError(explain(rule, f"{name}={held}", "a token is a byte: send text"))
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            rule = f"{name} must be text that UTF-8 can hold"
            raise ValueError(explain(rule, f"half a surrogate pair at {exc.start}", "send whole characters")) from exc
    return tuple(texts)


def _stops(given: Mapping[str, Any]) -> tuple[bytes, ...]:
    if given.get("stop", []) == []:
        return ()
    stops = tuple(text.encode() for text in _texts(given, "stop", MAX_STOPS))
    if not all(1 <= len(stop) <= MAX_STOP_BYTES for stop in stops):
        lengths = ", ".join(str(len(stop)) for stop in stops)
        rule = f"stop must have 1 to {MAX_STOP_BYTES} bytes"
        raise ValueError(explain(rule, f"lengths {lengths}", "leave out what is empty, shorten what is long"))
    return stops


def _include_usage(given: Mapping[str, Any], stream: bool) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"} or (options and not stream):
        raise _wrong("stream_options", '{"include_usage": true or false}, with stream', options)
    return _flag({"include_usage": False, **options}, "include_usage")
