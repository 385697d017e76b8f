"""What a module acts as: the value that a table has for its class, or for a parent whose map it does not change.

And :class:`Registry`, a table to which users add.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from ebflow_plugin.errors import EBFlowError, UnknownNameError, suggest

K = TypeVar("K")
T = TypeVar("T")

# Methods that a subclass may override without changing the map of its parent.
_HARMLESS = frozenset({"extra_repr", "train", "eval", "state_dict", "load_state_dict"})
# The special methods that change it.
_DECIDING = frozenset({"__call__", "__getattr__", "__getattribute__"})


class Registry(dict[K, T]):
    """Values by class, or by name: a dictionary that refuses duplicates.

    Arguments:
        kind: What the values are, for messages.
        values: The first of them.

    Example:
        >>> losses = Registry("objective", {"ssm": 1})
        >>> losses.named("smm")
        Traceback (most recent call last):
        ebflow_plugin.errors.UnknownNameError: unknown objective 'smm'. Did you mean 'ssm'? Valid names: ssm.
    """

    def __init__(self, kind: str, values: Mapping[K, T] = MappingProxyType({})) -> None:
        super().__init__(values)
        self.kind = kind

    def add(self, key: K, value: T, force: bool = False) -> None:
        """Registers a value; an existing class or name needs ``force=True``."""
        if not isinstance(key, (type, str)):
            raise EBFlowError(f"a {self.kind} is registered for a class, not for {key!r}")
        if key in self and not force:
            name = repr(key) if isinstance(key, str) else f"of {key.__name__}"
            raise EBFlowError(f"{self.kind} {name} is registered already; pass force=True to replace it")
        self[key] = value

    def named(self, name: K) -> T:
        """Returns a value, or raises :class:`UnknownNameError` with similar and valid names."""
        if name not in self:
            raise UnknownNameError(f"unknown {self.kind} {name!r}. {suggest(str(name), map(str, self))}")
        return self[name]


def resolve(module: Any, find: Callable[[type], T | None]) -> tuple[T | None, str]:
    """Finds the value registered for a module's class, or for a parent whose map the class does not change.

    Returns:
        The value, or None with the reason.
    """
    if has_hooks(module):
        return None, "unknown: forward hooks may change what it does"
    cls = type(module)
    for parent in cls.__mro__:
        value = find(parent)
        if value is not None:
            changed = changes_the_map(module, parent)
            return (None, f"unknown: overrides {changed} of {parent.__name__}") if changed else (value, "")
    return None, "unknown class"


def known_class(thing: object, packages: tuple[str, ...], names: Collection[str] | None = None) -> str | None:
    """The name of the class of these packages that an object acts as: its own, or that of a parent it does not change.

    Arguments:
        thing: The object.
        packages: The packages.
        names: The names to look for; all by default.

    Example:
        >>> known_class(nn.Tanh(), ("torch",)), known_class(nn.Tanh(), ("torch",), ["ReLU"])
        ('Tanh', None)
    """
    classes = [cls for cls in type(thing).__mro__ if cls.__module__.partition(".")[0] in packages]
    found = {cls: cls.__name__ for cls in classes if names is None or cls.__name__ in names}
    return resolve(thing, found.get)[0]


def has_hooks(module: Any) -> bool:
    """Whether forward hooks may change what a module does.

    Example:
        >>> module = nn.Tanh()
        >>> handle = module.register_forward_hook(lambda *args: None)
        >>> has_hooks(module), handle.remove(), has_hooks(module)
        (True, None, False)
    """
    return isinstance(module, nn.Module) and bool(module._forward_hooks or module._forward_pre_hooks)


def altered_part(module: Any) -> str | None:
    """The path of a hooked or patched submodule; None if all submodules act as their classes do.

    Example:
        >>> net = nn.Sequential(nn.Tanh())
        >>> net[0].forward = lambda x: 2 * x
        >>> altered_part(net)
        '0'
    """
    inside = module.named_modules() if isinstance(module, nn.Module) else ()
    return next((path for path, part in inside if has_hooks(part) or changes_the_map(part, type(part))), None)


def changes_the_map(module: Any, parent: type) -> str | None:
    """The name of a method of ``parent`` that the module's class, or the module itself, overrides; None if none is.

    Any method counts, not only ``forward`` and ``inverse``, since a parent's ``forward`` may call it. Of the special
    methods, only those that change calls or attribute access count.

    Example:
        >>> class Doubled(nn.Tanh):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> changes_the_map(Doubled(), nn.Tanh)
        'forward'
    """
    cls = type(module)
    layers = [vars(module), *(vars(child) for child in cls.__mro__[: cls.__mro__.index(parent)])]
    for names in layers:
        for name in names:
            inherited = getattr(parent, name, None)
            harmless = name in _HARMLESS or (name.startswith("__") and name not in _DECIDING)
            if not harmless and _is_behaviour(inherited):
                return name
    return None


def _is_behaviour(attribute: Any) -> bool:
    return callable(attribute) or isinstance(attribute, property)
