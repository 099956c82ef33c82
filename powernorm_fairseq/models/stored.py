"""Hydra's store of configs, filled without building each config: that takes 10 ms, and there are 36 models."""

import inspect
from contextlib import contextmanager
from typing import Any, Iterator, Optional

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf


class _Later(ConfigNode):
    """A config that is built when Hydra first asks for it."""

    def __init__(self, name: str, source: Any, group: str, package: Optional[str], provider: Optional[str]) -> None:
        self.name, self.group, self.package, self.provider = name, group, package, provider
        self._source = source
        self._built: Optional[DictConfig] = None

    @property
    def node(self) -> DictConfig:
        if self._built is None:
            self._built = OmegaConf.structured(self._source)
        return self._built

    @node.setter
    def node(self, node: DictConfig) -> None:
        self._built = node


@contextmanager
def stored_when_asked_for(group: str) -> Iterator[None]:
    """Within this context what is stored under ``group`` is built later; all else is stored as always."""
    store = ConfigStore.instance()
    at_once = store.store
    # Of Hydra 1.0 it is "_group_": without it what is stored would not be put under its group.
    default: Optional[str] = inspect.signature(at_once).parameters["package"].default

    def later(
        name: str,
        node: Any,
        group: Optional[str] = None,
        package: Optional[str] = default,
        provider: Optional[str] = None,
    ) -> None:
        if group != kept:
            at_once(name, node, group, package, provider)
            return
        file = name if name.endswith(".yaml") else f"{name}.yaml"
        store.repo.setdefault(group, {})[file] = _Later(file, node, group, package, provider)

    kept = group
    store.store = later  # type: ignore[method-assign]
    try:
        yield
    finally:
        del store.store
