import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from lightning_blocktrain.rounds import Ledger, OuterSGD, Params, Roster, RoundRules, Update, Verdict
from lightning_blocktrain.rounds.codecs import (
    Codec,
    CodecName,
    dequantize,
    quantize,
    select_top,
    spread,
    wire_bytes,
)

CODECS = [Codec("fp32"), Codec("bf16"), Codec("int8"), Codec("topk")]
LOSSY = CODECS[1:]
by_name = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
lossy_by_name = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)

TINY = torch.finfo(torch.float32).tiny
FP32 = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126)
ANY_FP32 = st.floats(width=32)


def mixed_params(seed: int) -> Params:
    """Return every kind of tensor that a module may hold: shapes, strides and dtypes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(33, 17, generator=generator),
        "turned": torch.randn(8, 40, generator=generator).t(),
        "half": torch.randn(12, 5, generator=generator).to(torch.bfloat16),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.empty(0, 4),
        "constant": torch.full((300,), 0.25),
        "values:weight": torch.randn(3, generator=generator),
        "count": torch.tensor(2**60 + seed),
        "mask": torch.randn(7, generator=generator) > 0,
    }


def sent(codec: Codec, params: Params, base: Params) -> Params:
    """Return what arrives after the bytes of a frame."""
    encoded = codec.encode(params, base)
    return codec.decode(replace(encoded, tensors=load(save(encoded.tensors))), base)


def largest_error(params: Params, arrived: Params) -> float:
    errors = [(params[name].double() - arrived[name].double()).abs().flatten() for name in params]
    return torch.cat(errors).max().item()


@by_name
def test_codec_unknown_or_out_of_range_is_refused(codec: Codec) -> None:
    for wrong in ({"name": "int4"}, {"name": None}, {"block": 15}, {"block": True}, {"block": 2**17}):
        with pytest.raises(ValueError, match=r"must be .*; got .*; choose"):
            replace(codec, **wrong)
    for top_frac in (0.0, 1.1, math.nan, 1):
        with pytest.raises(ValueError, match="top_frac must be a float above 0 and at most 1"):
            replace(codec, top_frac=top_frac)


@by_name
def test_from_meta_of_own_meta_gives_same_codec(codec: Codec) -> None:
    assert Codec.from_meta(codec.meta) == codec


def test_meta_names_only_the_options_that_matter() -> None:
    assert Codec("bf16", block=64).meta == {"codec": "bf16"}
    assert Codec("int8", block=64).meta == {"codec": "int8", "block": "64"}
    assert Codec("topk", top_frac=0.01).meta == {"codec": "topk", "top_frac": "0.01"}


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"codec": "gzip"},
        {"codec": "int8"},
        {"codec": "int8", "block": "0256"},
        {"codec": "int8", "block": "many"},
        {"codec": "int8", "block": "9" * 5000},
        {"codec": "fp32", "block": "256"},
        {"codec": "fp32", "level": "3"},
        {"codec": "topk", "top_frac": "nan"},
        {"codec": ["int8"], "block": None},
    ],
)
def test_from_meta_of_a_stranger_is_refused(meta: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"; got .*; choose"):
        Codec.from_meta(meta)


@by_name
def test_decode_mixed_tensors_keeps_names_shapes_and_dtypes(codec: Codec) -> None:
    params, base = mixed_params(1), mixed_params(0)
    arrived = sent(codec, params, base)
    assert list(arrived) == list(base)
    assert all(arrived[name].shape == params[name].shape for name in base)
    assert all(arrived[name].dtype == params[name].dtype for name in base)
    assert torch.equal(arrived["count"], params["count"])
    assert torch.equal(arrived["mask"], params["mask"])


@by_name
def test_decode_unchanged_params_gives_base_bit_for_bit(codec: Codec) -> None:
    base = mixed_params(0)
    arrived = sent(codec, base, base)
    assert all(torch.equal(arrived[name], base[name]) for name in base)


@by_name
def test_decode_zero_from_zero_base_is_zero(codec: Codec) -> None:
    zeros, base = {"w": torch.tensor([0.0, 3.0, 0.0, -1e-42])}, {"w": torch.zeros(4)}
    arrived = sent(codec, zeros, base)["w"]
    assert arrived[0] == arrived[2] == 0.0


def test_fp32_round_trip_is_bit_identical_for_every_float() -> None:
    values = torch.tensor([math.nan, math.inf, -0.0, 1e-45, 3.4028235e38, 1e6])
    arrived = sent(Codec("fp32"), {"w": values}, {"w": torch.ones(6)})["w"]
    assert torch.equal(arrived.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("base_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_bf16_params_round_trip_bit_for_bit(name: Any, base_dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)  # every bf16 there is
    values = bits.view(torch.bfloat16)
    encoded = Codec(name).encode({"w": values}, {"w": torch.ones(2**16, dtype=base_dtype)})
    arrived = Codec(name).decode(encoded, {"w": torch.ones(2**16, dtype=base_dtype)})["w"]
    assert torch.equal(arrived.view(torch.int16), bits)
    assert wire_bytes(encoded) == 2 * 2**16


@by_name
@pytest.mark.parametrize("start", [0.0, 999_999.0])
def test_decode_million_is_not_clamped_to_the_range_of_fp16(codec: Codec, start: float) -> None:
    params = {"w": torch.tensor([1e6, start, start, start])}
    arrived = sent(codec, params, {"w": torch.full((4,), start)})["w"]
    # bf16 keeps eight bits of the delta; the others hold the largest value of a block to fp32 rounding.
    assert abs(arrived[0].item() - 1e6) <= 2**-8 * (1e6 - start) + 0.1


@by_name
def test_wire_bytes_of_realistic_block_is_at_most_its_share(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"qkv": (384, 128), "mlp": (512, 128), "bias": (512,), "norm": (128,)}
    base = {name: torch.zeros(shape) for name, shape in shapes.items()}
    params = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    fp32_bytes = 4 * sum(math.prod(shape) for shape in shapes.values())
    encoded = codec.encode(params, base)
    most = {"fp32": 1.0, "bf16": 0.5, "int8": 0.2545, "topk": 0.1002}[codec.name]
    assert wire_bytes(encoded) == codec.max_bytes(base) <= most * fp32_bytes
    assert wire_bytes(encoded) == sum(tensor.nbytes for tensor in load(save(encoded.tensors)).values())


def test_wire_bytes_int8_smallest_block_within_promise_is_64() -> None:
    base = {"w": torch.zeros(128, 128)}
    fp32_bytes = Codec("fp32").max_bytes(base)
    assert Codec("int8", block=64).max_bytes(base) <= 0.27 * fp32_bytes
    assert Codec("int8", block=32).max_bytes(base) > 0.27 * fp32_bytes


@by_name
def test_encode_result_shares_no_memory_with_params(codec: Codec) -> None:
    shared = torch.randn(6, 6, requires_grad=True)
    params = {"w": shared, "tied": shared, "turned": shared.t(), "count": torch.tensor([3])}
    base = {"w": torch.zeros(6, 6), "tied": torch.zeros(6, 6), "turned": torch.zeros(6, 6), "count": torch.tensor([1])}
    encoded = codec.encode(params, base)
    pointers = [tensor.untyped_storage().data_ptr() for tensor in encoded.tensors.values()]
    assert len(set(pointers)) == len(pointers)
    assert not {shared.untyped_storage().data_ptr(), params["count"].untyped_storage().data_ptr()} & set(pointers)
    assert all(t.is_contiguous() and not t.requires_grad for t in encoded.tensors.values())


def test_encode_wide_and_eight_bit_floats_travel_as_fp32_values() -> None:
    params = {"wide": torch.tensor([1.0, 1e300], dtype=torch.float64), "f8": torch.tensor([0.5]).to(torch.float8_e5m2)}
    base = {"wide": torch.zeros(2, dtype=torch.float64), "f8": torch.zeros(1).to(torch.float8_e5m2)}
    encoded = Codec("fp32").encode(params, base)
    assert encoded.tensors["values:wide"].tolist() == [1.0, math.inf]
    assert encoded.tensors["values:f8"].dtype == torch.float32
    assert Codec("int8").decode(Codec("int8").encode(params, base), base)["f8"].float().tolist() == [0.5]


def test_encode_fp64_base_takes_the_difference_before_rounding() -> None:
    base = {"w": torch.tensor([1e9, 1.0 / 3.0], dtype=torch.float64)}
    params = {"w": base["w"] + torch.tensor([2.0**-10, 0.0], dtype=torch.float64)}
    arrived = sent(Codec("topk", top_frac=1.0), params, base)["w"]
    assert torch.equal(arrived, params["w"])


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"w": torch.zeros(3), "other": torch.zeros(3)},
        {"w": torch.zeros(1)},
        {"w": torch.zeros(3, dtype=torch.int64)},
    ],
)
@by_name
def test_encode_params_that_do_not_fit_base_are_refused(codec: Codec, params: Params) -> None:
    with pytest.raises(ValueError, match="params must have"):
        codec.encode(params, {"w": torch.zeros(3)})


def test_encode_residual_that_does_not_fit_base_is_refused() -> None:
    for residual in ({"v": torch.zeros(3)}, {"w": torch.zeros(1)}):
        with pytest.raises(ValueError, match="residual must fit base"):
            Codec("int8").encode({"w": torch.zeros(3)}, {"w": torch.zeros(3)}, residual)


def test_topk_tensor_beyond_int32_indices_is_refused() -> None:
    huge = {"w": torch.zeros(1).expand(2**31)}  # one value in memory
    for call in (Codec("topk").max_bytes, lambda base: Codec("topk").encode(base, base)):
        with pytest.raises(ValueError, match="topk needs tensors of at most 2147483647 values"):
            call(huge)


def test_quantize_known_values_gives_closed_form() -> None:
    codes, scales = quantize(torch.tensor([127.0, -63.6, 0.4, 0.0, -254.0]), 4)
    assert codes.tolist() == [127, -64, 0, 0, -127]
    assert scales.tolist() == [1.0, 2.0]


def test_quantize_empty_and_shorter_than_block_have_no_padding_in_the_codes() -> None:
    for numel, num_scales in ((0, 0), (1, 1), (16, 1), (17, 2)):
        codes, scales = quantize(torch.ones(numel), 16)
        assert codes.shape == (numel,) and scales.shape == (num_scales,)
        assert torch.equal(dequantize(codes, scales, 16), torch.ones(numel))


@settings(max_examples=150, deadline=None)
@given(st.lists(FP32, max_size=50), st.sampled_from([16, 20]))
def test_quantize_error_is_at_most_half_a_scale_and_zero_stays(values: list[float], block: int) -> None:
    exact = torch.tensor(values, dtype=torch.float32)
    codes, scales = quantize(exact, block)
    arrived = dequantize(codes, scales, block)
    per_value = scales.repeat_interleave(block)[: len(values)].double()
    # Beyond the half: the quotient and the product, at most 127 scales, are each rounded to 2**-24 of themselves.
    bound = per_value * (0.5 + 2 * 127 * 2**-24)
    assert bool(((exact.double() - arrived.double()).abs() <= bound).all())
    assert bool((arrived[exact == 0.0] == 0.0).all())
    assert bool((scales >= TINY).all())


@settings(max_examples=150, deadline=None)
@given(st.lists(ANY_FP32, min_size=1, max_size=40), st.integers(1, 40))
def test_select_top_keeps_the_largest_and_spreads_them_back(values: list[float], num_top: int) -> None:
    exact = torch.tensor(values)
    num_top = min(num_top, len(values))
    indices, entries = select_top(exact, num_top)
    arrived = spread(indices, entries, len(values))
    magnitudes = exact.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    left_out = torch.ones(len(values), dtype=torch.bool)
    left_out[indices.long()] = False
    assert indices.tolist() == sorted(set(indices.tolist()))
    assert len(indices) == min(num_top, int((magnitudes > 0).sum()))
    torch.testing.assert_close(arrived[indices.long()], exact[indices.long()], rtol=0, atol=0, equal_nan=True)
    assert bool((arrived[left_out] == 0.0).all())
    if len(indices) and left_out.any():
        assert magnitudes[indices.long()].min() >= magnitudes[left_out].max()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(FP32, FP32), min_size=1, max_size=40))
def test_bf16_error_is_at_most_half_a_last_place_of_the_delta(pairs: list[tuple[float, float]]) -> None:
    params, base = ({"w": torch.tensor(column)} for column in zip(*pairs, strict=True))
    delta = params["w"].double() - base["w"].double()
    error = (sent(Codec("bf16"), params, base)["w"].double() - params["w"].double()).abs()
    # bf16 has 8 significant bits and its subnormals step by 2**-133; the rest is fp32 rounding of both operations.
    bound = delta.abs() * 2**-8 + 2**-134 + (delta.abs() + params["w"].double().abs()) * 2**-22
    assert bool((error <= bound).all())


@by_name
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_ledger_nonfinite_update_through_any_codec_is_refused_as_such(codec: Codec, bad: float) -> None:
    base = {"w": torch.ones(2000), "v": torch.ones(3)}
    params = {"w": torch.ones(2000), "v": torch.full((3,), 2.0)}
    params["w"][777] = bad
    assert verdict_on(sent(codec, params, base), base) is Verdict.NONFINITE


@lossy_by_name
def test_ledger_difference_that_overflows_is_refused_as_nonfinite(codec: Codec) -> None:
    base, params = {"w": torch.tensor([-3e38, 0.0])}, {"w": torch.tensor([3e38, 0.0])}
    assert verdict_on(sent(codec, params, base), base) is Verdict.NONFINITE


@by_name
def test_ledger_sound_update_through_any_codec_is_accepted(codec: Codec) -> None:
    base, params = mixed_params(0), mixed_params(1)
    assert verdict_on(sent(codec, params, base), base) is Verdict.ACCEPTED


def verdict_on(params: Params, base: Params) -> Verdict:
    roster = Roster("run", "s3cret")
    roster.join(0, 0)
    ledger = Ledger("block0", base, RoundRules(deadline_s=1.0), OuterSGD(), roster)
    ledger.open([0], 0.0)
    update = Update(
        run_id="run",
        token="s3cret",
        worker_id=0,
        incarnation=0,
        base_version=0,
        num_steps=1,
        num_tokens=1,
        params=params,
    )
    return ledger.submit(update, 0.0).verdict


@pytest.mark.parametrize("name", ["bf16", "int8", "topk"])
def test_spared_tensors_travel_as_they_are(name: CodecName) -> None:
    codec = Codec(name, spared=("running_var",))
    base = {"running_var": torch.tensor([1e-6, 3.0, 500.0]), "weight": torch.zeros(3)}
    params = {"running_var": torch.tensor([2e-6, 4.0, 1.0]), "weight": torch.tensor([1e-3, -1.0, 300.0])}
    encoded = codec.encode(params, base, {"running_var": torch.full((3,), -9.0)})
    decoded = codec.decode(encoded, base)
    assert torch.equal(decoded["running_var"], params["running_var"])
    assert not torch.equal(decoded["weight"], params["weight"])
    assert wire_bytes(encoded) <= codec.max_bytes(base)
    assert encoded.meta == Codec(name).meta
    with pytest.raises(ValueError, match=r"values:running_var must be there as a dense tensor"):
        codec.decode(Codec(name).encode(params, base), base)
