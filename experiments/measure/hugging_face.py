"""Hugging Face `generate` in PyTorch on the same weights, for comparison: plainly, by prompt lookup, assisted."""

import json
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.results import cpu_count

from measure.peers import Decode, fastest
from specjax import Target

INSTALL = 'pip install -e ".[compare]"'
CACHES = ("dynamic", "static", "compiled")
"""How `generate` keeps keys and values: in arrays that grow, in arrays of one size, or so and the pass compiled."""


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
    """The target in PyTorch, float32, on all cores.

    Args:
        assistant: directory of the model that drafts in assisted generation.
    """

    def __init__(self, target: Target, assistant: Path | None = None):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(cpu_count())
        self._torch = torch
        self._compiling = transformers.CompileConfig(mode="default")
        # by itself it only compiles for accelerators
        self._compiling._compile_all_devices = True  # type: ignore[assignment]
        self._eos = list(target.eos_token_ids)
        directory = _directory(target)
        assert directory is not None
        self._model = self._load(directory)
        self._assistant = None if assistant is None else self._load(assistant)
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}

    def _load(self, directory: Path) -> Any:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=self._torch.float32)
        return model.eval()

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        prompt_lookup: int | None = None,
        assisted: bool = False,
        cache: str = "dynamic",
        threads: int | None = None,
    ) -> tuple[list[int], float]:
        """New tokens, greedy, and the seconds they took, prefill included.

        Args:
            prompt_lookup: tokens that it drafts; None: it does not.
            assisted: the assistant drafts, as many tokens as its own settings say.
            cache: one of CACHES; those that draft have a dynamic one.
            threads: None for one a core.
        """
        ids = self._torch.tensor([list(prompt)])
        more: dict[str, Any] = {} if prompt_lookup is None else {"prompt_lookup_num_tokens": prompt_lookup}
        if assisted:
            more["assistant_model"] = self._assistant
        if cache != "dynamic":
            more["cache_implementation"] = "static"
            more |= {"compile_config": self._compiling} if cache == "compiled" else {"disable_compile": True}
        self._torch.set_num_threads(threads or cpu_count())
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

    def best(self, prompt: Sequence[int], compiled: bool, **how: Any) -> tuple[Decode, str, dict[str, float | str]]:
        """The way to decode with the number of threads and the cache that are fastest on a prompt, what they are, and
        tokens per second of all that were tried.

        Args:
            compiled: try PyTorch's compiler too, which takes a minute or more.
            how: `prompt_lookup` or `assisted`; those go with a dynamic cache alone.
        """
        caches = CACHES[:1] if how else CACHES if compiled else CACHES[:-1]
        cores = cpu_count()
        trials: dict[str, Decode] = {
            f"{threads} threads, {cache} cache": partial(self.generate, cache=cache, threads=threads, **how)
            for cache in caches
            for threads in sorted({cores, max(cores // 2, 1)})
        }
        name, rates = fastest(trials, prompt)
        return trials[name], name, rates


def why_not_assistant(target: Target, assistant: Path) -> str | None:
    """Why this model cannot assist Hugging Face's; None where it can."""
    directory = _directory(target)
    assert directory is not None
    try:
        other, own = (json.loads((folder / "config.json").read_text()) for folder in (assistant, directory))
    except OSError:
        return f"{assistant} is no Hugging Face directory"
    if "model_type" not in other:
        return f"{assistant} holds no whole model, which Hugging Face could run by itself"
    if other.get("vocab_size") != own.get("vocab_size"):
        return f"{assistant} has another vocabulary than the target"
    return None


def _directory(target: Target) -> Path | None:
    """The directory that transformers can read the target from."""
    for file in target.files:
        config = file.parent / "config.json"
        if file.suffix == ".safetensors" and config.is_file() and "model_type" in json.loads(config.read_text()):
            return file.parent
    return None
