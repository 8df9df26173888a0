"""Conversations: messages -> tokens -> windows. Special tokens stand at the borders of turns:

    <|system|>Be brief.<|end|><|user|>Hello!<|end|><|assistant|>Good day.<|end|>

The loss counts only the tokens after <|assistant|>, up to <|end|>. No text contains special tokens, so the tokens of a
corpus say where the answers are. In a corpus, a conversation is a document: its end-of-text token follows.

A conversation that is longer than the context is split at questions: each further part begins with the first system
messages and a question, as the prompt of an answer does when the context is full (encode_prompt).
"""

import json
from bisect import bisect_left, insort
from itertools import chain, pairwise

import numpy as np

from data.hub_tokenizer import END_OF_TEXT, TURNS, HubTokenizer
from data.shards import Turns
from data.tokenizer import encode, end_of_text, from_state, is_char, mend, to_state
from errors import UserError, require

SYSTEM, USER, ASSISTANT, END = TURNS
ROLES = {"system": SYSTEM, "user": USER, "human": USER, "assistant": ASSISTANT, "gpt": ASSISTANT}
KEYS = {"role", "from", "content", "value"}  # of a message
FORM = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
TEMPLATE = (  # of Jinja; TEXT is the content of a message
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('a role must be system, user or assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + TEXT + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def has_turns(tokenizer):
    """Whether a tokenizer has the tokens of turns."""
    return all(name in tokenizer._special_tokens for name in TURNS)


def require_turns(tokenizer):
    rule = "this model was not trained on conversations: its tokenizer lacks the tokens of turns"
    require(has_turns(tokenizer), f"{rule}; fine-tune it with configs/chat.py")


def turns_of(tokenizer):
    special = tokenizer._special_tokens
    return Turns(special[ASSISTANT], special[END], end_of_text(tokenizer), special[SYSTEM])


def with_turns(tokenizer):
    """A tokenizer with the tokens of turns and an end of text; those that it lacks follow its other tokens."""
    rule = "gives each token to a character and has no room for those that begin and end turns"
    require(not is_char(tokenizer), f"tokenizer char {rule}; take gpt2, bpe:N or bytes")
    new = [name for name in (END_OF_TEXT, *TURNS) if name not in tokenizer._special_tokens]
    if isinstance(tokenizer, HubTokenizer):
        return tokenizer.with_tokens(new) if new else tokenizer
    special = {name: tokenizer.n_vocab + index for index, name in enumerate(new)}
    return from_state(to_state(tokenizer) | {"special": tokenizer._special_tokens | special})


def chat_template(tokenizer):
    """The template for Transformers and llama.cpp.

    These take the name of a special token in a text for the token. A blank after its first character prevents that.
    """
    names = [tokenizer.decode([index]) for index in tokenizer._special_tokens.values()]
    cuts = [f".replace({name!r}, {f'{name[0]} {name[1:]}'!r})" for name in names]
    return TEMPLATE.replace("TEXT", "".join(["message['content']", *cuts]))


def read_messages(messages):
    """[(token of the role, text)] of messages {"role", "content"} or {"from", "value"}; UserError for a wrong one."""
    require(isinstance(messages, list) and messages, "there are no messages, which must be a list")
    turns = []
    for number, message in enumerate(messages, 1):
        require(isinstance(message, dict), f"message {number} is no object with role and content")
        role, text = message.get("role", message.get("from")), message.get("content", message.get("value"))
        require(role in [*ROLES], f"message {number} has the role {role!r}, which must be system, user or assistant")
        parts = "a list of parts; join their texts" if isinstance(text, list) else "no text"
        require(isinstance(text, str), f"message {number} has {parts}")
        require(text.strip() or ROLES[role] != ASSISTANT, f"message {number} is an empty answer of the assistant")
        turns.append((ROLES[role], text))
    return turns


def conversation_of(row, fields):
    """A row as a document: its turns, [[token of the role, text], ...], in JSON."""
    require(isinstance(row, dict), f"it is no JSON object; write {FORM}")
    messages = next((row[field] for field in fields if row.get(field) is not None), None)
    require(messages is not None, f"there are no messages, but {', '.join(row)}; write {FORM}")
    turns = read_messages(messages)
    require(any(role == ASSISTANT for role, _ in turns), "no message is of the assistant")
    return json.dumps(turns, ensure_ascii=False)


def encode_turns(tokenizer, turns):
    """The token ids of each turn, lists of int."""
    special = tokenizer._special_tokens
    return [[special[role], *encode(tokenizer, text).tolist(), special[END]] for role, text in turns]


def encode_prompt(tokenizer, messages, room):
    """Token ids, at most `room`, that the next answer follows.

    If the messages are too long, the oldest questions are left out with their answers, but no system message before.
    """
    require_turns(tokenizer)
    turns = [(role, mend(text)) for role, text in read_messages(messages)]
    pieces = encode_turns(tokenizer, turns)
    count = next((index for index, (role, _) in enumerate(turns) if role != SYSTEM), len(turns))
    for first in range(count, max(count + 1, len(turns))):
        if first == count or turns[first][0] != ASSISTANT:
            ids = [*chain(*pieces[:count], *pieces[first:]), tokenizer._special_tokens[ASSISTANT]]
            if len(ids) <= room:
                return ids
    rule = "the newest turn and the first system messages do not fit"
    raise UserError(f"{rule} into {room} tokens of the context; shorten them")


def is_answer(windows, assistant, end):
    """[rows, count - 1] bool: whether windows[:, 1:], which begin outside of an answer, are tokens of answers."""
    index = np.arange(windows.shape[1])
    begun, ended = (np.maximum.accumulate(np.where(windows == x, index, -1), 1) for x in (assistant, end))
    return (begun > ended)[:, :-1]


class Windows:
    """The conversations of a split, packed by best fit into windows of block_size + 1 tokens, with padding.

    Window w is windows([w * block_size], block_size + 1), as of a text. Long conversations are split into parts.
    count: of windows. counted: tokens of the answers in them. text_bytes: of these answers; where others do not fit, an
    estimate from the bytes per token of all.
    """

    def __init__(self, tokens, block_size):
        self.tokens, self.block_size, self.turns = tokens, block_size, tokens.turns
        self.parts, lost = split(tokens.answers, block_size)
        starts, bodies, questions, ends = self.parts.T
        self.packed = best_fit(bodies - starts + ends - questions + 1, block_size + 1)
        self.count = len(self.packed)
        self.counted = tokens.counted - lost
        rule = f"no answer of {tokens.about} ends within block_size={block_size} tokens"
        require(self.count, f"{rule}; give a larger one, or shorter conversations")
        self.text_bytes = round(tokens.text_bytes * self.counted / tokens.counted)

    def __len__(self):
        return self.count * self.block_size + 1

    def windows(self, starts, length):
        """[len(starts), length] array of ids, for starts that are multiples of block_size."""
        rows = np.full((len(starts), length), self.turns.end, self.tokens.shards[0].dtype)
        for row, window in zip(rows, starts // self.block_size, strict=True):
            pieces = []
            for start, body, question, end in self.parts[self.packed[window]]:
                pieces += [self.tokens[start:body], self.tokens[question:end], [self.turns.end_of_text]]
            ids = np.concatenate(pieces)
            row[: len(ids)] = ids
        return rows


def split(answers, block_size):
    """Split conversations into parts of at most block_size tokens, each with as many answers as fit.

    A part is the first system messages and then whole exchanges, which are a question and its answers. An exchange that
    is too long by itself is a part that ends after the last answer that fits, if any.

    Args:
        answers: as Tokens.answers.

    Returns:
        (parts [parts, 4] int64: where the conversation begins, where its first system messages end, where the first
        question of the part begins and where its last answer ends; the number of tokens in answers that do not fit).
    """
    before = np.append(-1, answers[:-1, 3])  # where the answer before ends
    first = np.flatnonzero(answers[:, 2] - 1 > before)  # answers of exchanges; others follow an answer
    parts, lost = [], 0
    for low, high in pairwise([*first.tolist(), len(answers)]):
        exchange = answers[low:high].tolist()
        start, body, *_ = exchange[0]
        question, close = max(body, int(before[low])), exchange[-1][3]
        room = block_size - (body - start)
        if parts and parts[-1][0] == start and close - parts[-1][2] <= room:  # it fits into the part before
            parts[-1][3] = close
            continue
        part = [start, body, question, 0]
        for _, _, begin, end in exchange:
            if end - question <= room:
                part[3] = end
            else:
                lost += end - begin
        if part[3]:
            parts.append(part)
    return np.array(parts, np.int64).reshape(-1, 4), lost


def best_fit(sizes, room):
    """Put each index, from the largest size on, where the least room is enough; returns lists of indices."""
    bins, by_room = [], [[] for _ in range(room + 1)]
    rooms = []  # sorted: those for which by_room has a bin
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        at = bisect_left(rooms, size)
        if at < len(rooms):
            left = rooms[at]
            chosen = by_room[left].pop()
            if not by_room[left]:
                rooms.pop(at)
        else:
            left, chosen = room, []
            bins.append(chosen)
        chosen.append(index)
        if not by_room[left - size]:
            insort(rooms, left - size)
        by_room[left - size].append(chosen)
    return bins
