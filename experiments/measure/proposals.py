"""What drafting costs by itself."""

from functools import partial

from specjax import DecodeState, Drafter
from specjax.models.interface import TargetModel
from specjax.timing import Timer, proposals


class ProposalTimer:
    """Times `propose` of one drafter in a compiled loop of nothing else, from one state over and over."""

    def __init__(self, model: TargetModel, drafter: Drafter, state: DecodeState):
        self._timer = Timer(partial(proposals, model, drafter, state))

    def __call__(self) -> float:
        """Seconds of one `propose`, now."""
        return max(self._timer(), 0.0)
