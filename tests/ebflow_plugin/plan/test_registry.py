import pytest
from torch import nn

import ebflow_plugin as ebf
from ebflow_plugin.plan.registry import Registry, changes_the_map, resolve


class Parent(nn.Module):
    def forward(self, x):
        return self.helper(x)

    def helper(self, x):
        return x


class OnlyInit(Parent):
    def __init__(self):
        super().__init__()

    def extra_repr(self):
        return "mine"


class OwnHelper(Parent):
    def helper(self, x):
        return 2 * x


class OwnCall(Parent):
    def __call__(self, x):
        return super().__call__(x) + 1


class Mixin:
    def forward(self, x):
        return x + 1


class Mixed(Mixin, Parent):
    pass


@pytest.mark.parametrize(
    ("cls", "changed"),
    [(Parent, None), (OnlyInit, None), (OwnHelper, "helper"), (OwnCall, "__call__"), (Mixed, "forward")],
)
def test_a_subclass_that_overrides_any_method_is_another_map(cls, changed):
    assert changes_the_map(cls(), Parent) == changed


def test_an_instance_with_a_forward_of_its_own_is_another_map():
    module = Parent()
    module.forward = lambda x: x
    assert changes_the_map(module, Parent) == "forward"


def find(cls):
    return "rule" if cls is Parent else None


def test_resolve():
    assert resolve(Parent(), find) == ("rule", "")
    assert resolve(OnlyInit(), find) == ("rule", "")
    assert resolve(OwnHelper(), find) == (None, "unknown: overrides helper of Parent")
    assert resolve(OwnCall(), find) == (None, "unknown: overrides __call__ of Parent")
    assert resolve(nn.Tanh(), find) == (None, "unknown class")


def test_forward_hooks_make_a_module_unknown():
    module = Parent()
    module.register_forward_pre_hook(lambda module, args: args)
    rule, why = resolve(module, find)
    assert rule is None
    assert "hooks" in why


def test_only_classes_have_a_rule():
    with pytest.raises(ebf.EBFlowError, match="for a class"):
        Registry("rule").add(Parent(), 1)
