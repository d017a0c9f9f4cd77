import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_blocktrain.rounds.verdicts import RoundReport, Update, block_entry, form_fault, header_fault

MASTER = {"w": torch.zeros(3), "n": torch.zeros((), dtype=torch.int64)}
GOOD = Update(
    run_id="run",
    token="s3cret",
    worker_id=0,
    incarnation=0,
    base_version=0,
    num_steps=1,
    num_tokens=8,
    params={"w": torch.ones(3), "n": torch.tensor(1)},
)


def changed(**fields: Any) -> Update:
    return dataclasses.replace(GOOD, **fields)


def test_form_fault_fitting_update_is_none() -> None:
    assert form_fault(GOOD, MASTER) is None
    assert header_fault(GOOD) is None


@pytest.mark.parametrize(
    "num_tokens", [0, -1, float("nan"), 3.0, None, True, "8", 2**53, pytest.param(10**5000, id="huge")]
)
def test_form_fault_token_count_that_is_no_positive_int_is_named(num_tokens: object) -> None:
    fault = form_fault(changed(num_tokens=num_tokens), MASTER)
    assert fault is not None and fault.startswith("num_tokens must be a positive int")


@pytest.mark.parametrize("num_steps", [-1, 1.5, None])
def test_form_fault_bad_step_count_is_named(num_steps: object) -> None:
    fault = form_fault(changed(num_steps=num_steps), MASTER)
    assert fault is not None and fault.startswith("num_steps must be a non-negative int")


def test_form_fault_zero_steps_fit() -> None:
    assert form_fault(changed(num_steps=0), MASTER) is None


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"w": torch.ones(1)}, "w must have shape (3,); got (1,)"),
        ({"w": torch.ones(1, 3)}, "w must have shape (3,); got (1, 3)"),
        ({"w": torch.ones(3, dtype=torch.int64)}, "w must be float32; got int64"),
        ({"w": torch.ones(3, dtype=torch.complex64)}, "w must be float32; got complex64"),
        ({"n": torch.tensor(1.0)}, "n must be int64; got float32"),
        ({"n": torch.tensor(1, dtype=torch.int32)}, "n must be int64; got int32"),
        ({"w": torch.ones(3).to_sparse()}, "w must be a dense tensor"),
        ({"w": torch.ones(3, device="meta")}, "w must be a dense tensor"),
        ({"w": [1.0, 1.0, 1.0]}, "w must be a dense tensor"),
        ({"../w": torch.ones(3)}, "not known ['../w']"),
    ],
)
def test_form_fault_tensor_that_does_not_fit_is_named(tensors: dict[str, Tensor], words: str) -> None:
    fault = form_fault(changed(params={**GOOD.params, **tensors}), MASTER)
    assert fault is not None and words in fault


def test_form_fault_missing_tensor_is_named() -> None:
    fault = form_fault(changed(params={"w": torch.ones(3)}), MASTER)
    assert fault is not None and "missing ['n']" in fault


def test_form_fault_params_that_are_no_mapping_are_named() -> None:
    assert form_fault(changed(params=[torch.ones(3)]), MASTER) == "params must map names to tensors; got list."


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_form_fault_any_floating_dtype_fits_a_floating_master(dtype: torch.dtype) -> None:
    assert form_fault(changed(params={**GOOD.params, "w": torch.ones(3, dtype=dtype)}), MASTER) is None


@pytest.mark.parametrize("name", ["worker_id", "incarnation", "base_version"])
@pytest.mark.parametrize("value", [-1, 1.0, None, [0], pytest.param(10**5000, id="huge")])
def test_header_fault_number_that_does_not_fit_is_named(name: str, value: object) -> None:
    fault = header_fault(changed(**{name: value}))
    assert fault is not None and fault.startswith(f"{name} must be a non-negative int")


def test_update_representation_shows_no_token() -> None:
    assert "s3cret" not in repr(GOOD)


def test_block_entry_names_the_block() -> None:
    assert block_entry(2) == "block2"


def make_report(expected: tuple[int, ...], accepted: tuple[int, ...]) -> RoundReport:
    return RoundReport("block0", 0, 1, expected, accepted, (), (), {}, True, "", 8, 1, 0.0, 0.0, 0.0, 1.0)


def test_report_participation_counts_expected_workers_only() -> None:
    assert make_report((0, 1, 2, 3), (0, 2, 9)).participation == 0.5


def test_report_participation_nobody_expected_is_zero() -> None:
    assert make_report((), (9,)).participation == 0.0
