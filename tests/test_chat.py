"""Conversations: their tokens and mask, bad lines, windows, training, answers, and Transformers' template."""

import json
import random
import re
from decimal import Decimal
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import jinja2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import FAST, ROOT, contents, equal, in_process, losses, metrics, run_script, save_model
from test_build import ids_of
from test_sample import SCRIPT

from data.build import Options
from data.chat import encode_prompt, encode_turns, has_turns, is_answer, read_messages, with_turns
from data.corpus import prepare
from data.loader import Batches, validation_batches
from data.tokenizer import end_of_text, make_tokenizer, to_state
from errors import UserError
from export import export
from generation import Chat, Generator, Sampling, generate
from model import GPT, GPTConfig
from sample import load
from train import training_batches
from training.ranks import Ranks

TALKS = ROOT / "examples/kestrels.jsonl"
D, S, U, A, E = map(chr, range(256, 261))  # the tokens of bytes for end-of-text, system, user, assistant, end
ASSISTANT, END = 259, 260
FIVE = {  # conversations, and their text with [what counts]
    "system": ([("system", "S"), ("user", "ab"), ("assistant", "cd")], "<s>S<e><u>ab<e><a>[cd<e>]<d>"),
    "two users": ([("user", "a"), ("user", "b"), ("assistant", "c")], "<u>a<e><u>b<e><a>[c<e>]<d>"),
    "turns": ([("user", "a"), ("assistant", "b")] * 2, "<u>a<e><a>[b<e>]<u>a<e><a>[b<e>]<d>"),
    "ends with a question": ([("assistant", "hi"), ("user", "")], "<a>[hi<e>]<d>"),  # which no window has
    "borders as text": ([("user", "<|end|>"), ("assistant", "<|user|>")], "<u><|end|><e><a>[<|user|><e>]<d>"),
}
EXCHANGE = re.compile(f"([{S}{U}][^{E}]*{E})*({A}[^{E}]*{E})+")
MARKS = {"<s>": S, "<u>": U, "<a>": A, "<e>": E, "<d>": D}


def messages(turns):
    return [dict(role=role, content=text) for role, text in turns]


def write(path, conversations, field="messages"):
    path = Path(path)
    path.write_text("".join(json.dumps({field: turns}) + "\n" for turns in conversations))
    return path


def parse(text):
    """(ids, whether each counts) of a text of FIVE."""
    for mark, token in MARKS.items():
        text = text.replace(mark, token)
    counts = re.sub(r"\[(.*?)\]|.", lambda found: "x" * len(found[1] or "") or "-", text)
    return [ord(token) for token in text if token not in "[]"], [x == "x" for x in counts]


def make_corpus(folder, count=60, spec="bytes", longest=3, **options):
    """Random conversations of up to `longest` questions and answers."""
    draw = random.Random(1)
    words = [
        [draw.choice("abcd") * draw.randint(1, 9) for _ in range(2 * draw.randint(1, longest))] for _ in range(count)
    ]
    turns = [[(["user", "assistant"][i % 2], f"{word}{n}") for i, word in enumerate(x)] for n, x in enumerate(words)]
    return prepare("chat", spec, write(folder / "chat.jsonl", map(messages, turns)), Options(**options))


@pytest.mark.parametrize("name", FIVE)
def test_tokens_and_mask_by_hand(data_root, tmp_path, name):
    """Of each of five conversations, which stands alone in its window; the rest is padding."""
    turns, text = FIVE[name]
    other = [("user", "x" * 50), ("assistant", "y")]
    path = write(tmp_path / "a.jsonl", [messages(turns), messages(other)])
    corpus = prepare("chat", "bytes", path, Options(val_share=0.5))
    ids, counts = parse(text)
    for split in (corpus.train, corpus.val):
        [[inputs, targets]] = [batch() for batch in validation_batches(split, 64, 8)]
        if inputs[0, : len(ids)].tolist() == ids:
            break
    expected = [i if counted else -100 for i, counted in zip(ids, counts, strict=True)]
    assert inputs[0].tolist() == ids + [END] * (64 - len(ids))
    assert targets[0].tolist() == expected[1:] + [-100] * (65 - len(ids))
    assert split.counted == sum(counts) and split.text_bytes == sum(len(t) for role, t in turns if role == "assistant")


