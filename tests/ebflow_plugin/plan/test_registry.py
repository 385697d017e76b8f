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


class Mixin:
    def forward(self, x):
        return x + 1


class Mixed(Mixin, Parent):
    pass


@pytest.mark.parametrize(
    ("cls", "changed"), [(Parent, None), (OnlyInit, None), (OwnHelper, "helper"), (Mixed, "forward")]
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
    assert resolve(nn.Tanh(), find) == (None, "unknown class")


def test_forward_hooks_make_a_module_unknown():
    module = Parent()
    module.register_forward_pre_hook(lambda module, args: args)
    rule, why = resolve(module, find)
    assert rule is None
    assert "hooks" in why


def test_registries_refuse_duplicates():
    for kind, key in (("rule", Parent), ("objective", "ssm")):
        registry = Registry(kind)
        registry.add(key, 1)
        with pytest.raises(ebf.EBFlowError, match=f"{kind} .*{getattr(key, '__name__', key)}.*force=True"):
            registry.add(key, 2)
        assert registry[key] == 1
        registry.add(key, 2, force=True)
        assert registry.get(key) == 2


def test_unknown_names_come_with_a_suggestion():
    names = Registry("objective", {"ssm": 1, "dsm": 2})
    with pytest.raises(
        ebf.UnknownNameError, match=r"unknown objective 'ssmm'\. Did you mean 'ssm'\? Valid names: dsm, ssm"
    ):
        names.named("ssmm")


def test_only_classes_have_a_rule():
    with pytest.raises(ebf.EBFlowError, match="for a class"):
        Registry("rule").add(Parent(), 1)


class OwnCall(Parent):
    def __call__(self, x):
        return super().__call__(x) + 1


def test_a_class_with_a_call_of_its_own_is_another_one():
    assert changes_the_map(OwnCall(), Parent) == "__call__"
    assert resolve(OwnCall(), {Parent: "known"}.get) == (None, "unknown: overrides __call__ of Parent")
