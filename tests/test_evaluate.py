"""evaluate.py: losses and accuracies against loops without batches, tasks from files and the hub, and errors."""

import io
import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from helpers import PATHS, run_script
from hub_server import running
from pyarrow import parquet

from data import make_tokenizer, open_corpus, to_state, validation_batches
from evaluate import evaluate_file
from model import GPT, GPTConfig
from sample import load
from training.checkpoint import FORMAT, save_checkpoint
from training.config import Config
from training.distributed import Ranks
from training.step import evaluate
from training.tasks import evaluate_task, read_task

SCRIPT = str(Path(__file__).parents[1] / "evaluate.py")
BLOCK = 16
WORDS = ["the", "sea", "keeps", "what", "has", "taken", "and", "river", "bends", "at"]
CHOICES = [
    {"context": "the sea", "choices": ["keeps", "bends at the mile", "x"], "label": 0},
    {"query": "what the river ", "choices": ["has", "has taken away, and what it keeps"], "gold": 1},  # long for BLOCK
    {"context": "a long context " * 5, "choices": ["ends here", "é"], "label": 1},  # longer than BLOCK
]
PASSAGES = [{"text": "the sea keeps what the sea has taken"}, {"text": "so the river\nbends"}, {"text": "seas and sea"}]


def make_model(**changes):
    """An untrained model, with weights so large that its choices are clear, and tokens of single bytes."""
    torch.manual_seed(1)
    options = dict(vocab_size=257, block_size=BLOCK, n_layer=2, n_head=2, n_embd=32, dropout=0.2)
    model = GPT(GPTConfig(**options | changes)).eval()
    with torch.no_grad():
        model.embed.weight.mul_(8)
    return model, make_tokenizer("bytes+eot")


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def measure(model, tokenizer, path, batch_size):
    return evaluate_task(model, tokenizer, path, *read_task(path), batch_size)


@pytest.fixture
def call(folder, monkeypatch, capsys):
    """evaluate.py in this process: call(*flags) -> (exit code, out, err)."""

    return lambda *flags: run_script(monkeypatch, capsys, SCRIPT, *flags, "--device", "cpu")


@pytest.fixture
def imported(folder):
    """A run folder whose checkpoint names no corpus, with make_model()."""
    model, tokenizer = make_model()
    path = folder / "runs/imported/checkpoint.pt"
    path.parent.mkdir(parents=True)
    contents = dict(format=FORMAT, model=model.state_dict(), model_config=asdict(model.config), step=1)
    save_checkpoint(path, contents | dict(tokenizer=to_state(tokenizer)))
    return path.parent


@pytest.mark.parametrize("stride", [1, 5, BLOCK])
@pytest.mark.parametrize("length", [2, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_loss_with_stride_is_that_of_a_loop_over_tokens(tmp_path, stride, length):
    """The loop gives token number t the context that the stride leaves it."""
    model, tokenizer = make_model()
    path, text = tmp_path / "text.txt", ("naïve: " + " ".join(WORDS) * 3).encode()[:length].decode()
    path.write_text(text)
    ids = list(text.encode())
    total = 0.0
    for t in range(1, length):
        start = max(0, -(-(t - BLOCK) // stride)) * stride
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:t]]))[0, -1]
        assert t - start >= min(t, BLOCK - stride + 1)
        total -= logits.log_softmax(-1)[ids[t]].item()
    result = evaluate_file(model, tokenizer, path, stride, batch_size=3)
    assert result["loss"] == pytest.approx(total / (length - 1), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert (result["tokens"], result["bytes"]) == (length, length)
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2))  # a token is a byte


def test_batches_and_pieces_of_a_text_do_not_change_its_loss(tmp_path, monkeypatch):
    """Also a text that is read in many pieces, because they are small here, and that has a mark and other line ends."""
    model, tokenizer = make_model()
    path, text = tmp_path / "text.txt", "".join(f"Line {number} of the naïve text.\n" for number in range(40))
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    whole = evaluate_file(model, tokenizer, path, 7, batch_size=64)
    monkeypatch.setattr("training.score.CPU_LOGITS", 3 * 257)  # of three tokens
    monkeypatch.setattr("data.documents.CHUNK", 50)
    monkeypatch.setattr("data.tokenizer.chunks.__defaults__", (50,))
    parts = evaluate_file(model, tokenizer, path, 7, batch_size=2)
    assert parts == pytest.approx(whole, rel=1e-6) and whole["bytes"] == len(text.encode())


