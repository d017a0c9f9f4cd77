"""What a body asks for, and which field a refusal names."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_blocktrain.serving.completion_fields import FIELDS, NEUTRAL, Asked, CompletionLimits, asked_of

LIMITS = CompletionLimits(choices=8, completion_bytes=100)
LEAST = {"model": "m", "prompt": "abc"}


def test_fields_that_are_left_out_and_null_ones_have_defaults() -> None:
    expected = Asked("m", ("abc",), 16, 1.0, None, 1, (), False, False, False, False, 1, 1, 1, None)
    assert asked_of(LEAST, LIMITS) == expected
    assert asked_of({**LEAST, **dict.fromkeys({*FIELDS, *NEUTRAL} - LEAST.keys())}, LIMITS) == expected


def test_fields_that_are_given_are_taken_over() -> None:
    body = {
        "model": "other",
        "prompt": ["a\u00e9", ""],
        "max_tokens": 100,
        "temperature": 0,
        "seed": 2**63 - 8,
        "n": 4,
        "stop": ["\n", "\u20ac"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 0,
        "chunk_bytes": 4,
        "sweeps": 3,
        "num_draws": 64,
        "num_blocks": 2,
    }
    asked = asked_of(body, LIMITS)
    stops = (b"\n", b"\xe2\x82\xac")
    assert asked == Asked("other", ("a\u00e9", ""), 100, 0.0, 2**63 - 8, 4, stops, True, True, True, False, 4, 3, 64, 2)
    assert asked.prompt_bytes == 3


@pytest.mark.parametrize(
    "body",
    [
        {"best_of": 1, "n": 3},
        {"best_of": 3, "n": 3},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": None, "user": "me", "top_p": 1.0, "suffix": ""},
        {"logit_bias": {}, "stop": []},
    ],
)
def test_what_clients_send_by_default_is_taken(body: dict[str, Any]) -> None:
    assert asked_of({**LEAST, **body}, LIMITS).stops == ()


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("model", None, "text"),
        ("model", 3, "text"),
        ("prompt", None, "text, or a list of 1 to 8 texts"),
        ("prompt", [], "got prompt=a list of 0"),
        ("prompt", ["a"] * 9, "got prompt=a list of 9"),
        ("prompt", [97, 98], "a token is a byte: send text"),
        ("prompt", [["a"]], "a list of 1"),
        ("prompt", "a\ud800", "half a surrogate pair at 1"),
        ("max_tokens", -1, "an integer in 0 .. 100; got max_tokens=-1"),
        ("max_tokens", 101, "an integer in 0 .. 100"),
        ("max_tokens", 1.0, "an integer"),
        ("max_tokens", True, "an integer"),
        ("max_tokens", "16", "an integer"),
        ("max_tokens", 10**400, "an int of 1329 bits"),
        ("temperature", -0.1, "a finite number from 0 on"),
        ("temperature", float("nan"), "a finite number"),
        ("temperature", float("inf"), "a finite number"),
        ("temperature", 10**400, "a finite number"),
        ("temperature", True, "a finite number"),
        ("temperature", "1", "a finite number"),
        ("seed", -1, "an integer in 0 .. "),
        ("seed", 2**63 - 7, "an integer in 0 .. 9223372036854775800"),
        ("n", 0, "an integer in 1 .. 8"),
        ("n", 9, "an integer in 1 .. 8"),
        ("stop", "", "1 to 256 bytes; got lengths 0"),
        ("stop", ["a", ""], "1 to 256 bytes; got lengths 1, 0"),
        ("stop", "x" * 257, "lengths 257"),
        ("stop", list("abcde"), "a list of 1 to 4 texts; got stop=a list of 5"),
        ("stop", [1], "a list of 1 to 4 texts"),
        ("stop", 7, "got stop=7"),
        ("stream", 1, "true or false; got stream=1"),
        ("stream", "true", "true or false"),
        ("stream_options", {"include_usage": True}, "with stream"),
        ("stream_options", [], "with stream"),
        ("logprobs", -1, "an integer in 0 .. 5"),
        ("logprobs", 6, "an integer in 0 .. 5"),
        ("logprobs", True, "an integer in 0 .. 5"),
        ("echo", "yes", "true or false"),
        ("chunk_bytes", 0, "an integer in 1 .. "),
        ("sweeps", 0, "an integer in 1 .. "),
        ("num_draws", 65, "an integer in 1 .. 64"),
        ("num_blocks", 0, "an integer in 1 .. "),
        ("user", 3, "text"),
        ("suffix", "end", "left out or ''; got suffix='end'"),
        ("best_of", 2, "left out or 1; got best_of=2"),
        ("best_of", True, "left out or 1"),
        ("presence_penalty", 0.5, "left out or 0"),
        ("frequency_penalty", -1, "left out or 0"),
        ("logit_bias", {"50256": -100}, "left out or {}"),
        ("top_p", 0.9, "left out or 1"),
        ("chunk_byte", 4, "no field that is known here; got chunk_byte=4; choose from model, prompt"),
        ("max_completion_tokens", None, "no field that is known here"),
    ],
)
def test_a_wrong_field_is_refused_by_name(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError) as caught:
        asked_of({**LEAST, name: value}, LIMITS)
    message = str(caught.value)
    assert message.startswith(f"{name} must ") and rule in message


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        ({"echo": True, "logprobs": 2}, "echo"),
        ({"prompt": ["a", "b", "c"], "n": 3}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_by_name(body: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must "):
        asked_of({**LEAST, **body}, LIMITS)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted({*FIELDS, *NEUTRAL})) | st.text(max_size=5), ANY, max_size=4))
def test_any_body_is_understood_or_refused_in_words(body: dict[str, Any]) -> None:
    try:
        asked = asked_of({**LEAST, **body}, LIMITS)
    except ValueError as exc:
        assert "must be" in str(exc) or "must have" in str(exc)
        assert len(str(exc)) < 600
    else:
        assert 1 <= asked.num_choices * len(asked.prompts) <= 8 and asked.num_bytes <= 100


@pytest.mark.parametrize("options", [{"choices": 65}, {"choices": 0}, {"running": 0}])
def test_limits_that_no_request_would_fit_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"choices must be in 1 \.\. under_way"):
        CompletionLimits(**options)
