"""For somebody who adds a flow library, or teaches a class: how a model becomes a plan.

In: any object that is, or holds, a flow. Out: the adapter that knows it, and the plan that its walk finds.
"""