@pytest.mark.parametrize(
    "options",
    [{}, dict(mask_documents=True, tokenizer="bytes+eot", attention="auto"), dict(tokenizer="bytes+eot", **PATHS)],
    ids=["gpt2", "masked", "recipe"],
)
def test_loss_of_a_split_is_that_of_training(folder, run, call, options):
    """Training leaves out the tokens after the last whole window; corpus.txt, without options, has none."""
    write(folder / "docs.jsonl", [{"text": f"the sea keeps {number}"} for number in range(300)])
    source = dict(input="docs.jsonl" if options else "corpus.txt")
    code, err = run(steps=4, eval_every=2, eval_batches=0, block_size=11, **source | options)
    assert code == 0, err
    model, _, contents = load("runs/run", "cpu")
    config = Config(**contents["config"])
    corpus = open_corpus(config.data, config.tokenizer, config.input)
    whole, left = divmod(len(corpus.val) - 1, config.block_size)
    batches = validation_batches(corpus.val, config.block_size, 8)
    total = evaluate(model, batches, config, Ranks(0, 1, "cpu")) * whole * config.block_size
    assert (left > 0) == bool(options)
    if left:
        rest = torch.from_numpy(corpus.val.windows([whole * config.block_size], left + 1).astype(np.int64))
        with torch.no_grad():
            total += left * model.eval()(rest[:, :-1], rest[:, 1:]).item()
    result = json.loads(call("--json")[1])["results"]["val"]
    assert (result["tokens"], result["bytes"]) == (len(corpus.val), corpus.val.text_bytes)
    assert result["loss"] == pytest.approx(total / (len(corpus.val) - 1), rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2) / corpus.bytes_per_token)
    train = json.loads(call("--json", "--split", "train", "--stride", "5")[1])["results"]["train"]
    assert train["tokens"] == len(corpus.train)


@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_tasks_are_scored_as_without_batches(tmp_path, batch_size):
    """By a loop over choices that reads one window at a time and pads nothing."""
    model, tokenizer = make_model()

    def likelihood(context, choice):
        """(log-likelihood, whether greedy) of " " + choice, of which a window scores at most BLOCK tokens."""
        ids, total, greedy = list(f"{context} {choice}".encode()), 0.0, True
        start = len(context.rstrip().encode())
        if start == 0:
            ids, start = [256, *ids], 1
        for end in range(len(ids), start, -BLOCK):
            window = torch.tensor(ids[max(0, end - BLOCK - 1) : end])
            with torch.no_grad():
                logits = model(window[None, :-1])[0].log_softmax(-1)
            count = min(end - start, BLOCK)
            right = logits.gather(1, window[1:, None])[-count:]
            total, greedy = total + right.sum().item(), greedy and torch.equal(right, logits.amax(1, True)[-count:])
        return total, greedy

    acc, acc_norm = [], []
    for record in CHOICES:
        context, label = (record[name] for name in list(record)[::2])
        scores = [likelihood(context, choice)[0] for choice in record["choices"]]
        acc.append(np.argmax(scores) == label)
        acc_norm.append(np.argmax([s / len(c) for s, c in zip(scores, record["choices"], strict=True)]) == label)
    assert acc != acc_norm and 0 < sum(acc) < len(acc)  # so that the numbers below tell something
    result = measure(model, tokenizer, write(tmp_path / "choices.jsonl", CHOICES), batch_size)
    assert (result["acc"], result["acc_norm"], result["items"]) == (np.mean(acc), np.mean(acc_norm), len(CHOICES))
    for name, right in (("acc_stderr", acc), ("acc_norm_stderr", acc_norm)):
        assert result[name] == pytest.approx(np.std(right, ddof=1) / math.sqrt(len(right)))

    words = [likelihood(*passage["text"].rsplit(" ", 1)) for passage in PASSAGES]
    result = measure(model, tokenizer, write(tmp_path / "passages.jsonl", PASSAGES), batch_size)
    assert result["perplexity"] == pytest.approx(math.exp(-np.mean([total for total, _ in words])), rel=1e-5)
    assert result["acc"] == np.mean([greedy for _, greedy in words])


