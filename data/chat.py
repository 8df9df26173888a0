"""Conversations: messages -> tokens, with special tokens at the borders of turns.

    <|system|>Be brief.<|end|><|user|>Hello!<|end|><|assistant|>Good day.<|end|>

Training counts only the tokens after <|assistant|>, up to <|end|>. Texts never contain special tokens, so the tokens of
a corpus say where the answers are. The last turn of a document is followed by its end-of-text token.
"""

import json
from itertools import chain

import numpy as np

from data.hub_tokenizer import END_OF_TEXT, TURNS, HubTokenizer
from data.tokenizer import CharTokenizer, encode, from_state, to_state
from errors import UserError, require

SYSTEM, USER, ASSISTANT, END = TURNS
ROLES = {"system": SYSTEM, "user": USER, "human": USER, "assistant": ASSISTANT, "gpt": ASSISTANT}
# The same for Transformers and llama.cpp.
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def has_turns(tokenizer):
    """Whether a tokenizer has the tokens of turns."""
    return all(name in tokenizer._special_tokens for name in TURNS)


def require_turns(tokenizer):
    rule = "this model was not trained on conversations: its tokenizer lacks the tokens of turns"
    require(has_turns(tokenizer), f"{rule}; fine-tune it with configs/chat.py")


def with_turns(tokenizer):
    """A tokenizer with the tokens of turns and an end of text; those that it lacks follow its other tokens."""
    rule = "gives each token to a character and has no room for those that begin and end turns"
    require(not isinstance(tokenizer, CharTokenizer), f"tokenizer char {rule}; take gpt2, bpe:N or bytes")
    new = [name for name in (END_OF_TEXT, *TURNS) if name not in tokenizer._special_tokens]
    if isinstance(tokenizer, HubTokenizer):
        return tokenizer.with_tokens(new) if new else tokenizer
    special = {name: tokenizer.n_vocab + index for index, name in enumerate(new)}
    return from_state(to_state(tokenizer) | {"special": tokenizer._special_tokens | special})


def read_messages(messages):
    """[(token of the role, text)] of messages {"role", "content"}, or {"from", "value"}; UserError if a rule is broken.

    Turns of one role may follow each other.
    """
    require(isinstance(messages, list) and messages, "there are no messages")
    turns = []
    for number, message in enumerate(messages, 1):
        require(isinstance(message, dict), f"message {number} is no object with role and content")
        role = message.get("role", message.get("from"))
        text = message.get("content", message.get("value"))
        known = isinstance(role, str) and role in ROLES
        require(known, f"message {number} has the role {role!r}, which must be system, user or assistant")
        require(isinstance(text, str), f"message {number} has no text")
        require(text.strip() or ROLES[role] != ASSISTANT, f"message {number} is an empty answer of the assistant")
        turns.append((ROLES[role], text))
    return turns


def conversation_of(line, fields):
    """A line of JSON as a document: its turns, [[token of the role, text], ...], in JSON."""
    row = json.loads(line)
    turns = read_messages(next((row[field] for field in fields if field in row), None))
    require(any(role == ASSISTANT for role, _ in turns), "no message is of the assistant")
    return json.dumps(turns, ensure_ascii=False)


def encode_turns(tokenizer, turns):
    """[count] uint32 token ids of each turn."""
    special = tokenizer._special_tokens
    edges = [np.uint32([special[role], special[END]]) for role, _ in turns]
    return [np.insert(edge, 1, encode(tokenizer, text)) for edge, (_, text) in zip(edges, turns, strict=True)]


def encode_prompt(tokenizer, messages, room):
    """Token ids that the next answer follows: at most `room`, without the oldest turns if there are too many.

    System messages at the beginning stay. With a turn of the user, the answers to it are left out too.
    """
    require_turns(tokenizer)
    turns = read_messages(messages)
    pieces = [ids.tolist() for ids in encode_turns(tokenizer, turns)]
    roles = [role for role, _ in turns]
    first = next((index for index, role in enumerate(roles) if role != SYSTEM), len(roles))
    while sum(map(len, pieces)) >= room:
        rest = range(first + 1, len(roles))
        if (later := next((index for index in rest if roles[index] != ASSISTANT), None)) is None:
            raise UserError(f"the newest turn does not fit into {room} tokens of the context; shorten it")
        del roles[first:later], pieces[first:later]
    return [*chain(*pieces), tokenizer._special_tokens[ASSISTANT]]


def is_answer(windows, assistant, end):
    """[rows, count - 1] bool: whether windows[:, 1:], which begin outside of an answer, are tokens of answers."""
    index = np.arange(windows.shape[1])
    begun, ended = (np.maximum.accumulate(np.where(windows == x, index, -1), 1) for x in (assistant, end))
    return (begun > ended)[:, :-1]
