"""Hugging Face `generate` in PyTorch on the same weights, for comparison."""

import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.results import cpu_count

from specjax import Target

INSTALL = 'pip install -e ".[compare]"'


def why_not(target: Target) -> str | None:
    """Why Hugging Face cannot run this target here; None where it can."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return f"PyTorch is not installed: {INSTALL}"
    if target.tokenizer is None:
        return "this target has no tokenizer, so there are no prompts"
    if _directory(target) is None:
        return "the target's weights do not lie in a Hugging Face directory"
    if target.dtype != "float32":
        return "the comparison is in float32"
    return None


class HuggingFace:
    """The target in PyTorch, float32, on all cores."""

    def __init__(self, target: Target):
        import torch
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(cpu_count())
        self._torch = torch
        self._eos = list(target.eos_token_ids)
        directory = _directory(target)
        assert directory is not None
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.eval()
        self.version = torch.__version__

    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, prompt_lookup: int | None
    ) -> tuple[list[int], float]:
        """New tokens, greedy, and the seconds they took, prefill included."""
        ids = self._torch.tensor([list(prompt)])
        more = {} if prompt_lookup is None else {"prompt_lookup_num_tokens": prompt_lookup}
        with self._torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            begin = time.perf_counter()
            out = self._model.generate(
                input_ids=ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=self._eos,
                pad_token_id=self._eos[0] if self._eos else 0,
                **more,
            )
            seconds = time.perf_counter() - begin
        return out[0, len(prompt) :].tolist(), seconds


def _directory(target: Target) -> Path | None:
    """The directory that transformers can read the target from."""
    for file in target.files:
        config = file.parent / "config.json"
        if file.suffix == ".safetensors" and config.is_file() and "model_type" in json.loads(config.read_text()):
            return file.parent
    return None
