"""FlowReport: the steps of a flow as rows, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ebflow_plugin.adapting.rules import RegisteredLinearStep
from ebflow_plugin.linalg.operators import Blocks
from ebflow_plugin.plan.log_dets import log_det_methods
from ebflow_plugin.plan.matrices import FullConvStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.preprocessing import Dequantize
from ebflow_plugin.plan.step import Linearity, LinearStep, Shapes, Step


@dataclass(frozen=True)
class Row:
    """One step of a flow.

    Attributes:
        path: The path of the module in the flow.
        class_name: Its class.
        linearity: ``linear``, ``nonlinear`` or ``refused``.
        reason: The reason for this.
        log_det_cost: The cost of its log-det, which ``energy()`` skips for a linear step.
        smoothness: Whether its score is continuous, as score matching needs.
        known: Whether its class is known.
        second_derivatives: How score matching computes second derivatives of the energy through it: ``closed form``,
            ``product`` (linear: three products), ``double backward``, or ``-`` if it needs none.
        log_det: How ``ML(model, log_det="auto")`` computes the gradient of its log-det: ``exact``, ``stochastic`` or
            ``relative``; ``-`` if the step is not linear, or the shape of the data is unknown.
    """

    path: str
    class_name: str
    linearity: str
    reason: str
    log_det_cost: str
    smoothness: str
    known: bool
    second_derivatives: str
    log_det: str = "-"


@dataclass(frozen=True, repr=False)
class FlowReport:
    """The steps of a flow from data to noise. Iterate it for its rows, print it for a table.

    Attributes:
        rows: One row for each step.
        base: The class of the base density.
        adapter: The name of the library.
        inside: The path of the flow in the user's object; empty if it is the object.
        determinants: The determinants that ``energy()`` skips: the blocks of one size, and the number of steps with it.
        preprocessing: The number of leading steps that score matching leaves out (MaP).
        costs_of_its_own: The number of linear steps that users registered, whose log-dets have unknown costs.
    """

    rows: tuple[Row, ...]
    base: str
    adapter: str
    inside: str = ""
    determinants: tuple[tuple[Blocks, int], ...] = ()
    preprocessing: int = 0
    costs_of_its_own: int = 0

    @classmethod
    def of(
        cls, plan: Plan, inside: str = "", preprocessing: int = 0, dequantize: Dequantize | None = None
    ) -> FlowReport:
        """The report of a plan, and of a Dequantize before it."""
        reached = dict(plan.shapes(plan.event_shape)) if plan.event_shape is not None else {}
        chosen = {} if plan.event_shape is None else log_det_methods(plan, plan.event_shape, "auto")
        closed = preprocessing + plan[preprocessing:].closed_steps
        rows, counts = list[Row](), Counter[Blocks]()
        for place, step in enumerate(plan.steps):
            why, blocks = step.refusal(), _blocks(step, reached.get(step))
            counts.update([blocks] if blocks else [])
            closed_form = "product" if step.linearity == Linearity.LINEAR else "closed form"
            twice = "double backward" if place >= closed else closed_form
            rows.append(
                Row(
                    path=step.path,
                    class_name=step.class_name,
                    linearity=str(Linearity.REFUSED if why else step.linearity),
                    reason=why or step.reason,
                    log_det_cost=str(blocks or step.cost) if isinstance(step, LinearStep) else "-",
                    smoothness=str(step.smoothness),
                    known=step.known,
                    second_derivatives="-" if place < preprocessing else twice,
                    log_det=chosen.get(step, "-"),  # type: ignore[call-overload]
                )
            )
        if dequantize is not None:
            why = "adds noise, divides" if dequantize.noise == "uniform" else "adds smooth noise (a bound), divides"
            rows.insert(0, Row("preprocess.0", "Dequantize", str(Linearity.LINEAR), why, "O(D)", "smooth", True, "-"))
            preprocessing += 1
        shapes = plan.base.shapes
        base = plan.base.class_name + (f" {' + '.join(map(str, shapes))}" if shapes else "")
        largest = sorted(counts.items(), key=lambda item: item[0].size or 0, reverse=True)
        registered = sum(isinstance(step, RegisteredLinearStep) for step in plan.steps)
        return cls(tuple(rows), base, plan.adapter, inside, tuple(largest), preprocessing, registered)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dicts(self) -> list[dict[str, str | bool]]:
        """The rows as plain dictionaries."""
        return [asdict(row) for row in self.rows]

    def count(self, linearity: str) -> int:
        """The number of steps that are ``linear``, ``nonlinear`` or ``refused``."""
        return sum(row.linearity == linearity for row in self.rows)

    @property
    def summary(self) -> str:
        """The last line of the table."""
        parts = [f"{self.count('linear')} of {len(self)} steps linear"]
        if refused := self.count("refused"):
            parts.append(f"{refused} refused")
        if unknown := sum(not row.known for row in self.rows):
            parts.append(f"{unknown} of unknown class (kept exact, as nonlinear)")
        skipped = [blocks.counted(steps) for blocks, steps in self.determinants]
        if self.costs_of_its_own:
            skipped.append(f"{self.costs_of_its_own} log-det{'s' * (self.costs_of_its_own > 1)} of a cost of its own")
        parts.append(f"energy() skips {' and '.join(skipped) or 'no dense determinant'}")
        if self.preprocessing:
            parts.append(f"score matching begins after {self.rows[self.preprocessing - 1].path} (MaP)")
        twice = next((row.path for row in self.rows if row.second_derivatives == "double backward"), None)
        how = "in closed form" if twice is None else f"by double backward from {twice} on"
        return "; ".join((*parts, f"second derivatives {how}"))

    def __str__(self) -> str:
        head = ("step", "class", "linearity", "log-det cost", "score", "why")
        body = [(r.path, r.class_name, r.linearity, r.log_det_cost, r.smoothness, r.reason) for r in self.rows]
        widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
        rule = tuple("─" * width for width in widths)
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (head, rule, *body, rule)
        ]
        found = f" (found at .{self.inside})" if self.inside else ""
        chosen = Counter(row.log_det for row in self.rows if row.log_det in ("relative", "stochastic"))
        words = ", ".join(f"{way} for {count}" for way, count in sorted(chosen.items()))
        likelihood = [f'ML(log_det="auto"): {words} of {self.count("linear")} linear steps'] if chosen else []
        return "\n".join((*table, f"base: {self.base}; adapter: {self.adapter}{found}", self.summary, *likelihood))

    __repr__ = __str__  # so that a notebook shows the table


def _blocks(step: Step, shapes: Shapes | None) -> Blocks | None:
    """The blocks of the determinant that ``energy()`` skips; None if its log-det is cheap, or of unknown cost."""
    if not isinstance(step, LinearStep):
        return None
    operator = step.operator(shapes)
    if operator is None:
        return Blocks(None) if isinstance(step, FullConvStep) else None
    return operator.blocks
