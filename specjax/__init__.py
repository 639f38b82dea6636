"""specjax: speculative decoding for research, in pure JAX."""

from specjax.block_verification import BlockVerification
from specjax.decode import prefill, run, step
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.plain import Plain
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.drafters.recycling import TokenRecycling
from specjax.drafters.stored import load_drafter, save_drafter
from specjax.drafters.suffix import SuffixDecoding
from specjax.errors import CheckpointError, InputError, SpecjaxError
from specjax.generate import Generation, Piece, Round, generate, stream
from specjax.job import Job, prepare
from specjax.laws import Greedy, Path, Rejection, Typical
from specjax.metrics import Stats
from specjax.models.target import Target, load
from specjax.sampling import Sampling
from specjax.state import Context, DecodeState, Drafter, StepInfo
from specjax.trees import Draft

__all__ = [
    "BlockVerification",
    "CheckpointError",
    "Context",
    "DecodeState",
    "Draft",
    "DraftModel",
    "Drafter",
    "Generation",
    "Greedy",
    "InputError",
    "Job",
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
    "prefill",
    "prepare",
    "run",
    "save_drafter",
    "step",
    "stream",
]
