"""Building the user's model: the same initial weights on every plan, and a clear word on what cannot be trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from echelon.errors import ConfigError, users_code
from echelon.randomness import Generators, init_seed


def build_module(make: Callable[[], nn.Module], seed: int, device: torch.device) -> nn.Module:
    """Call the user's factory under the job's own random state and move the model to its device."""
    Generators.of().set(init_seed(seed))
    with users_code("making the model"):
        module = make()
    if not isinstance(module, nn.Module):
        raise ConfigError("model", f"model() must return a torch.nn.Module; it returned {type(module).__name__}")
    check_module(module)
    return module.to(device).train()


def check_module(module: nn.Module) -> None:
    """Refuse what would train wrongly or not at all."""
    if hasattr(module, "_orig_mod"):
        raise ConfigError("model", "is compiled already; give the module itself, and compile=True to the job")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ConfigError("model", f"is wrapped in {type(module).__name__}; give the module itself, the plan does that")
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise ConfigError(
                "model",
                f"{name or 'the model'} is SyncBatchNorm, which normalises over whoever happens to be there; "
                "use BatchNorm: Echelon normalises by slice, the same on any number of workers",
            )
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ConfigError("model", f"{name or 'the model'} has sparse gradients; use sparse=False under this plan")
    lazy = [name for name, p in module.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise ConfigError(
            "model", f"{lazy[0]} has no shape yet (a Lazy module); run one batch through it in model() first"
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigError("model", "it has no parameter that requires a gradient; there is nothing to train")


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that is trained, by its first name, in the order the module registers them."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Every buffer that belongs to the model's state, by its name."""
    names = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers() if name in names}


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by the user's names; tied ones under each of their names."""
    kept = module.state_dict(keep_vars=True)
    return {name: value.detach() for name, value in kept.items() if isinstance(value, Tensor)}
