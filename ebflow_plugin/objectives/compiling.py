r"""One compiled graph for a loss and its gradients.

The loss of a batch has two parts. What reads values or draws numbers (checks, preprocessing, noise) runs as ever. The
rest is a pure function of tensors: it is traced together with the gradients of its result, and with the gradients in x
that score matching takes inside of it, and handed to :func:`torch.compile` as one graph of plain tensor operations.
``loss.backward()`` then finds the gradients ready.

The trace calls the steps with tensors that have shapes and no values. A step that reads values is refused, by name.
Parameters are inputs of the graph; everything else that a module holds is a constant of it. So the graph is traced anew
when anything of that changes: the flow, a flag such as ``training``, a buffer or a number of a module.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from ebflow_plugin.errors import EBFlowError, EBFlowWarning, UnsupportedStepError, warn
from ebflow_plugin.linalg.memo import tracing
from ebflow_plugin.linalg.precision import full_precision
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.planned import Watch

Objective = Any  # that of base.py, which imports this module
Terms = Sequence[tuple[float, Objective]]


_DTYPE, _TRAINED = attrgetter("dtype"), attrgetter("requires_grad")
_FLOAT16 = (
    "a compiled loss takes its gradients before a GradScaler multiplies them, so that small ones vanish in float16: "
    "use bfloat16, or a loss that is not compiled"
)


class Prepared(NamedTuple):
    """What one objective computes a loss of a batch from, after everything that reads values or draws numbers.

    Attributes:
        plan: The plan of the matched variable.
        u: The matched variable, with shape ``(B, *)``.
        context: The context, with ``B`` rows, still attached to its graph.
        weights: The checked weights of the rows.
        log_det: The log-det of the preprocessing, with shape ``(B,)``; None if there is none.
        drawn: The drawn numbers; for an objective that draws its own, the generator or None.
    """

    plan: Plan
    u: Tensor
    context: Tensor | None
    weights: Tensor | None
    log_det: Tensor | None
    drawn: tuple[Tensor, ...] | Generator | None


class Key(NamedTuple):
    """What decides which graph serves a call."""

    plans: tuple[Any, ...]  # of the terms; their steps are compared by identity
    rows: int
    shapes: tuple[Any, ...]  # of the inputs, with None for the rows
    kinds: tuple[Any, ...]  # the dtypes of the parameters and inputs, and whether each is trained
    device: torch.device  # of the batch, where the parameters are too
    autocast: tuple[Any, ...]


@dataclass(frozen=True)
class Graph:
    """A compiled loss.

    Attributes:
        compiled: Returns the loss and the gradients that there are, from the parameters and the inputs.
        reached: The places of the parameters and inputs that these gradients belong to.
        serves: Whether it takes a batch of this many rows.
        terms: The weighted objectives.
        shared: Whether two gradients, or a gradient and an input, may be in the same memory.
    """

    compiled: Callable[..., Any]
    reached: list[int]
    serves: Callable[[int], bool]
    terms: Terms
    shared: bool = True

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The loss, and its gradients. The graph has the casts of autocast in it, and no TF32 in finite differences."""
        like = tensors[-1]
        context: AbstractContextManager[object] = nullcontext()
        if any(term.full_precision for _, term in self.terms):
            context = full_precision(like)
        elif torch.is_autocast_enabled(like.device.type):
            context = torch.autocast(like.device.type, enabled=False)
        with torch.no_grad(), context:
            loss, gradients = self.compiled(*tensors)
        return loss, gradients


