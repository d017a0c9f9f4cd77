"""A model as one file per block: what a host loads, how the weights are named, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_blocktrain.errors import CheckpointMismatchError
from lightning_blocktrain.models import ByteTransformer, DiffusionBlocks
from lightning_blocktrain.models.block_files import load_blocks, read_manifest, write_blocks
from lightning_blocktrain.models.loading import Model, save_model
from tests.models.cases import CAUSAL, NOISY, T, causal, lively, noisy

OWN = {"exits": "own"}


@pytest.mark.parametrize("case", [*CAUSAL, *NOISY], ids=str)
@pytest.mark.parametrize("source", ["folder", "checkpoint"])
def test_a_loaded_block_computes_what_the_whole_model_computes(
    case: tuple[str, str], source: str, tmp_path: Path
) -> None:
    model = lively(*case)
    path = tmp_path / source
    write_blocks(model, path) if source == "folder" else save_model(model, path)
    inputs, noise = torch.arange(T)[None], model.draw_noise((1, T), torch.Generator().manual_seed(0))
    whole = model.start(inputs, noise)
    carried: dict[str, torch.Tensor] = {}
    for block_idx in range(3):
        part, manifest = load_blocks(path, [block_idx])
        state = part.resumed(inputs, carried) if block_idx else part.start(inputs, noise)
        state, whole = part.step(block_idx, state), model.step(block_idx, whole)
        assert torch.equal(part.read(block_idx, state), model.read(block_idx, whole))
        carried = part.carried(state)
    assert manifest.num_blocks == 3


@pytest.mark.parametrize("options", [{}, OWN], ids=str)
def test_only_the_blocks_asked_for_and_the_interface_take_memory(options: dict[str, Any], tmp_path: Path) -> None:
    model = causal("features", **options)
    write_blocks(model, tmp_path / "m")
    part, _ = load_blocks(tmp_path / "m", [1])
    held = {name for name, tensor in part.named_parameters() if not tensor.is_meta}
    readout = {"readout.norm.weight", "readout.norm.bias", "readout.unembed.weight"}
    own = {f"exits.1.{name.removeprefix('readout.')}" for name in readout} if options else readout
    assert held == own | {name for name, _ in model.named_parameters() if name.startswith("layers.1.")}
    with pytest.raises(RuntimeError, match="meta"):
        part.step(0, part.resumed(torch.zeros(1, 1, dtype=torch.int64), {"0": torch.zeros(1, 1, model.width)}))


def test_weights_are_mapped_where_kernels_sum_alike(tmp_path: Path) -> None:
    write_blocks(noisy("denoise"), tmp_path / "m")
    for file in (tmp_path / "m").glob("*.safetensors"):
        assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64 == 0
    part, _ = load_blocks(tmp_path / "m", [0, 2])
    assert {tensor.data_ptr() % 64 for tensor in part.parameters() if tensor.dim() == 2 and not tensor.is_meta} == {0}


def test_version_names_the_weights_and_what_they_mean(tmp_path: Path) -> None:
    model = noisy("denoise")
    first = write_blocks(model, tmp_path / "first")
    save_model(model, tmp_path / "first.ckpt")
    assert read_manifest(tmp_path / "first") == first
    assert load_blocks(tmp_path / "first.ckpt", [0])[1].version == first.version
    assert write_blocks(model, tmp_path / "half", "bf16").version != first.version
    other_range = noisy("denoise", sigma_max=9.0)
    other_range.load_state_dict(model.state_dict())
    assert write_blocks(other_range, tmp_path / "range").version != first.version
    other_heads = noisy("denoise", num_heads=4)
    other_heads.load_state_dict(model.state_dict())
    assert write_blocks(other_heads, tmp_path / "heads").version != first.version
    other_rate = noisy("denoise", lr=7e-4)
    other_rate.load_state_dict(model.state_dict())
    assert write_blocks(other_rate, tmp_path / "rate").version == first.version
    model.layers[1].mlp.up.bias.data[3] += 1e-3
    assert write_blocks(model, tmp_path / "second").version != first.version


def test_dtype_is_that_of_the_computation(tmp_path: Path) -> None:
    model = noisy("denoise_features")
    write_blocks(model, tmp_path / "m")
    part, _ = load_blocks(tmp_path / "m", [0, 1, 2], "bf16")
    assert {tensor.dtype for tensor in part.parameters()} == {torch.bfloat16}
    inputs, noise = torch.arange(T)[None], model.draw_noise((1, T), torch.Generator().manual_seed(0))
    logits = part.exit_logits(inputs, noise=noise)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.softmax(-1), model.exit_logits(inputs, noise=noise).softmax(-1), atol=0.1, rtol=0)


@pytest.mark.parametrize(
    ("blocks", "words"), [([], "blocks=\\[\\]"), ([3], "0 to 2.*blocks=\\[3\\]"), ([1, 1], "each once.*\\[1, 1\\]")]
)
def test_blocks_that_are_not_there_are_refused(blocks: list[int], words: str, tmp_path: Path) -> None:
    write_blocks(causal("features"), tmp_path / "m")
    with pytest.raises(ValueError, match=words):
        load_blocks(tmp_path / "m", blocks)


def test_a_folder_that_holds_a_model_is_not_written_again(tmp_path: Path) -> None:
    write_blocks(causal("features"), tmp_path / "m")
    before = {file.name: file.read_bytes() for file in (tmp_path / "m").iterdir()}
    with pytest.raises(ValueError, match="must not hold an exported model yet"):
        write_blocks(causal("features"), tmp_path / "m")
    assert {file.name: file.read_bytes() for file in (tmp_path / "m").iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"must be written to a folder; got .*file, a file"):
        write_blocks(causal("features"), tmp_path / "file")
    with pytest.raises(ValueError, match="must be written to a folder that can be made"):
        write_blocks(causal("features"), tmp_path / "file" / "m")


def test_exported_files_may_be_read_as_any_new_file(tmp_path: Path) -> None:
    write_blocks(causal("features"), tmp_path / "m")
    (tmp_path / "new").write_text("")
    assert {file.stat().st_mode for file in (tmp_path / "m").iterdir()} == {(tmp_path / "new").stat().st_mode}


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"must be a checkpoint or a folder .*; got .*none, which is not"):
        load_blocks(tmp_path / "none", None)


def _edit(folder: Path, **fields: Any) -> None:
    text = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(text | fields))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "must hold an exported model"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "must hold an exported model"),
        (lambda folder: _edit(folder, format=2), "must hold an exported model"),
        (lambda folder: _edit(folder, model_class="Path"), "must hold an exported model"),
        (lambda folder: _edit(folder, num_blocks=2), "as it was exported"),
        (lambda folder: (folder / "block1.safetensors").unlink(), "block1.safetensors"),
        (lambda folder: (folder / "block1.safetensors").write_bytes(b"abc"), "whole safetensors file"),
        (
            lambda folder: (folder / "block1.safetensors").write_bytes((folder / "block2.safetensors").read_bytes()),
            "tensors of block1 must be those that were exported",
        ),
    ],
)
def test_a_damaged_folder_is_refused(damage: Any, words: str, tmp_path: Path) -> None:
    write_blocks(causal("features"), tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(CheckpointMismatchError, match=words):
        load_blocks(tmp_path / "m", [1])


def test_arguments_that_do_not_fit_the_weights_are_refused(tmp_path: Path) -> None:
    write_blocks(causal("features"), tmp_path / "m")
    arguments = json.loads((tmp_path / "m" / "manifest.json").read_text())["arguments"]
    wider = replace(read_manifest(tmp_path / "m"), arguments=arguments | {"width": 32})
    _edit(tmp_path / "m", arguments=wider.arguments, version=wider.version)
    with pytest.raises(CheckpointMismatchError, match=r"other names or shapes: layers\.1\."):
        load_blocks(tmp_path / "m", [1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arguments": {"foo": 1}}, "must describe a model of ours and all of its entries; got .*foo"),
        ({"arguments": {"num_layers": 5}}, "must describe a model of ours"),
        ({"digests": {"block0": "0"}}, "must describe a model of ours and all of its entries; got .*entries block0"),
    ],
)
def test_a_manifest_that_describes_no_model_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_blocks(causal("features"), tmp_path / "m")
    there = read_manifest(tmp_path / "m")
    merged = {"arguments": {**there.arguments, **changes.get("arguments", {})}}
    crafted = replace(there, **{**changes, **merged})
    _edit(tmp_path / "m", arguments=crafted.arguments, digests=crafted.digests, version=crafted.version)
    with pytest.raises(CheckpointMismatchError, match=words):
        load_blocks(tmp_path / "m", [1])


@pytest.mark.parametrize("kind", [ByteTransformer, DiffusionBlocks])
def test_a_model_with_every_default_survives(kind: type[Model], tmp_path: Path) -> None:
    model = kind(num_layers=4, num_blocks=2, width=32).eval()
    write_blocks(model, tmp_path / "m")
    part, _ = load_blocks(tmp_path / "m", [0, 1])
    assert part.device == model.device
    assert part.generate(b"abc", 5, seed=1) == model.generate(b"abc", 5, seed=1)
    assert part.arguments() == model.arguments()