def test_a_last_word_is_right_if_all_its_tokens_are_the_most_likely_ones(tmp_path):
    """The model expects a space after "a", "b" after a space, and "c" after "b"."""
    model, tokenizer = make_model()
    expected = torch.zeros(257, dtype=torch.int64)
    expected[torch.tensor(list(b"a b"))] = torch.tensor(list(b" bc"))
    model.hidden = lambda tokens: torch.nn.functional.one_hot(expected[tokens], 257).float()
    model.logits = lambda hidden: 9 * hidden
    path = write(tmp_path / "passages.jsonl", [{"text": text} for text in ("is a bc", "is a bd", "is c bc", "a b")])
    assert measure(model, tokenizer, path, 4)["acc"] == 0.5


def test_a_random_model_is_at_chance(tmp_path):
    """On 400 items like HellaSwag's."""
    model, tokenizer = make_model(block_size=64)
    random = np.random.default_rng(0)

    def words(count):
        return " ".join(random.choice(WORDS, count))

    items = [
        {"activity_label": "Sailing", "ctx_a": words(3), "ctx_b": words(2), "endings": [words(3) for _ in range(4)]}
        | {"ctx": "", "label": str(random.integers(4))}
        for _ in range(400)
    ]
    result = measure(model, tokenizer, write(tmp_path / "swag.jsonl", items), 64)
    for name in ("acc", "acc_norm"):
        assert abs(result[name] - 0.25) < 3 * result[f"{name}_stderr"] < 0.1


def test_hellaswag_is_prepared_as_in_lm_eval(tmp_path):
    record = {
        "ind": 4,
        "activity_label": "Home",
        "ctx_a": "How to sail [title] Look  up. [step] Go.  [x] On.",
        "ctx_b": "the Man",
    }
    record |= {"endings": [" sails [substeps] away ", "[header] sinks [title] End"], "label": "1"}
    kind, [item] = read_task(write(tmp_path / "swag.jsonl", [record]))
    assert kind == "choice" and item.gold == 1
    assert item.context == "Home: How to sail. Look up. Go.  On. The man"  # of three spaces two remain, as there
    assert item.choices == ["sails away", " sinks. End"]


def test_tasks_from_the_hub(imported, folder, monkeypatch, call):
    """HellaSwag is a Parquet file, LAMBADA JSON lines that the hub keeps in git; each file is downloaded once."""
    items = [{"activity_label": "a", "ctx_a": "b", "ctx_b": "", "endings": ["c", "d"], "label": "0"}] * 3
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(items), file)
    passages = "".join(json.dumps(passage) + "\n" for passage in PASSAGES).encode()
    choices = "".join(json.dumps(choice) + "\n" for choice in CHOICES).encode()
    repositories = {
        "Rowan/hellaswag": {"data/validation-00000-of-00001.parquet": file.getvalue(), "data/test.parquet": b"x"},
        "EleutherAI/lambada_openai": {"data/lambada_test.jsonl": passages, "data/lambada_test_de.jsonl": b"x"},
        "sea/river-1": {"a/b/test.jsonl": choices},
    }
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with running(monkeypatch, folder, repositories) as server:
        server.mode = "error"
        code = call("--tasks", "lambada")[0]
        assert code.startswith("error: cannot list data of EleutherAI/lambada_openai") and "\n" not in code
        server.mode = "good"
        names = ["hellaswag", "lambada", "sea/river-1:a/b/test.jsonl"]
        for _ in range(2):
            code, out, err = call("--tasks", *names, "--limit", "2")
            assert code == 0 and [line.split(": acc ")[0] for line in out.splitlines()] == names, err
            assert out.count("(2 items)") == 3
        assert len(server.downloads) == 3
        assert "sea/river-1 has no file a/none.jsonl" in call("--tasks", "sea/river-1:a/none.jsonl")[0]


def test_arc_is_prepared_as_in_lm_eval(tmp_path):
    choices = {"text": ["the sun", "the moon"], "label": ["1", "2"]}
    record = {"id": "x", "question": "What moves the sea?", "choices": choices, "answerKey": "2"}
    kind, [item] = read_task(write(tmp_path / "arc.jsonl", [record]))
    assert kind == "choice" and (item.context, item.gold) == ("Question: What moves the sea?\nAnswer:", 1)
    assert item.choices == ["the sun", "the moon"]
    for change in ({"answerKey": "3"}, {"choices": ["the sun", "the moon"]}):
        with pytest.raises(ValueError, match="line 1 is wrong"):
            read_task(write(tmp_path / "arc.jsonl", [record | change]))