class CompiledLoss:
    """The compiled loss of an objective, or of a sum of them, for each shape of its inputs.

    Arguments:
        options: Options of :func:`torch.compile`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = {"fullgraph": True, **options}
        self._graphs: dict[Key, Graph] = {}
        self._watch: Watch | None = None
        self._owners: Watch | None = None  # of the parameters
        self._named: dict[str, nn.Parameter] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the graphs: a copy of an objective traces its own."""
        return {"options": self.options, "_graphs": {}, "_watch": None, "_owners": None, "_named": {}}

    def __call__(self, objective: Objective, terms: Terms, prepared: Sequence[Prepared]) -> Tensor:
        """The loss, a scalar, whose backward pass hands out the gradients."""
        if self._watch is None or not self._watch.unchanged():
            self._graphs.clear()
            self._owners = None
            self._watch = Watch(list(objective.model.modules()), traced=True)
        if self._owners is None or not self._owners.unchanged():
            self._owners = Watch.of_parameters(objective.model)
            if list(named := dict(objective.model.named_parameters())) != list(self._named):
                self._graphs.clear()  # one was added, removed, or is held in another place too
            self._named = named
        tensors: list[Tensor] = [*self._named.values()]
        count = len(tensors)
        for one in prepared:
            tensors += _tensors(one)
        key = _key(prepared, tensors, count)
        graph = self._graphs.get(key)
        if graph is None:
            alike = [one for known, one in self._graphs.items() if known._replace(rows=key.rows) == key]
            graph = next((one for one in alike if one.serves(key.rows)), None)
            if graph is None:
                if not any(tensor.requires_grad for tensor in tensors):
                    return _sum(terms, prepared)
                loss = _Loss(objective.model, terms, prepared)
                graph = self._build(objective, _Trace(loss, list(self._named), tensors, key.rows), bool(alike))
            self._graphs[key] = graph
        targets = [tensors[place] for place in graph.reached]
        handed: Tensor = _Handed.apply(graph, _values(tensors, count), *targets)
        return handed

    def _build(self, objective: Objective, trace: _Trace, again: bool) -> Graph:
        """Traces and compiles a graph, and says so on a terminal. A second size of batches is one of any size."""
        kind = trace.tensors[-1].device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            warn(_FLOAT16, EBFlowWarning)
        began, shown = time.monotonic(), sys.stderr.isatty()
        if shown:
            print(f"compiling {objective.describe()}: this can take a minute …", file=sys.stderr, flush=True)
        try:
            traced, reached, serves = trace(again)
            graph = Graph(torch.compile(traced, **self.options), reached, serves, trace.loss.terms)
            examples = trace.examples(again and serves(trace.rows + 1))
            _, gradients = graph.run(examples)  # compiles it
            taken = {tensor.untyped_storage().data_ptr() for tensor in examples}
            places = {tensor.untyped_storage().data_ptr() for tensor in gradients}
            shared = len(places - taken) < len(gradients)
        except EBFlowError:
            raise
        except Exception as error:
            raise _refusal(objective, error) from error
        if shown:
            print(f"compiled in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return replace(graph, shared=shared)


class _Loss(nn.Module):
    """The loss as a module, so that its parameters can be replaced by inputs of a graph."""

    def __init__(self, model: nn.Module, terms: Terms, prepared: Sequence[Prepared]) -> None:
        super().__init__()
        self.model, self.terms, self.prepared = model, list(terms), prepared

    def forward(self, *inputs: Tensor) -> Tensor:
        """The weighted sum of the terms, of other tensors in the place of those that were prepared."""
        rest = iter(inputs)
        return _sum(self.terms, [_replaced(one, rest) for one in self.prepared])


class _Trace:
    """The trace of a loss and its gradients: a graph of plain operations on tensors."""

    def __init__(self, loss: _Loss, names: list[str], tensors: list[Tensor], rows: int) -> None:
        self.loss, self.names, self.tensors, self.rows = loss, names, tensors, rows

    def __call__(self, any_size: bool) -> tuple[Callable[..., Any], list[int], Callable[[int], bool]]:
        """The graph, the places of the tensors that it returns gradients of, and the batch sizes that it serves."""
        from torch._subclasses.fake_tensor import FakeTensorMode  # here, since it imports sympy
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        shapes = ShapeEnv()
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)

        def fake(place: int, tensor: Tensor) -> Tensor:
            sizes = [DimDynamic.STATIC] * tensor.dim()
            if any_size and self._has_rows(place):
                sizes[0] = DimDynamic.DUCK  # one symbol for all that have as many rows
            context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
            return mode.from_tensor(tensor.detach(), symbolic_context=context)

        reached: list[int] = []

        def loss_and_gradients(*inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
            wanted = [place for place, tensor in enumerate(self.tensors) if tensor.requires_grad]
            inputs = tuple(tensor.detach().requires_grad_(place in wanted) for place, tensor in enumerate(inputs))
            split = len(self.names)
            values = dict(zip((f"model.{name}" for name in self.names), inputs[:split], strict=True))
            with torch.enable_grad():
                loss = functional_call(self.loss, values, inputs[split:])
                found = torch.autograd.grad(loss, [inputs[place] for place in wanted], allow_unused=True)
            reached[:] = [place for place, gradient in zip(wanted, found, strict=True) if gradient is not None]
            return loss.detach(), [gradient for gradient in found if gradient is not None]

        inputs = [fake(place, tensor) for place, tensor in enumerate(self.tensors)]
        with tracing(), mode:
            graph = make_fx(loss_and_gradients, {torch.ops.aten.addmm.default: _addmm})(*inputs)
        for tensor in (*graph.parameters(), *graph.buffers(), *vars(graph).values()):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise UnsupportedStepError(
                    f"a tensor of shape {tuple(tensor.shape)} requires a gradient and is no parameter of the model, so "
                    "that a compiled loss would not train it: make it an nn.Parameter of a module of the flow"
                )
        rows = next((tensor.shape[0] for place, tensor in enumerate(inputs) if self._has_rows(place)), self.rows)
        if not isinstance(rows, torch.SymInt) or not shapes.simplify(rows.node.expr).free_symbols:
            own = self.rows  # of this batch alone: something in the graph depends on the number
            return graph, reached, lambda count: count == own
        code = shapes.produce_guards_expression([rows])
        return graph, reached, lambda count: code is None or shapes.evaluate_guards_expression(code, [count])

    def examples(self, any_size: bool) -> list[Tensor]:
        """The tensors to compile the graph with; those of a graph for any size are marked."""
        found, marked = _values(self.tensors, len(self.names)), dict[int, Tensor]()
        for place, tensor in enumerate(found):
            if any_size and self._has_rows(place):
                # What is one tensor in a call is one here too, or the call would be compiled again.
                found[place] = marked.setdefault(id(tensor), tensor.detach())
                torch._dynamo.maybe_mark_dynamic(found[place], 0)
        return found

    def _has_rows(self, place: int) -> bool:
        """Whether the first dimension of an input is that of the batch."""
        tensor = self.tensors[place]
        return place >= len(self.names) and tensor.dim() > 0 and tensor.shape[0] == self.rows


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """A product plus a bias, as two operations on the CPU: the sum is fused with what follows, addmm copies the bias.

    There inductor makes one addmm of a product and a sum again, but not of a difference.
    """
    if left.device.type != "cpu" or beta != 1 or alpha != 1:
        return NotImplemented
    return left @ right - -bias


class _Handed(Function):
    """A loss with gradients that are known already."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, tensors: list[Tensor], *targets: Tensor) -> Tensor:
        loss, ctx.gradients = graph.run(tensors)
        ctx.graph = graph
        ctx.save_for_backward(*tensors)  # for a second backward pass; torch frees them after the first, or refuses it
        return loss.clone()  # with CUDA graphs, the next call writes into it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # The first pass gives its gradients away: they become the parameters' own, with nothing copied.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, gradients = ctx.graph.run(ctx.saved_tensors)
        # On a device, reading the scale would synchronise, and a CUDA graph writes into the same tensors in each call.
        if ctx.graph.shared or scale.device.type != "cpu" or scale.item() != 1.0:
            gradients = torch._foreach_mul(gradients, scale)
        return (None, None, *gradients)


def _values(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    """The tensors to call a graph with, of which the first are so many parameters: a context has its own graph."""
    return [*tensors[:count], *(each.detach() if each.requires_grad else each for each in tensors[count:])]


def _tensors(given: Prepared) -> list[Tensor]:
    """The tensors that a loss is a function of."""
    found = (
        given.u,
        given.context,
        given.weights,
        given.log_det,
        *(given.drawn if isinstance(given.drawn, tuple) else ()),
    )
    return [tensor for tensor in found if tensor is not None]


def _replaced(given: Prepared, tensors: Iterator[Tensor]) -> Prepared:
    """The same with other tensors, in the order of :func:`_tensors`."""
    names = [name for name in ("u", "context", "weights", "log_det") if getattr(given, name) is not None]
    drawn = given.drawn
    new: dict[str, Any] = {name: next(tensors) for name in names}
    return given._replace(**new, drawn=tuple(next(tensors) for _ in drawn) if isinstance(drawn, tuple) else drawn)


def _sum(terms: Terms, prepared: Sequence[Prepared]) -> Tensor:
    values = [weight * term.mean(given) for (weight, term), given in zip(terms, prepared, strict=True)]
    return torch.stack(values).sum(0)


def _key(prepared: Sequence[Prepared], tensors: list[Tensor], count: int) -> Key:
    """The key of a call with these tensors, of which the first are so many parameters."""
    rows, kind = len(prepared[0].u), prepared[0].u.device.type

    def shape(tensor: Tensor) -> tuple[Any, ...]:
        sizes = tuple(tensor.shape)
        return (None, *sizes[1:]) if sizes and sizes[0] == rows else sizes

    return Key(
        tuple(given.plan for given in prepared),
        rows,
        tuple(map(shape, tensors[count:])),
        (*map(_DTYPE, tensors), *map(_TRAINED, tensors)),
        prepared[0].u.device,
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
    )


def _refusal(objective: Objective, error: Exception) -> UnsupportedStepError:
    """Names the step that cannot be traced, which the note of the error has, and the reason in a line."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in step ")]
    where = notes[0].removeprefix("in step ").partition(", on an input")[0] if notes else type(objective).__name__
    reason = next(iter(str(error).strip().splitlines()), "")
    return UnsupportedStepError(
        f"{where} cannot be compiled ({type(error).__name__}: {reason}); train this model without compile()"
    )
