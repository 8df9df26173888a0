"""evaluate.py: losses and tasks against loops over tokens, and errors."""

import json
import math
import os
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import PATHS, ROOT, metrics, run_script
from test_documents import write as write_documents
from test_sample import save

from data.corpus import open_corpus
from data.shards import Tokens
from data.tokenizer import make_tokenizer
from errors import UserError
from evaluate import evaluate_tasks, load_tasks, read_file
from generation.score import evaluate_text, score
from model import GPT, GPTConfig

BLOCK = 16
QUESTIONS = [
    {"context": "the sea", "choices": ["keeps", "bends at the mile", "x"], "label": 0},
    {"context": "what the river ", "choices": ["has", "has taken, and what it keeps"], "label": 1},
    {"context": "", "choices": ["ends here", "four"], "label": 1},
    {"context": "a long context " * 5, "choices": ["ends here", "é"], "label": 1},
]
TASK = dict(
    dataset_path="json", dataset_kwargs=dict(data_files=dict(test="passages.jsonl")), test_split="test",
    doc_to_text="first", doc_to_target="rest", generation_kwargs=dict(until=["\n"], max_gen_toks=5),
)  # fmt: skip


def make_model():
    """An untrained model, with weights so large that its choices are clear, and tokens of single bytes."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=257, block_size=BLOCK, n_layer=2, n_head=2, n_embd=32, dropout=0.2)).eval()
    with torch.no_grad():
        model.embed.weight.mul_(8)
    return model, make_tokenizer("bytes+eot")


def likelihood(model, context, text, stride=BLOCK):
    """The log-likelihood of a text (bytes), token by token."""
    ids, start, total = [*context, *text], len(context), 0.0
    for t in range(start, len(ids)):
        end = max(start + stride, BLOCK + 1)  # of the window that scores this token
        while end <= t:
            end += stride
        first = max(0, min(end, len(ids)) - BLOCK - 1)
        with torch.no_grad():
            total += model(torch.tensor([ids[first:t]]))[0, -1].log_softmax(-1)[ids[t]].item()
    return total


def write(path, records):
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def call(folder, monkeypatch, capsys):
    """evaluate.py in this process: call(*flags) -> (exit code, out)."""
    return lambda *flags: run_script(monkeypatch, capsys, str(ROOT / "evaluate.py"), *flags, "--device", "cpu")[:2]


def expect(call, flags, words):
    """These flags are a mistake, and one sentence has these words."""
    code, out = call(*flags.split())
    assert str(code).startswith("error: ") and "\n" not in code and words in code and out == ""


@pytest.fixture
def tasks(folder, monkeypatch):
    """A file of questions, a folder of tasks for lm_eval, and a run."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    save(folder / "runs/tiny/checkpoint.pt", make_tokenizer("bytes+eot"))
    write("questions.jsonl", QUESTIONS)
    questions = TASK | dict(task="questions", output_type="multiple_choice", doc_to_text="context")
    questions |= dict(dataset_kwargs=dict(data_files=dict(test="questions.jsonl")), doc_to_choice="choices")
    Path("questions.yaml").write_text(json.dumps(questions | dict(doc_to_target="label")))
    Path("tasks").mkdir()
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        Path(f"tasks/{kind}.yaml").write_text(json.dumps(TASK | dict(task=kind, output_type=kind)))


