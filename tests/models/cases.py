"""Tiny models of every class and objective, whose logits differ clearly between bytes, contexts, blocks and z."""

from typing import Any

import torch
from torch import Tensor

from lightning_blocktrain.models import ByteTransformer, DiffusionBlocks
from lightning_blocktrain.models.loading import CLASSES, Model

CAUSAL = [("ByteTransformer", objective) for objective in ("features", "residual")]
NOISY = [("DiffusionBlocks", objective) for objective in ("denoise", "denoise_features", "mse")]
READS_PREFIX = {"features", "residual", "denoise_features"}

T, D, V = 8, 16, 256
SMALL: dict[str, Any] = {"num_layers": 3, "num_blocks": 3, "width": D, "num_heads": 2, "window_bytes": T}


def lively(kind: str, objective: str, **options: Any) -> Model:
    """Return a model in eval mode with p_span above 0, so that it has a row for unknown bytes, without lookahead."""
    alone = {"lookahead": 0} if kind == "ByteTransformer" else {}
    model = CLASSES[kind](**{**SMALL, **alone, "p_span": 0.5, "objective": objective, **options}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and not name.startswith("noise_embedding"):
                parameter.normal_(std=0.4)
    return model


def causal(objective: str, **options: Any) -> ByteTransformer:
    model = lively("ByteTransformer", objective, **options)
    assert isinstance(model, ByteTransformer)
    return model


def noisy(objective: str, **options: Any) -> DiffusionBlocks:
    model = lively("DiffusionBlocks", objective, **options)
    assert isinstance(model, DiffusionBlocks)
    return model


def random_batch(num_sequences: int = 4) -> tuple[Tensor, Tensor]:
    text = torch.randint(V, (num_sequences, T + 1))
    return text[:, :-1], text[:, 1:]