def test_other_forms(data_root, tmp_path):
    """from/value, Parquet, other fields and fields that are null give the same tokens."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    turns = [FIVE[name][0] for name in FIVE] * 3
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    theirs = [[{"from": names[role], "value": text} for role, text in x] for x in turns]
    other = dict(at=np.datetime64("9999999-01-01", "s"), image=b"\x89PNG", cost=Decimal(1))
    rows = [[message | other for message in messages(x)] for x in turns]
    table = pyarrow.table({"messages": [None] * 15, "conversations": rows})
    parquet.write_table(table, tmp_path / "c.parquet")
    files = [(write(tmp_path / "a.jsonl", map(messages, turns)), "text"), (tmp_path / "c.parquet", "text")]
    files.append((write(tmp_path / "b.jsonl", theirs, "conversations"), "text"))
    files.append((write(tmp_path / "d.json", theirs, "x"), "x"))
    both = "".join(json.dumps({"messages": None, "conversations": x}) + "\n" for x in theirs)
    (tmp_path / "e.jsonl").write_text(both)
    files.append((tmp_path / "e.jsonl", "text"))
    found = [prepare("chat", "bytes", path, Options(val_share=0.3, text_field=field)) for path, field in files]
    assert len({corpus.sha256 for corpus in found}) == 1


def test_what_cannot_be_conversations(data_root, tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", [messages(FIVE["turns"][0])])
    with pytest.raises(UserError, match=r"tokenizer char .* has no room .*; take gpt2, bpe:N or bytes"):
        prepare("chat", "char+eot", path)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match=r"a\.txt is no file of conversations; its name must end in \.jsonl or"):
        prepare("chat", "bytes", tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"block_size=4 .*give a larger one"):
        Batches(make_corpus(tmp_path, longest=1, val_share=0.2).train, 4, 1, 0)


@pytest.mark.parametrize("spec", ["bytes", "bytes+eot", "bpe:300", "of another"])
def test_a_tokenizer_keeps_its_tokens(tmp_path, spec):
    """The tokens of turns follow them, once."""
    if spec == "of another":
        theirs = pytest.importorskip("tokenizers").ByteLevelBPETokenizer()
        theirs.train_from_iterator(["the sea keeps"] * 9, vocab_size=270, special_tokens=["</s>"])
        theirs.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        spec = f"run:{tmp_path}"
    tokenizer = make_tokenizer(spec, ["the sea keeps the sea " * 9])
    grown = with_turns(tokenizer)
    assert has_turns(grown) and not has_turns(tokenizer) and end_of_text(grown) is not None
    assert grown.n_vocab == tokenizer.n_vocab + 4 + (end_of_text(tokenizer) is None)
    assert grown.encode_ordinary("the sea <|user|>") == tokenizer.encode_ordinary("the sea <|user|>")
    assert grown.decode([grown._special_tokens["<|user|>"]]) == "<|user|>"
    assert to_state(with_turns(grown)) == to_state(grown)


def text_of(ids):
    """A character for each token."""
    return "".join(map(chr, ids))


def parts_of(split, room):
    """Yield the parts of at most `room` tokens into which the conversations of a split are cut, as text_of()."""
    for text in text_of(ids_of(split)).split(D)[:-1]:
        system, parts = re.match(f"({S}[^{E}]*{E})*", text)[0], [""]
        for exchange in EXCHANGE.finditer(text, len(system)):
            fits = EXCHANGE.match(text, exchange.start(), exchange.start() + max(0, room - len(system)))
            if len(system + parts[-1] + exchange[0]) <= room:
                parts[-1] += exchange[0]
            elif fits:
                parts += [fits[0], ""][: 1 + (fits[0] != exchange[0])]
            else:
                parts.append("")
        yield from (system + part for part in parts if part)


@pytest.mark.parametrize("block_size", [12, 20, 40, 60, 999])
def test_windows(data_root, tmp_path, block_size):
    """An epoch has each conversation once, whole or split at questions; only answers that cannot fit are lost."""
    draw, conversations = random.Random(block_size), []
    for number in range(150):
        roles = ["system"] * draw.choice([0, 0, 1, 2]) + draw.choices(["user", "assistant", "system"], [6, 5, 1], k=9)
        turns = [(role, draw.choice("abcd") * draw.randint(1, 9)) for role in [*roles, "assistant", "user"]]
        conversations.append(messages([("user", str(number)), *turns] if number % 3 else turns))
    file, options = write(tmp_path / "a.jsonl", conversations), Options(shard_tokens="100", val_share=0.2)
    corpus = prepare("chat", "bytes", file, options)
    windows, found, rooms = Batches(corpus.train, block_size, 1, seed=3).tokens, [], []
    rows = windows.windows(np.arange(windows.count) * block_size, block_size + 1)
    for row in rows:
        *pieces, padding = text_of(row).split(D)
        found += pieces
        rooms.append(len(padding))
    assert sorted(found) == sorted(parts_of(corpus.train, block_size))
    assert sum(sorted(rooms)[-2:]) < block_size + 1  # no two windows would fit into one
    assert windows.counted == is_answer(rows, ASSISTANT, END).sum()
    assert (windows.counted < corpus.train.counted) == (block_size < 999)


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_has_the_gradient_of_its_answers(data_root, tmp_path, micro_batch, world):
    """For any split into micro-batches and ranks; one window of the batch has no answer."""
    corpus = make_corpus(tmp_path, val_share=0.2)
    sizes = dict(vocab_size=261, block_size=64, n_layer=1, n_head=2, n_embd=16)
    config = GPTConfig(**sizes, mask_documents=True, end_of_text=256)
    model, batches = GPT(config).double(), Batches(corpus.train, 64, 8, seed=1)
    inputs, targets = batches.batch(0)
    targets[3] = -100
    batches.batch = lambda step, rows=slice(None): (inputs[rows], targets[rows])
    logits = model(inputs)
    F.cross_entropy(logits[targets >= 0], targets[targets >= 0]).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    options = SimpleNamespace(batch_size=8, dropout=0.0, seed=1)
    for rank in range(world):
        ranks = Ranks(rank, world, "cpu", sharded=True)
        size = min(micro_batch, 8 // world)
        [step] = training_batches(batches, range(1), options, ranks, size)
        for part, theirs, weight, *_ in step:
            (model(part, theirs) * weight.double()).backward()
    for found, parameter in zip(expected, model.parameters(), strict=True):
        rounding = 2**-24 * found.abs().max().item()  # of the weights, which are float32
        torch.testing.assert_close(parameter.grad, found, rtol=1e-6, atol=rounding)


CHAT = FAST | dict(data="chat", input="chat.jsonl", mask_documents=True, steps=20, eval_every=10, block_size=64)


def test_resume_is_bit_exact_and_epochs_become_steps(folder, capsys):
    """--epochs sets the steps, which a resumed run has as its own; more --steps are allowed as in any run."""
    corpus = make_corpus(folder, val_share=0.2)
    windows = Batches(corpus.train, 64, 8, 0).windows_per_epoch
    options = CHAT | dict(learning_rate=1e-3, min_learning_rate=1e-3, warmup_steps=0)
    del options["steps"]
    assert in_process(capsys, **options, epochs=4, name="whole").returncode == 0
    steps = round(4 * windows / 8)
    saved = json.loads(Path("runs/whole/config.json").read_text())
    assert (saved["steps"], saved["epochs"]) == (steps, 0) and len(losses(folder, "whole")) == steps
    assert in_process(capsys, **options, epochs=2, name="half").returncode == 0
    assert in_process(capsys, "--resume", "runs/half", "--steps", str(steps), "--allow_changes").returncode == 0
    assert losses(folder, "half") == losses(folder, "whole")
    assert equal(contents("runs/half/checkpoint.pt")["model"], contents("runs/whole/checkpoint.pt")["model"])
    assert "give one of them" in in_process(capsys, **options, epochs=2, steps=3).stderr


def test_the_example_is_well_formed():
    """Questions, which all differ, take turns with answers."""
    rows = [json.loads(line)["messages"] for line in TALKS.read_text("ascii").splitlines()]
    for row in rows:
        assert [message["role"] for message in row] == ["user", "assistant"] * (len(row) // 2)
        assert all(message["content"].strip() == message["content"] != "" for message in row)
    questions = [re.sub(r"\W+", " ", message["content"].lower()).strip() for row in rows for message in row[::2]]
    assert len({*questions}) == len(questions)


@pytest.mark.slow
def test_the_example_is_learned(folder, capsys, monkeypatch):
    """In a part of the steps of configs/talk.py; best.pt is of the last one."""
    assert in_process(capsys, str(ROOT / "configs/talk.py"), input=TALKS, steps=300, device="cpu").returncode == 0
    first, last = [line["val_loss"] for line in metrics(folder, "talk") if "val_loss" in line]
    assert last < first / 4
    lines = iter(["How many eggs do they lay?"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, "exit"))
    flags = ("talk", "--chat", "--temperature", "0", "--device", "cpu")
    code, out, _ = run_script(monkeypatch, capsys, SCRIPT, *flags)
    assert code == 0 and out.strip() == "Usually four to six."


@pytest.mark.parametrize("block_size, longest", [(64, 1), (18, 9)])
def test_evaluation(folder, capsys, monkeypatch, block_size, longest):
    """Each answer is scored given its part of a conversation; a run counts the same, and its export gives that loss."""
    corpus, results, sums = make_corpus(folder, longest=longest, val_share=0.2), {}, np.zeros(3)
    run = in_process(capsys, **CHAT | dict(eval_batches=0, block_size=block_size))
    (*_, last), (model, _, _) = metrics(folder), load("run", "cpu")
    export("runs/run", "out")
    for flags in ((), ("out", "--text", "chat.jsonl")):
        _, out, _ = run_script(monkeypatch, capsys, str(ROOT / "evaluate.py"), "--json", "--device", "cpu", *flags)
        results |= json.loads(out)["results"]
    for name, split in (("training", corpus.train), ("validation", corpus.val)):
        total, tokens = 0.0, 0
        for part in (torch.tensor([[*map(ord, text)]]) for text in parts_of(split, block_size)):
            counts = is_answer(part.numpy(), ASSISTANT, END)
            total += F.cross_entropy(model(part[:, :-1])[counts], part[:, 1:][counts], reduction="sum").item()
            tokens += counts.sum()
        assert f"{tokens:,} {name}" in run.stdout
        sums += total, tokens, split.counted
    val, whole, left_out = results["val"], results["chat.jsonl"], int(sums[2] - sums[1])
    assert (val["loss"], val["tokens"]) == pytest.approx((total / tokens, tokens), rel=1e-5)
    assert (whole["loss"] * whole["tokens"], whole["tokens"]) == pytest.approx(tuple(sums[:2]), rel=1e-5)
    assert (left_out > 0) == (f"({left_out:,} more are left out" in " ".join(run.stdout.split())) == (block_size == 18)
    assert left_out or val["bytes"] == split.text_bytes
    assert (last["val_loss"], last["val_bpb"]) == pytest.approx((val["loss"], val["bits_per_byte"]), rel=1e-5)


def test_training_goes_on_with_a_text(folder, capsys):
    """Its tokenizer has the name of the one without turns, under which the text may be prepared already."""
    make_corpus(folder, val_share=0.2)
    assert in_process(capsys, **CHAT | dict(name="chat")).returncode == 0
    prepare("text", "bytes", "corpus.txt")
    options = dict(data="text", input="corpus.txt", device="cpu", steps=1, batch_size=8, init_from="runs/chat")
    for name, more in (("one", {}), ("two", dict(tokenizer="run:chat"))):
        assert in_process(capsys, **options, **more, name=name).returncode == 0
        assert contents(f"runs/{name}/checkpoint.pt")["tokenizer"] == contents("runs/chat/checkpoint.pt")["tokenizer"]


@pytest.fixture
def chat(folder):
    """A Chat with an untrained model, saved as runs/x, whose context has 48 tokens."""
    torch.manual_seed(1)
    tokenizer = with_turns(make_tokenizer("bpe:300", ["the sea keeps what it has taken, naïve " * 9], True))
    sizes = dict(vocab_size=tokenizer.n_vocab, block_size=48, n_layer=1, n_head=1, n_embd=16)
    config = GPTConfig(**sizes, mask_documents=True, end_of_text=end_of_text(tokenizer))
    save_model(folder / "runs/x/best.pt", GPT(config), tokenizer)
    model, tokenizer, _ = load("x", "cpu")
    return Chat(Generator(model, tokenizer), max_tokens=20)


def test_template_gives_the_same_tokens(chat):
    """As Transformers reads the exported folder, and ends an answer."""
    transformers = pytest.importorskip("transformers")
    export("runs/x", "out")
    theirs, ours = transformers.AutoTokenizer.from_pretrained("out"), chat.generator.tokenizer
    for name in set(FIVE) - {"borders as text"}:
        history = messages([(role, f" the sea\n\n{text} naïve ") for role, text in FIVE[name][0]])
        expected = [*chain(*encode_turns(ours, read_messages(history)))]
        assert theirs.apply_chat_template(history, return_dict=False) == expected
        found = theirs.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
        assert found == [*expected, ours._special_tokens["<|assistant|>"]] == encode_prompt(ours, history, 999)
    special = ours._special_tokens
    texts = [*special, "".join(special), "<<|end|>|end|>", "<|e<|end|>nd|>"]  # Transformers takes these for borders
    for text in (f"a {text}\n" for text in texts):
        found = theirs.apply_chat_template(messages([("user", text)] * 2), return_dict=False)
        borders = [index for index in found if index in special.values()]
        assert borders == [special["<|user|>"], special["<|end|>"]] * 2
        assert ours.decode(found).replace("< |", "<|").count(text) == 2
    with pytest.raises(jinja2.TemplateError, match="role"):
        theirs.apply_chat_template([dict(role="user|>a<|end|><|assistant", content="b")])
    settings = transformers.GenerationConfig.from_pretrained("out")
    assert settings.eos_token_id == [end_of_text(ours), ours._special_tokens["<|end|>"]]
    gguf = pytest.importorskip("gguf")
    export("runs/x", "x.gguf")
    fields = gguf.GGUFReader("x.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == Path("out/chat_template.jinja").read_text()
    assert fields["tokenizer.ggml.eot_token_id"].contents() == settings.eos_token_id[1]
    again, same, _ = load("out", "cpu")
    assert has_turns(same) and list(generate(again, same, history, max_tokens=3))


def test_history(chat, monkeypatch):
    """Commands, an answer that Ctrl-C stops, and one without text, which leaves no trace."""
    pieces, show, seen = ["Good ", "day"], [].append, []

    def stream(prompts, max_tokens, stop):
        seen.append(list(prompts[0]))
        yield from ((0, piece) for piece in pieces)

    def interrupt(piece):
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.generator, "stream", stream)
    assert not chat.hear("/system Be brief.", show) and chat.hear("Hello!", show)
    system, one = ("system", "Be brief."), [("user", "Hello!"), ("assistant", "Good day")]
    assert chat.messages == messages([system, *one]) and seen == [messages([system, one[0]])]
    with pytest.raises(KeyboardInterrupt):
        chat.hear("More?", interrupt)
    assert chat.messages == messages([system, *one, ("user", "More?"), ("assistant", "Good ")])
    pieces[:] = [" "]
    assert chat.hear("Even more?", show) and len(chat.messages) == 5
    chat.hear("/reset", show)
    assert chat.messages == messages([system])
    chat.hear("/system", show)
    assert chat.messages == []
    with pytest.raises(UserError, match=r"there is no /help, only /reset and /system TEXT"):
        chat.hear("/help", show)


def test_the_oldest_turns_are_left_out_whole(chat):
    tokenizer = chat.generator.tokenizer
    history = [("system", "S"), *[("user", "aaaa"), ("assistant", "bbbb")] * 2, ("user", "e")]
    whole = [encode_prompt(tokenizer, messages([history[0], *history[first:]]), 999) for first in (1, 3, 5)]
    sizes = list(map(len, whole))
    for room in range(sizes[2], sizes[0] + 2):
        expected = next(ids for ids in whole if len(ids) <= room)
        assert encode_prompt(tokenizer, messages(history), room) == expected
    half, mark = (encode_prompt(tokenizer, messages([("user", text)]), 99) for text in ("\ud83d", "\ufffd"))
    assert half == mark  # half of a surrogate pair
    with pytest.raises(UserError, match="do not fit into 6 tokens of the context; shorten them"):
        encode_prompt(tokenizer, messages(history), sizes[2] - 1)


def test_answers_end_at_a_border_and_fit_into_the_context(chat):
    """After any history an answer has room; where the context is full, it ends."""
    model, tokenizer = chat.generator.model, chat.generator.tokenizer
    for count in range(1, 9):
        history = messages([("user", "the sea"), ("assistant", "keeps")] * count + [("user", "what")])
        for seed in range(5):
            generator = Generator(model, tokenizer, sampling=Sampling(top_k=0), seed=seed)
            text = "".join(piece for _, piece in generator.stream([history], max_tokens=100))
            assert "<|" not in text and generator.prompt_tokens + generator.new_tokens <= 48
    with pytest.raises(UserError, match="message 1 has the role 'bot'"):
        list(generate(model, tokenizer, messages([("bot", "a")])))
    plain = make_tokenizer("bytes")
    with pytest.raises(UserError, match=r"was not trained on conversations.*configs/chat\.py"):
        list(generate(model, plain, messages([("user", "a")])))


def test_the_command(chat, monkeypatch, capsys):
    lines = iter(["the sea", "", "/nothing", "/system Be brief.", "keeps"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, "exit"))
    code, out, err = run_script(monkeypatch, capsys, SCRIPT, "x", "--chat", "--device", "cpu", "--max_tokens", "9")
    assert code == 0 and err.count("prompt ") == 2 and err.count("error: there is no /nothing") == 1
    assert "/system TEXT" in err and out.count("\n") >= 2
    for flags in (["--num_samples", "2"], ["--prompt", "a"]):
        code, *_ = run_script(monkeypatch, capsys, SCRIPT, "x", "--chat", *flags)
        assert "--prompt and --num_samples do not go with" in code
