"""Which tokens are supervised: with markers in the template and without, and where that cannot be said."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specjax.errors import InputError
from specjax.models.tokenizer import Tokenizer
from specjax.training.conversations import Conversation, parse_row
from specjax.training.rendering import Rendered, Renderer

TEXT = "the cat sat on the mat. what is it? it is a cat, user: assistant: system 1 2 3 4\n\nthe end\n"
SPECIAL = ["<s>", "<|start|>", "<|end|>"]
BOS, START, END = range(3)

CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# the opening and the line break inside the markers, as SmolLM3 has them
MARKED_WIDE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ '<|start|>assistant\n' + m.content + '<|end|>\n' }}{%- endgeneration -%}"
    "{% else %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# as Llama 2 and Mistral: a BOS, the end of the turn is the end of the text, no opening of the assistant's turn
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[' + m.content + ']' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
# no special tokens at all: the line break is the end of the turn
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
# as Qwen 3: thoughts in the last answer only, and in the prompt where thinking is off
THINKING = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# the system message moves to the last user message, as in Mistral 7B v0.3
MOVING = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[' }}{% if loop.last or loop.revindex == 2 %}{{ 'system ' }}"
    "{% endif %}{{ m.content + ']' }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)

USER, ANSWER = {"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "it is a cat"}
SYSTEM = {"role": "system", "content": "the cat"}
TURNS = [SYSTEM, USER, ANSWER, {"role": "user", "content": "the end"}, {"role": "assistant", "content": "a mat.\n"}]


def tokenizer(template: str) -> Tokenizer:
    """Byte-level, trained on a sentence; it adds a BOS to raw text."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="<|end|>")
    backend.chat_template = template
    return Tokenizer(backend, "the test's tokenizer")


def render(template: str, messages: Sequence[Any], eos: Sequence[int] = (END,), **options: Any) -> Rendered:
    turns = options.pop("turns", "all")
    row = Conversation("data.jsonl, line 7", tuple(messages), finished=options.pop("finished", True))
    return Renderer(tokenizer(template), tuple(eos), turns, options)(row)


def supervised(template: str, rendered: Rendered) -> list[str]:
    """The text of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff([0, *rendered.mask.astype(int), 0])).reshape(-1, 2)
    decode = tokenizer(template).decode
    return [decode(rendered.ids[start:end].tolist(), skip_special_tokens=False) for start, end in edges]


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_WIDE], ids=["no markers", "markers", "wide markers"])
@pytest.mark.parametrize("eos", [(END,), ()], ids=["with eos", "without"])
def test_assistant_text_and_end_of_turn_only(template: str, eos: tuple[int, ...]) -> None:
    """With and without markers the same; the line break after the end-of-turn token is nobody's."""
    rendered = render(template, TURNS, eos)
    assert supervised(template, rendered) == ["it is a cat<|end|>", "a mat.\n<|end|>"]
    assert rendered.ids.tolist() == tokenizer(template).encode_chat(TURNS, add_generation_prompt=False)
    assert (rendered.ids.dtype, rendered.mask.dtype) == (np.int32, bool)
    last = render(template, TURNS, eos, turns="last")
    assert supervised(template, last) == ["a mat.\n<|end|>"]
    assert last.ids.tolist() == rendered.ids.tolist()


def test_positions_of_the_mask() -> None:
    """True at the assistant's own tokens; shifted with the targets, the first of them is predicted one earlier."""
    rendered = render(CHATML, [USER, ANSWER])
    prompt = tokenizer(CHATML).encode_chat([USER])
    answer = tokenizer(CHATML).encode_chat([USER, ANSWER], add_generation_prompt=False)[len(prompt) : -1]
    assert answer[-1] == END
    at = list(range(len(prompt), len(prompt) + len(answer)))
    assert np.flatnonzero(rendered.mask).tolist() == at
    assert np.flatnonzero(rendered.mask[1:]).tolist() == [i - 1 for i in at]


@pytest.mark.parametrize(("template", "count"), [(INST, 1), (CHATML, 0)])
def test_no_second_beginning_of_text(template: str, count: int) -> None:
    """The tokenizer adds a BOS to raw text; a template writes its own or none."""
    assert tokenizer(template).encode("the cat")[0] == BOS
    rendered = render(template, [USER, ANSWER, USER, ANSWER])
    assert rendered.ids.tolist().count(BOS) == count


def test_templates_of_other_shapes() -> None:
    assert supervised(INST, render(INST, [USER, ANSWER] * 2)) == [" it is a cat<|end|>"] * 2
    # nothing but a line break ends these turns: it is what the model must write
    assert supervised(PLAIN, render(PLAIN, [USER, ANSWER] * 2, eos=())) == [" it is a cat\n"] * 2


def test_supervision_ends_where_decoding_does() -> None:
    """Some templates close the text once more after the last turn."""
    template = CHATML + "{% if not add_generation_prompt %}{{ bos_token }}{% endif %}"
    assert supervised(template, render(template, [USER, ANSWER])) == ["it is a cat<|end|>"]


