"""Stand-ins for packages of engines, for modules that only import names of them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


@contextmanager
def absent_packages(*packages: str) -> Iterator[None]:
    """Modules of these packages have every name. Modules that were imported meanwhile are forgotten at the end."""
    before, finder = set(sys.modules), Finder(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.startswith((*packages, "larder_kv.")):
                del sys.modules[name]


class AnyName(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Names(ModuleType):
    """A module that has every name, as a class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, AnyName(name, (), {}))
        return vars(self)[name]


class Finder(MetaPathFinder, Loader):
    """Finds such modules in these packages."""

    def __init__(self, packages: tuple[str, ...]):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec):
        return Names(spec.name)

    def exec_module(self, module):
        pass
