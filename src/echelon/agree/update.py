"""The agreed gradient becomes new parameters: clip, optimizer, schedule. And their state, by parameter name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from echelon.agree.norm import global_norm
from echelon.errors import ConfigError, users_code
from echelon.state import State


class Update:
    """Applies one agreed gradient. The optimizer and its schedule are the user's own."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        make_schedule: Callable[[Optimizer], LRScheduler] | None,
        *,
        clip: float | None,
        exact: bool,
    ) -> None:
        self._parameters = parameters
        self._clip = clip
        self._exact = exact
        with users_code("making the optimizer"):
            self.optimizer = make_optimizer(list(parameters.values()))
        check_optimizer(self.optimizer, parameters)
        with users_code("making the schedule"):
            self.schedule = make_schedule(self.optimizer) if make_schedule else None
        if isinstance(self.schedule, ReduceLROnPlateau):
            raise ConfigError(
                "schedule", "ReduceLROnPlateau needs a metric at every step; use a schedule of the step count"
            )
        if make_schedule is not None and not isinstance(self.schedule, LRScheduler):
            raise ConfigError(
                "schedule",
                f"schedule(optimizer) must return a torch LRScheduler; it returned {type(self.schedule).__name__}",
            )
        self._names = {id(parameter): name for name, parameter in parameters.items()}

    def apply(self) -> Tensor | None:
        """Clip by the global norm, step the optimizer, step the schedule. Returns the norm before clipping if it was
        taken.
        """
        norm = None
        if self._clip is not None:
            gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            norm = global_norm(gradients, self._exact)
            scale = (self._clip / (norm + 1e-6)).clamp(max=1.0)
            if gradients:
                torch._foreach_mul_(list(gradients.values()), scale.to(torch.float32))
        with users_code("stepping the optimizer"):
            self.optimizer.step()
        self._advance()
        return norm

    def skip(self) -> None:
        """A committed step moves the schedule on, also one that updates nothing."""
        with warnings.catch_warnings():  # torch warns of a schedule that is stepped before the optimizer
            warnings.filterwarnings("ignore", message="Detected call of")
            self._advance()

    def _advance(self) -> None:
        if self.schedule is not None:
            with users_code("stepping the schedule"):
                self.schedule.step()

    def export(self, state: State) -> None:
        """Write the optimizer's and the schedule's state into `state`."""
        packed = self.optimizer.state_dict()
        names = [self._names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        plain: dict[str, dict[str, Any]] = {}
        other = {}
        for index, entries in packed["state"].items():
            if not _is_place(index, names):
                other[index] = entries
                continue
            for key, value in entries.items():
                if isinstance(value, Tensor) and isinstance(key, str) and "/" not in key:
                    state.tensors[f"optimizer/{names[index]}/{key}"] = value
                else:
                    plain.setdefault(names[index], {})[key] = value
        groups = [{**group, "params": [names[i] for i in group["params"]]} for group in packed["param_groups"]]
        state.values["optimizer"] = {
            "kind": type(self.optimizer).__name__,
            "groups": groups,
            "plain": plain,
            "other": other,
        }
        state.values["schedule"] = self.schedule.state_dict() if self.schedule is not None else None

    def restore(self, state: State) -> None:
        saved = state.values["optimizer"]
        if saved["kind"] != type(self.optimizer).__name__:
            raise ConfigError(
                "optimizer",
                f"the checkpoint was made by {saved['kind']} and this job uses {type(self.optimizer).__name__}; "
                "start anew with another --out",
            )
        names = [self._names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        saved_names = [name for group in saved["groups"] for name in group["params"]]
        if names != saved_names:
            raise ConfigError(
                "optimizer", "its parameter groups are not those of the checkpoint; start anew with another --out"
            )
        index = {name: i for i, name in enumerate(names)}
        entries: dict[Any, Any] = {index[name]: dict(values) for name, values in saved["plain"].items()}
        for path, tensor in state.tensors.items():
            kind, _, rest = path.partition("/")
            if kind == "optimizer":
                name, _, key = rest.rpartition("/")
                entries.setdefault(index[name], {})[key] = tensor
        groups = [{**group, "params": [index[name] for name in group["params"]]} for group in saved["groups"]]
        self.optimizer.load_state_dict({"state": entries | saved["other"], "param_groups": groups})
        if self.schedule is not None and state.values["schedule"] is not None:
            self.schedule.load_state_dict(state.values["schedule"])


def _is_place(index: Any, names: Sequence[str]) -> bool:
    """Whether an entry of the optimizer's state belongs to a parameter; torch allows others."""
    return type(index) is int and 0 <= index < len(names)


def check_optimizer(optimizer: object, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse what cannot be stepped once with a given gradient."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "optimizer",
            f"optimizer(params) must return a torch.optim.Optimizer; it returned {type(optimizer).__name__}",
        )
    known = {id(parameter) for parameter in parameters.values()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "optimizer", "it holds parameters that are not the model's; build it from the params it is given"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            "optimizer",
            f"{type(optimizer).__name__} computes the loss again inside step(); use one that takes a given gradient",
        )