def test_a_template_that_cannot_be_split() -> None:
    for template, n in ((THINKING, 2), (MOVING, 1)):
        with pytest.raises(InputError) as caught:
            render(template, [USER, ANSWER] * 2)
        message = str(caught.value)
        assert message.startswith("data.jsonl, line 7: the chat template of the test's tokenizer cannot be split")
        assert f"after message {n}:" in message
        assert "{% generation %}" in message
        assert ("'<think>" in message) == (template is THINKING)
        assert "\n" not in message
    # the last answer can be told from its prompt, which says what the model writes itself
    last = render(THINKING, [USER, ANSWER] * 2, turns="last")
    assert supervised(THINKING, last) == ["<think>\n\n</think>\n\nit is a cat<|end|>"]
    last = render(THINKING, [USER, ANSWER] * 2, turns="last", enable_thinking=False)
    assert supervised(THINKING, last) == ["it is a cat<|end|>"]


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_WIDE])
def test_text_that_merges_across_the_border(template: str) -> None:
    """A line break and a word are one token in the whole text, but decoding ends its prompt in between."""
    answer = {"role": "assistant", "content": "the end"}
    whole, prompt = tokenizer(template).encode_chat([USER, answer], False), tokenizer(template).encode_chat([USER])
    assert whole[: len(prompt)] != prompt
    rendered = render(template, [USER, answer, USER, ANSWER])
    assert rendered.ids[: len(prompt)].tolist() == prompt
    assert supervised(template, rendered) == ["the end<|end|>", "it is a cat<|end|>"]
    decode = tokenizer(template).decode
    assert decode(rendered.ids.tolist()) == decode(tokenizer(template).encode_chat([USER, answer, USER, ANSWER], False))


def test_parts_that_cannot_be_encoded_one_by_one() -> None:
    """A tokenizer that begins every text with a blank."""
    blank = tokenizer(CHATML)
    blank.backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    row = Conversation("here", (USER, ANSWER | {"content": "the end"}))
    with pytest.raises(InputError, match="here: the test's tokenizer joins text across the border of an answer"):
        Renderer(blank, (END,))(row)


def test_a_cut_answer_has_no_end_of_turn() -> None:
    for template in (CHATML, MARKED, MARKED_WIDE):
        for eos in [(END,), ()]:
            rendered = render(template, TURNS[:-2], eos, finished=False)
            assert supervised(template, rendered) == ["it is a cat"]
            assert rendered.mask[-1]
        # turns before the last one did end
        rendered = render(template, [*TURNS[:-1], ANSWER], finished=False)
        assert supervised(template, rendered) == ["it is a cat<|end|>", "it is a cat"]
    assert supervised(PLAIN, render(PLAIN, [USER, ANSWER], finished=False)) == [" it is a cat"]
    # nor has the user's turn after it anything to do with the cut
    assert supervised(CHATML, render(CHATML, [USER, ANSWER, USER], finished=False)) == ["it is a cat<|end|>"]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_nothing_to_learn_from(template: str) -> None:
    # an answer to nothing is not one; an empty one still ends its turn
    for messages in ([SYSTEM, USER], [ANSWER], [ANSWER, USER]):
        with pytest.raises(InputError, match=r"^data\.jsonl, line 7: nothing to learn from"):
            render(template, messages)
    assert supervised(template, render(template, [ANSWER, USER, ANSWER])) == ["it is a cat<|end|>"]
    assert supervised(template, render(template, [USER, ANSWER | {"content": ""}])) == ["<|end|>"]


def test_ids_of_a_generation_are_kept() -> None:
    """Not rendered again, though the row has messages too and the template would make other ids of them."""
    written = {"prompt_ids": [5, 6, 7], "token_ids": [40, 41, END], "messages": [USER, ANSWER]}
    rendered = Renderer(tokenizer(CHATML), (END,), vocab_size=300)(parse_row(written, "here"))
    assert rendered.ids.tolist() == [5, 6, 7, 40, 41, END]
    assert rendered.mask.tolist() == [False] * 3 + [True] * 3
    alone = Renderer(None)(parse_row({"prompt_ids": [], "token_ids": [4, 5]}, "here"))
    assert alone.mask.tolist() == [False, True]
    with pytest.raises(InputError, match="here: token id 300 is outside the target's vocabulary of 300"):
        Renderer(None, vocab_size=300)(parse_row({"prompt_ids": [300], "token_ids": [4]}, "here"))
    with pytest.raises(InputError, match="nothing to learn"):
        Renderer(None)(parse_row({"prompt_ids": [4], "token_ids": []}, "here"))


def test_plain_text_is_learned_whole() -> None:
    rendered = Renderer(tokenizer(CHATML))(Conversation("here", text="the cat sat"))
    assert rendered.ids[0] == BOS
    assert rendered.mask.tolist() == [False] + [True] * (len(rendered.ids) - 1)


def test_tools_and_what_else_messages_carry() -> None:
    template = "{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML
    row = parse_row({"messages": [USER, ANSWER], "tools": [{"name": "the cat"}]}, "here")
    rendered = Renderer(tokenizer(template), (END,))(row)
    assert tokenizer(template).decode(rendered.ids[:3].tolist()).startswith("the cat")
    assert supervised(template, rendered) == ["it is a cat<|end|>"]


def test_refusals_name_file_and_line() -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    for template, messages, part in [
        (strict, [USER, ANSWER], "roles must alternate"),
        (CHATML, [USER | {"content": "a\ud83d"}, ANSWER], "surrogate"),
        ("", [USER, ANSWER], "no chat template"),
    ]:
        with pytest.raises(InputError, match=part) as caught:
            render(template, messages)
        assert str(caught.value).startswith("data.jsonl, line 7: ")
    with pytest.raises(InputError, match="no tokenizer"):
        Renderer(None)(parse_row({"text": "a"}, "here"))
    with pytest.raises(InputError, match="turns is 'some'"):
        Renderer(None, turns="some")
    with pytest.raises(InputError, match="template option 'add_generation_prompt'"):
        Renderer(None, template_options={"add_generation_prompt": True})
