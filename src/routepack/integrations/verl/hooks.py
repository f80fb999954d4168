"""Change a module when it is imported, and not before.

verl loads its plugins in every process, while its own package is still being imported. Importing
the trainer or an engine there would be slow where neither is needed (rollout servers, reward
workers) and circular where they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

Patch = Callable[[ModuleType], None]


def when_imported(name: str, patch: Patch) -> None:
    """Call `patch` with module `name` once it is imported; now, if it already is."""
    module = sys.modules.get(name)
    if module is not None:
        patch(module)
        return
    sys.meta_path.insert(0, _Finder(name, patch))


class _Finder(MetaPathFinder):
    """Finds one module, by the finders behind it, and leaves `sys.meta_path` when it has."""

    def __init__(self, name: str, patch: Patch) -> None:
        self.name, self.patch = name, patch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that patches after it has run."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self.patch)
        return spec


class _PatchingLoader(Loader):
    def __init__(self, loader: Loader, patch: Patch) -> None:
        self.loader, self.patch = loader, patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader  # as if never wrapped
        self.loader.exec_module(module)
        self.patch(module)
