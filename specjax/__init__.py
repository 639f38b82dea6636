"""specjax: speculative decoding for research, in pure JAX."""

from specjax.block_verification import BlockVerification
from specjax.costs import Costs
from specjax.decode import prefill, run, step
from specjax.drafters.adaptive import Adaptive
from specjax.drafters.combined import Combined
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.early_exit import EarlyExit
from specjax.drafters.lookahead import LookaheadDecoding
from specjax.drafters.plain import Plain
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.drafters.recycling import TokenRecycling
from specjax.drafters.stored import load_drafter, save_drafter
from specjax.drafters.suffix import SuffixDecoding
from specjax.errors import CheckpointError, InputError, SpecjaxError
from specjax.generate import Generation, Piece, Round, generate, read, stream
from specjax.job import Job, prepare
from specjax.laws import Greedy, Path, Rejection, Typical
from specjax.metrics import Stats
from specjax.models.target import Target, load
from specjax.sampling import Sampling
from specjax.state import Context, DecodeState, Drafter, StepInfo
from specjax.timing import measure_costs
from specjax.trees import Draft

__all__ = [
    "Adaptive",
    "BlockVerification",
    "CheckpointError",
    "Combined",
    "Context",
    "Costs",
    "DecodeState",
    "Draft",
    "DraftModel",
    "Drafter",
    "EarlyExit",
    "Generation",
    "Greedy",
    "InputError",
    "Job",
    "LookaheadDecoding",
    "Path",
    "Piece",
    "Plain",
    "PromptLookup",
    "Rejection",
    "Round",
    "Sampling",
    "SpecjaxError",
    "Stats",
    "StepInfo",
    "SuffixDecoding",
    "Target",
    "TokenRecycling",
    "Typical",
    "generate",
    "load",
    "load_drafter",
    "measure_costs",
    "prefill",
    "prepare",
    "read",
    "run",
    "save_drafter",
    "step",
    "stream",
]
