"""llama.cpp on a GGUF file of the same model, for comparison: plainly and by prompt lookup."""

import importlib.metadata
import importlib.util
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.results import cpu_count

from measure.peers import Decode, fastest
from specjax.models.gguf_file import open_gguf

INSTALL = "pip install llama-cpp-python"


def why_not() -> str | None:
    """Why llama.cpp cannot run here; None where it can."""
    return None if importlib.util.find_spec("llama_cpp") else f"llama-cpp-python is not installed: {INSTALL}"


def version() -> str:
    return importlib.metadata.version("llama-cpp-python")


def describe(gguf: Path) -> str:
    """What it computes with: how most of the file's weights are stored, and their size."""
    sizes: Counter[str] = Counter()
    for tensor in open_gguf(gguf).tensors.values():
        sizes[tensor.kind.name] += tensor.nbytes
    kinds = [kind for kind, size in sizes.most_common() if size > 0.05 * sizes.total()]
    return f"{' and '.join(kinds)} weights as the file has them, {sizes.total() / 1e6:.0f} MB; float16 cache"


class LlamaCpp:
    """The model of a file.

    Args:
        context: tokens of the longest text.
        eos: tokens that end a text.
        prompt_lookup: tokens that it drafts; None: it does not.
    """

    def __init__(self, gguf: Path, context: int, eos: Sequence[int], threads: int, prompt_lookup: int | None = None):
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        lookup = None if prompt_lookup is None else LlamaPromptLookupDecoding(num_pred_tokens=prompt_lookup)
        self._eos = set(eos)
        self._model: Any = Llama(
            model_path=str(gguf),
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=cpu_count(),
            draft_model=lookup,
            verbose=False,
        )

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
        """New tokens, greedy, and the seconds they took, prefill included."""
        text: list[int] = []
        self._model.reset()  # else the prompt's keys and values would still be there from the last time
        begin = time.perf_counter()
        for token in self._model.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
            text.append(int(token))
            if len(text) == max_new_tokens or token in self._eos:
                break
        return text, time.perf_counter() - begin


def best(
    gguf: Path, context: int, eos: Sequence[int], prompt: Sequence[int], prompt_lookup: int | None = None
) -> tuple[Decode, str, dict[str, float | str]]:
    """The way to decode with the number of threads that is fastest on a prompt; as `HuggingFace.best`."""
    cores = cpu_count()
    trials: dict[str, Decode] = {
        f"{threads} threads": LlamaCpp(gguf, context, eos, threads, prompt_lookup).generate
        for threads in sorted({cores, max(cores // 2, 1)})
    }
    name, rates = fastest(trials, prompt)
    return trials[name], name, rates
