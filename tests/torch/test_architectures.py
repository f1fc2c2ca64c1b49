"""Networks of torchvision, timm, transformers and diffusers, small and with random weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

import schedules.torch as kernels  # noqa: E402
from tests.torch.test_network import stand_in  # noqa: E402, F401

os.environ.setdefault("HF_HUB_OFFLINE", "1")
Made = tuple[Any, Any]  # a model and its inputs


def image(size: int = 32) -> Any:
    return torch.randn(1, 3, size, size)


def resnet() -> Made:
    models = pytest.importorskip("torchvision").models
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10), image()


def mobilenet() -> Made:
    return pytest.importorskip("torchvision").models.mobilenet_v3_small(width_mult=0.25, num_classes=10), image()


def densenet() -> Made:
    return pytest.importorskip("torchvision").models.DenseNet(8, (2, 2), 16, num_classes=10), image()


def vit() -> Made:
    model = pytest.importorskip("torchvision").models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10)
    torch.nn.init.normal_(model.heads.head.weight)
    return model, image()


def convnext() -> Made:
    timm = pytest.importorskip("timm")
    return timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), num_classes=10), image(64)


def regnet() -> Made:
    return pytest.importorskip("timm").create_model("regnetx_002", num_classes=10), image()


def gpt2() -> Made:
    transformers = pytest.importorskip("transformers")
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, **ends)
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.arange(12)[None]}


def bert() -> Made:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=100, attn_implementation="eager", **sizes)
    return transformers.BertModel(config), {"input_ids": torch.arange(12)[None]}


def unet() -> Made:
    model = pytest.importorskip("diffusers").UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return model, (torch.randn(1, 4, 16, 16), torch.tensor(3), torch.randn(1, 5, 32))


def vae() -> Made:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = pytest.importorskip("diffusers").AutoencoderKL(block_out_channels=(32, 64), norm_num_groups=8, **blocks)
    return model, torch.randn(1, 3, 16, 16)


# by our kernels, of the layers; and what the others are
NETWORKS: dict[Callable[[], Made], tuple[int, int, set[str]]] = {
    resnet: (12, 12, set()),
    mobilenet: (52, 52, set()),
    densenet: (10, 10, set()),
    vit: (1, 3, {"attention"}),
    convnext: (16, 16, set()),
    regnet: (31, 44, {"groups"}),
    gpt2: (0, 2, {"attention"}),
    bert: (2, 2, set()),
    unet: (33, 41, {"attention"}),
    vae: (30, 32, {"attention"}),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def tensors(outputs: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(list(outputs.values()) if hasattr(outputs, "keys") else outputs)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def same_numbers(make: Callable[[], Made]) -> None:
    model, inputs = make()
    for norm in model.eval().modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 2)
    arguments, named = (
        ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
    )
    with torch.no_grad():
        wanted = tensors(model(*arguments, **named))
    optimized = kernels.optimize(model, inputs)
    for y, expected in zip(tensors(optimized(*arguments, **named)), wanted, strict=True):
        assert torch.linalg.vector_norm(y - expected) <= 1e-5 * torch.linalg.vector_norm(expected)
    report = optimized.report
    served, layers, left = NETWORKS[make]
    assert (len(report.replaced), len(report.rows), report.notes) == (served, layers, [])
    assert {row.why.split()[-1] for row in report.rows if not row.kernel} == left


@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
def test_layers_are_served(make: Callable[[], Made], stand_in: None) -> None:  # noqa: F811
    same_numbers(make)


@pytest.mark.parametrize("make", [densenet, bert], ids=lambda make: make.__name__)
def test_networks_by_kernels(make: Callable[[], Made]) -> None:
    same_numbers(make)
