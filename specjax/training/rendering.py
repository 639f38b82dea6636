"""Conversations to token ids and loss masks.

**The mask.** `mask[i]` is True where token i is *supervised*: it is a token the target itself would have to write. That
is the text of assistant messages and the token that ends their turn; not the opening of the turn, which the prompt
writes, nor the line break that many templates put after the end-of-turn token, which nobody asks the model for. The
first token of a text is never supervised, because nothing predicts it. The mask belongs to the tokens; who shifts
tokens into targets shifts the mask with them: the prediction made at position t is trained where `mask[t + 1]`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from specjax.errors import InputError
from specjax.models.target import Target
from specjax.models.tokenizer import Tokenizer
from specjax.training.conversations import Conversation

Span = tuple[int, int]
TURNS = ("all", "last")
# what the template is called with anyway
RESERVED = ("add_generation_prompt", "chat_template", "continue_final_message", "messages", "tokenize", "tools")


@dataclass(frozen=True, eq=False)
class Rendered:
    """A conversation as the target sees it.

    Attributes:
        ids: its tokens.
        mask: which of them are supervised.
        where: file and line it came from.
    """

    ids: Int[np.ndarray, "T"]
    mask: Bool[np.ndarray, "T"]
    where: str


@dataclass(frozen=True, eq=False)
class Renderer:
    """Renders conversations for one tokenizer.

    Messages go through the chat template once, and the text is encoded without adding special tokens: a BOS is there
    if the template writes one. Where the assistant speaks is read from the template's `{% generation %}` markers, where
    it has them. Otherwise the conversation is also rendered up to each assistant message: as a prompt, and with the
    answer. Both must be the beginning of the whole; a template that writes earlier turns otherwise than the last one
    (leaving out their thoughts, say) cannot be split this way and is refused, unless only the last answer is asked for.
    The tokens before an answer are those of its prompt alone, as in decoding.

    Ids that came with a row are used as they are, and the whole of a plain text is supervised. An assistant message
    that opens a conversation answers nothing and is not supervised. The turn of an answer that was cut before its end
    does not end: what the template writes after it is left out.

    Attributes:
        tokenizer: None where only rows of ids are to be read.
        eos_token_ids: where decoding stops, and so does supervision within a turn.
        turns: "all" assistant messages, or the "last" alone.
        template_options: variables for the template, such as `enable_thinking`; they should be those of decoding.
        vocab_size: of the model, to check rows of ids against.
    """

    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...] = ()
    turns: str = "all"
    template_options: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.turns not in TURNS:
            raise InputError(f"turns is {self.turns!r}; expected one of {', '.join(TURNS)}")
        if taken := [name for name in RESERVED if name in self.template_options]:
            raise InputError(f"template option {taken[0]!r}: it is set for each rendering; expected other variables")

    @classmethod
    def of(cls, target: Target, turns: str = "all", **template_options: Any) -> "Renderer":
        """The renderer for a target's conversations."""
        return cls(target.tokenizer, target.eos_token_ids, turns, template_options, target.model.vocab_size)

    def __call__(self, conversation: Conversation) -> Rendered:
        """Token ids and mask.

        Raises:
            InputError: naming file and line: a template that refuses the messages or cannot be split, ids outside the
                vocabulary, nothing to supervise.
        """
        where = conversation.where
        try:
            if conversation.token_ids is not None:
                ids, spans = self._given(conversation.prompt_ids, conversation.token_ids)
            elif conversation.messages is not None:
                ids, spans = self._chat(conversation.messages, conversation)
            else:
                ids = self._tokenizer().encode(conversation.text or "")
                spans = [(0, len(ids))]
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        mask = np.zeros(len(ids), bool)
        for start, end in spans:
            mask[start:end] = True
        mask[:1] = False
        if not mask.any():
            raise InputError(f"{where}: nothing to learn from: no token of it is the assistant's")
        return Rendered(np.asarray(ids, np.int32), mask, where)

    def render_all(self, conversations: Iterable[Conversation]) -> list[Rendered]:
        return [self(conversation) for conversation in conversations]

    def _given(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], list[Span]]:
        ids = [*prompt, *tokens]
        if self.vocab_size is not None and max(ids, default=0) >= self.vocab_size:
            raise InputError(f"token id {max(ids)} is outside the target's vocabulary of {self.vocab_size}")
        return ids, [(len(prompt), len(ids))]

    def _chat(self, messages: Sequence[Mapping[str, Any]], row: Conversation) -> tuple[list[int], list[Span]]:
        tokenizer = self._tokenizer()
        options = dict(self.template_options) | ({"tools": row.tools} if row.tools else {})
        text = tokenizer.render_chat(messages, add_generation_prompt=False, **options)
        ids = tokenizer.encode_chat(messages, add_generation_prompt=False, **options)
        template = tokenizer.backend.get_chat_template(tools=row.tools)
        if re.search(r"\{%-?\s*generation\s*-?%\}", template):
            spans = self._marked(text, messages, template, options)
        else:
            spans = self._split(text, messages, options)
        ids, spans = self._in_tokens(text, ids, spans[-1:] if self.turns == "last" else spans)
        spans = [self._until_end_of_turn(ids, span) for span in spans]
        if not row.finished and spans and messages[-1]["role"] == "assistant":
            start, end = spans[-1]
            while end > start and self._is_added_or_blank(ids[end - 1]):
                end -= 1
            spans[-1] = start, end
            ids = ids[:end]
        return ids, spans

    def _marked(
        self, text: str, messages: Sequence[Mapping[str, Any]], template: str, options: Mapping[str, Any]
    ) -> list[Span]:
        """Where the template's own markers say that the assistant speaks, in characters."""
        from transformers.utils.chat_template_utils import render_jinja_template

        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = {**self._tokenizer().backend.special_tokens_map, **options, "add_generation_prompt": False}
        result: Any = render_jinja_template(
            conversations=[given], chat_template=template, return_assistant_tokens_mask=True, **variables
        )
        (rendered,), (marks,) = result
        if rendered != text:
            raise InputError("the chat template renders the same messages otherwise when its markers are read")
        # some templates put the opening of the turn inside their markers
        opening = [len(self._opening) if text.startswith(self._opening, start) else 0 for start, _ in marks]
        spans = [(start + skipped, end) for (start, end), skipped in zip(marks, opening, strict=True)]
        return spans[1:] if messages[0]["role"] == "assistant" else spans

    def _split(self, text: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[Span]:
        """Where the assistant speaks, in characters, from renderings of the beginnings of the conversation."""
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n > 0]
        if self.turns == "last":
            answers = answers[-1:]
        starts = [self._beginning(text, messages[:n], True, options) for n in answers]
        ends = [
            self._beginning(text, messages[: n + 1], False, options) if messages[n + 1 :] else len(text)
            for n in answers
        ]
        return list(zip(starts, ends, strict=True))

    def _beginning(
        self, text: str, messages: Sequence[Mapping[str, Any]], prompt: bool, options: Mapping[str, Any]
    ) -> int:
        """How many characters of the text the first messages are, alone or as the prompt for an answer."""
        tokenizer = self._tokenizer()
        beginning = tokenizer.render_chat(messages, add_generation_prompt=prompt, **options)
        if text.startswith(beginning):
            return len(beginning)
        at = next((i for i, (a, b) in enumerate(zip(text, beginning, strict=False)) if a != b), len(text))
        advice = "" if self.turns == "last" else 'train on the last answers only (turns="last"), or '
        raise InputError(
            f"the chat template of {tokenizer.source} cannot be split after message {len(messages)}: rendered "
            f"{'as a prompt' if prompt else 'alone'}, the messages have {beginning[at : at + 20]!r} where the whole "
            f"has {text[at : at + 20]!r}; {advice}use a template with {{% generation %}} markers, or rows with "
            "prompt_ids and token_ids"
        )

    def _in_tokens(self, text: str, ids: list[int], spans: list[Span]) -> tuple[list[int], list[Span]]:
        """Spans of characters as spans of tokens.

        Decoding encodes a prompt without its answer. Where that gives other tokens than the whole text (an answer that
        begins with a line break, after a prompt that ends with one), the parts are encoded one by one.
        """
        borders = sorted({0, len(text)}.union(*spans))
        places = {0: 0, len(text): len(ids)}
        for border in borders[1:-1]:
            beginning = self._encode(text[:border])
            if ids[: len(beginning)] != beginning:
                break
            places[border] = len(beginning)
        else:
            return ids, [(places[start], places[end]) for start, end in spans]
        joined: list[int] = []
        for start, end in pairwise(borders):
            joined += self._encode(text[start:end])
            places[end] = len(joined)
        decode = self._tokenizer().decode
        if decode(joined, skip_special_tokens=False) != decode(ids, skip_special_tokens=False):
            raise InputError(
                f"{self._tokenizer().source} joins text across the border of an answer, and the parts cannot be "
                f"encoded one by one (near {text[max(border - 10, 0) : border + 10]!r}); "
                "rows with prompt_ids and token_ids can be read"
            )
        return joined, [(places[start], places[end]) for start, end in spans]

    def _encode(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer().backend.encode(text, add_special_tokens=False)]

    def _until_end_of_turn(self, ids: list[int], span: Span) -> Span:
        """Cut after the token that ends decoding; without one, before blanks that follow a token such as <|end|>."""
        start, end = span
        for i in range(start, end):
            if ids[i] in self.eos_token_ids:
                return start, i + 1
        last = end
        while last > start and self._is_blank(ids[last - 1]):
            last -= 1
        return (start, last) if last > start and ids[last - 1] in self._added else span

    def _is_blank(self, token: int) -> bool:
        return (
            token not in self.eos_token_ids and not self._tokenizer().decode([token], skip_special_tokens=False).strip()
        )

    def _is_added_or_blank(self, token: int) -> bool:
        return token in self.eos_token_ids or token in self._added or self._is_blank(token)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError("the target has no tokenizer; it can only learn from rows with prompt_ids and token_ids")
        return self.tokenizer

    @cached_property
    def _added(self) -> frozenset[int]:
        """Tokens such as <|end|>, that ordinary text never becomes."""
        return frozenset(self._tokenizer().backend.added_tokens_decoder)

    @cached_property
    def _opening(self) -> str:
        """What the template writes to open an assistant's turn."""
        user = [{"role": "user", "content": "a"}]
        closed, opened = (
            self._tokenizer().render_chat(user, prompt, **self.template_options) for prompt in (False, True)
        )
        return opened.removeprefix(closed) if opened.startswith(closed) else ""