def test_damaged_items(tmp_path):
    """Each error names the file and the line."""
    good = dict(context="a", choices=["b", "c"], label=1)
    for line, words in {
        "{": ["JSON"],
        "[1]": ["no JSON object"],
        json.dumps(good | dict(label=2)): ["label 2", "from 0 to 1"],
        json.dumps(good | dict(label=-1)): ["label -1"],
        json.dumps(good | dict(label="")): ["wrong"],
        json.dumps(good | dict(label=0.5)): ["wrong", "0.5"],
        json.dumps(good | dict(choices="bc")): ["wrong", "list"],
        json.dumps(good | dict(choices=["b", ""])): ["wrong", "empty"],
        json.dumps(good | dict(context=None)): ["wrong", "text"],
        json.dumps(dict(context="a", label=1)): ["'choices'"],
        json.dumps(dict(choices=["b", "c"], gold=1)): ["'query'"],
    }.items():
        path = tmp_path / "items.jsonl"
        path.write_text(f"{json.dumps(good)}\n\n{line}\n")
        with pytest.raises(ValueError) as caught:
            read_task(path)
        assert all(word in str(caught.value) for word in [f"{path}, line 3", *words]), caught.value
        assert len(read_task(path, limit=1)[1]) == 1
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"rows.parquet is damaged"):
        read_task(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], ["imported/checkpoint.pt names no corpus", "--text", "--tasks"]),
        (["--split", "test"], ["split='test'", "val or train"]),
        (["--split", "val", "--text", "corpus.txt"], ["--text and --split"]),
        (["--text", "none.txt"], ["none.txt does not exist"]),
        (["--text", "short.txt"], ["short.txt", "less than 2 tokens"]),
        (["--text", "latin.txt"], ["latin.txt is not UTF-8"]),
        (["--text", "corpus.txt", "--stride", "0"], ["stride=0", f"block_size, {BLOCK}"]),
        (["--text", "corpus.txt", "--stride", "17"], ["stride=17"]),
        (["--text", "corpus.txt", "--batch_size", "0"], ["batch_size=0"]),
        (["--tasks", "none.jsonl"], ["none.jsonl does not exist", "hellaswag"]),
        (["--tasks", "folder.jsonl"], ["folder.jsonl is a folder"]),
        (["--tasks", "choices.jsonl", "other.jsonl"], ["other.jsonl, line 1"]),  # nothing is scored
        (["--text", "folder.jsonl"], ["folder.jsonl is a folder"]),
        (["--tasks", "helaswag"], ["'helaswag'", "hellaswag"]),
        (["--tasks", "empty.jsonl"], ["empty.jsonl has no items"]),
        (["--tasks", "other.jsonl"], ["other.jsonl, line 1", "question", "choices"]),
        (["--tasks", "other.jsonl", "--limit", "-1"], ["limit=-1"]),
    ],
)
def test_mistakes(imported, folder, call, flags, words):
    (folder / "folder.jsonl").mkdir()
    write(folder / "choices.jsonl", CHOICES)
    (folder / "short.txt").write_text("a")
    (folder / "latin.txt").write_bytes(b"na\xefve")
    (folder / "empty.jsonl").write_text("\n")
    write(folder / "other.jsonl", [{"question": "a"}])
    code, out, _ = call(*flags)
    assert str(code).startswith("error: ") and "\n" not in code and out == ""
    assert all(word in code for word in words), code


def test_a_character_that_the_tokenizer_lacks_and_another_corpus(folder, run, call):
    (folder / "other.txt").write_text("the zoo and the sea")
    write(folder / "passages.jsonl", [{"text": "the sea"}, {"text": "the zoo"}, {"text": "sea"}])
    assert run(tokenizer="char", steps=2, eval_every=2)[0] == 0
    code = call("--text", "other.txt")[0]
    assert code.startswith("error: other.txt: ") and "'z'" in code and "\n" not in code
    assert "passages.jsonl, line 2: " in call("--tasks", "passages.jsonl")[0]
    write(folder / "passages.jsonl", [{"text": "sea"}])
    assert "passages.jsonl, line 1 has no context" in call("--tasks", "passages.jsonl")[0]
    (folder / "corpus.txt").write_text("the sea has taken another text. " * 200)
    assert call()[0] == 0  # the prepared tokens of the run are still there
    open_corpus("text", "char", "corpus.txt")  # replaces them
    code = call()[0]
    assert code.startswith("error: the tokens in ") and "--text" in code and "\n" not in code