@pytest.mark.parametrize("stride", [1, 5, BLOCK])
@pytest.mark.parametrize("length", [2, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_loss_with_stride_is_that_of_a_loop_over_tokens(tmp_path, monkeypatch, stride, length):
    """In the file are a byte order mark and other line ends; the logits are computed in parts."""
    monkeypatch.setattr("generation.score.CHUNK", 3)
    model, tokenizer = make_model()
    text = ("naïve:\n" + "the sea keeps what the river has taken " * 3).encode()[:length]
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"))
    tokens = read_file(tmp_path / "text.txt", tokenizer)
    assert tokens.windows([0], length)[0].tolist() == list(text) and tokens.text_bytes == len(tokens) == length
    result = evaluate_text(model, tokens, stride=stride, batch_size=3)
    assert result["loss"] == pytest.approx(-likelihood(model, text[:1], text[1:], stride) / (length - 1), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2))  # a token is a byte


def test_a_pipe_is_read_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        pool.submit((tmp_path / "pipe").write_text, "the sea")
        assert len(read_file(tmp_path / "pipe", make_tokenizer("bytes"))) == 7


def test_weights_with_nan():
    model, _ = make_model()
    model.embed_position.weight.data[2] = torch.nan
    texts = [(np.array(ids), 1) for ids in ([5, 6, 7], [5, 6, 9, 7])]  # the second has a token at position 2
    score(model, texts[:1], 1)
    with pytest.raises(UserError, match="NaN for text 2"):
        score(model, texts, 1)


def test_shards_are_scored_without_joining_them():
    """The loss is that of one shard, bit for bit, and memory does not grow with the text."""
    model, _ = make_model()
    ids = np.random.default_rng(0).integers(0, 256, 200_000, np.uint16)
    results = []
    for cuts in ([], [7, 5000, 5001, 90_000]):
        tokens = Tokens(tuple(np.split(ids, cuts)), 1, len(ids))
        tracemalloc.start()
        results.append(evaluate_text(model, tokens, stride=None, batch_size=500))
        assert tracemalloc.get_traced_memory()[1] < 4 * ids.nbytes  # 8 with a list of all windows
        tracemalloc.stop()
    assert results[0] == results[1]


@pytest.mark.parametrize("spec, between", [("bytes", b"\n\n"), ("bytes+eot", None)])
@pytest.mark.parametrize("name", ["a.jsonl", "a.NDJSON", "a.json", "a.jsonl.xz", "a.parquet"])
def test_documents_of_a_file_are_separated_as_in_training(tmp_path, spec, between, name):
    """A single one is not, and text_bytes counts the separators that are text."""
    path, ends = tmp_path / name, [256] if between is None else list(between)
    for texts in (["the sea", "", "naïve"], ["alone"]):
        write_documents(path, texts)
        expected = [id for text in texts if text for id in [*text.encode(), *ends * (len(texts) > 1)]]
        tokens = read_file(path, make_tokenizer(spec))
        assert tokens.windows([0], len(tokens))[0].tolist() == expected
        assert tokens.text_bytes == len(expected) - expected.count(256)


def test_loss_of_a_split_is_that_of_training(folder, run, call):
    """There are no tokens after the last whole window, which training would leave out."""
    assert run(steps=4, eval_every=2, eval_batches=0, block_size=11, **PATHS)[0] == 0
    record = metrics(folder)[-1]
    result = json.loads(call("--json")[1])["results"]["val"]
    assert f"{result['loss']:.4f} nats/token" in call()[1] and f"{result['bits_per_byte']:.4f} bits/byte" in call()[1]
    assert result["loss"] == pytest.approx(record["val_loss"])
    assert result["bits_per_byte"] == pytest.approx(record["val_bpb"])
    Path("corpus.txt").write_text("the sea has taken another text. " * 200)
    assert call()[0] == 0  # the prepared tokens of the run are still there
    open_corpus("text", "bytes", "corpus.txt")  # replaces them
    expect(call, "", "has other tokens than")


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_tasks_are_scored_as_by_a_loop_over_tokens(tasks, batch_size):
    model, tokenizer = make_model()
    acc, acc_norm = [], []
    for question in QUESTIONS:
        context, choices, label = question.values()
        start = context.rstrip()  # a space at the end of the context belongs to the choice
        texts = [f"{context} {choice}"[len(start) :].encode() for choice in choices]
        scores = [likelihood(model, start.encode() or [256], text) for text in texts]
        acc.append(np.argmax(scores) == int(label))
        acc_norm.append(np.argmax(np.divide(scores, [len(str(choice)) for choice in choices])) == int(label))
    assert acc != acc_norm and 0 < sum(acc) < len(acc)  # so that the numbers below tell something
    write("passages.jsonl", [{"first": "x", "rest": text} for text in ("the sea", "what the river has")])
    results = evaluate_tasks(model, tokenizer, load_tasks(["questions.yaml", "tasks"]), 0, batch_size)
    found = [results["questions"][name] for name in ("acc", "acc_norm", "items")]
    assert found == [np.mean(acc), np.mean(acc_norm), len(QUESTIONS)]
    nats = -sum(likelihood(model, [256], text) for text in (b"the sea", b"what the river has"))
    assert results["loglikelihood_rolling"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / 25, rel=1e-6)


@pytest.mark.slow
def test_greedy_and_generated_text(tasks):
    """The model expects a space after "a", "b" after a space, "c" after "b", and then the end of the line."""
    model, tokenizer = make_model()
    expected = torch.zeros(257, dtype=torch.int64)
    expected[torch.tensor(list(b"a bc"))] = torch.tensor(list(b" bc\n"))
    model.hidden = lambda tokens, cache=None: torch.nn.functional.one_hot(expected[tokens], 257).float()
    model.logits = lambda hidden: 9 * hidden
    texts = [("is a", " bc"), ("is a", " bd"), ("is c", " bc"), ("a b", "c")]
    write("passages.jsonl", [dict(first=first, rest=rest) for first, rest in texts])
    results = evaluate_tasks(model, tokenizer, load_tasks(["tasks"]), 0, 3)
    assert results["loglikelihood"]["acc"] == results["generate_until"]["exact_match"] == 0.5


@pytest.mark.slow
def test_tasks_on_the_command_line(tasks, call):
    write("passages.jsonl", [dict(first="a", rest="b")] * 3)
    code, out = call("--tasks", "questions.yaml", "tasks/loglikelihood.yaml", "--limit", "2")
    assert code == 0 and [line.split()[1] for line in out.splitlines()] == ["acc", "perplexity"]
    assert out.count(" ± ") == 4 and out.count("(2 items)") == 2
    Path("wrong.yaml").write_text("task: x\n  y: [")
    expect(call, "--tasks wrong.yaml", "wrong.yaml")
    expect(call, "--tasks helaswag", "(perhaps hellaswag)")
    expect(call, "--tasks runs", "there are no tasks in runs")


def test_mistakes(folder, call, monkeypatch):
    for name in {"lm_eval", *(name for name in sys.modules if name.startswith("lm_eval."))}:
        monkeypatch.setitem(sys.modules, name, None)
    save(folder / "runs/tiny/checkpoint.pt", make_tokenizer("char", "a"))
    expect(call, "", "tiny/checkpoint.pt names no corpus of its own; give --text")
    expect(call, "--split test", "--split test must be val or train")
    write("lines.jsonl", [{"text": "a"}, {"body": "a"}])
    expect(call, "--text lines.jsonl", "lines.jsonl, line 2 has no UTF-8 text in 'text'")
    expect(call, "--text lines.jsonl --text_field body --skip_bad", "has less than 2 tokens")
    Path("empty.jsonl").write_text("")
    expect(call, "--text empty.jsonl", "empty.jsonl has less than 2 tokens")
    expect(call, "--text corpus.txt", "corpus.txt: the char tokenizer has no token for")
    expect(call, "--text corpus.txt --stride 17", "stride=17 must be from 1 to block_size, 16")
    expect(call, "--tasks hellaswag --limit -1", "limit=-1")
    expect(call, "--tasks hellaswag none.yaml", "none.yaml does not exist")  # is said before lm_eval is imported
    expect(call, "--tasks", "--tasks needs a value")
    expect(call, "--text none --tasks hellaswag", "none")
    expect(call, "--tasks hellaswag", "lm_eval; install it: pip install -e '.[eval]'")
