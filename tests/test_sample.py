"""Sampling: the cache changes nothing, filters do what they say, text streams whole, mistakes are named."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoint import save_checkpoint
from data import make_tokenizer, to_state
from model import GPT, Cache, GPTConfig
from sample import choose, generate, next_logits, stream_text

SCRIPT = str(Path(__file__).parents[1] / "sample.py")
FLAGS = ("--device", "cpu", "--max_tokens", "20")
SMALL = dict(vocab_size=256, block_size=16, n_layer=2, n_head=2, n_embd=32)
FACES = {
    "gpt2": {},
    "modern": dict(position="rope", norm="rmsnorm", mlp="relu2", n_head=4, n_kv_head=1, qk_norm=True),
}


@pytest.fixture(params=FACES.values(), ids=FACES)
def model(request):
    torch.manual_seed(0)
    return GPT(GPTConfig(**SMALL | request.param)).eval()


@torch.no_grad()
def test_cached_and_uncached_logits_agree_beyond_the_context(model):
    tokens = torch.randint(256, (2, 3 * 16))
    cache = Cache(model.config, batch=2)
    for length in range(5, tokens.shape[1] + 1):
        cached = next_logits(model, tokens[:, :length], cache)
        uncached = model(tokens[:, max(0, length - 16) : length])[:, -1]
        torch.testing.assert_close(cached, uncached)


@torch.no_grad()
def test_generation_is_greedy_decoding_at_temperature_0(model):
    tokens = torch.randint(256, (1, 3))
    expected = tokens
    for _ in range(25):
        expected = torch.cat((expected, model(expected[:, -16:])[:, -1].argmax(-1, keepdim=True)), dim=1)
    made = list(generate(model, tokens, 25, 256, temperature=0))
    assert torch.equal(torch.cat((tokens, *made), dim=1), expected)


def test_a_seed_repeats_itself_and_padded_ids_never_come(model):
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return [int(t) for t in generate(model, torch.zeros(1, 1, dtype=torch.int64), 60, 40, generator=generator)]

    assert draw(1) == draw(1) != draw(2)
    assert max(draw(3)) < 40


def test_filters():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))

    def support(**filters):
        filters = dict(temperature=1.0, top_k=0, top_p=1.0) | filters
        generator = torch.Generator().manual_seed(0)
        return {int(choose(logits, generator=generator, **filters)) for _ in range(300)}

    assert support() == {0, 1, 2, 3}
    assert support(top_k=2) == {0, 1}
    assert support(top_p=0.7) == {0, 1}
    assert support(top_p=0.01) == {0}
    assert support(temperature=0) == {0}


@pytest.mark.parametrize("spec", ["bytes", "char"])
def test_streamed_text_is_whole(spec):
    text = "naïve 🌊 waves"
    tokenizer = make_tokenizer(spec, text)
    pieces = list(stream_text(tokenizer.encode_ordinary(text), tokenizer, ""))
    assert "".join(pieces) == text and len(pieces) >= len(text)


def test_stop_text_never_shows():
    tokenizer = make_tokenizer("bytes", "")
    stream = tokenizer.encode_ordinary("to be or END not")
    assert "".join(stream_text(stream, tokenizer, "END")) == "to be or "
    assert "".join(stream_text(stream, tokenizer, "ENDS")) == "to be or END not"


@pytest.fixture
def run(tmp_path):
    """A run folder with the checkpoint of an untrained model over the characters a..f and newline."""
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer("char", "abcdef\n")
    config = dict(SMALL, vocab_size=8)
    model = GPT(GPTConfig(**config))
    save_checkpoint(
        folder / "checkpoint.pt", model=model.state_dict(), model_config=config, tokenizer=to_state(tokenizer)
    )
    return folder


def sample(run, *flags):
    command = [sys.executable, SCRIPT, *FLAGS, *flags]
    return subprocess.run(command, cwd=run.parent.parent, capture_output=True, text=True, timeout=120)


@pytest.fixture
def call(run, monkeypatch, capsys):
    """sample() in this process: to start one takes seconds."""
    monkeypatch.chdir(run.parent.parent)

    def call(*flags):
        monkeypatch.setattr(sys, "argv", [SCRIPT, *FLAGS, *flags])
        capsys.readouterr()
        try:
            runpy.run_path(SCRIPT, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code
        return subprocess.CompletedProcess(sys.argv, code, *capsys.readouterr())

    return call


def test_command_takes_the_newest_run(run):
    result = sample(run, "--prompt", "abc", "--num_samples", "2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("abc") >= 2 and set(result.stdout) <= set("abcdef\n-")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--prompt", "xyz"], "no token for 'x', 'y', 'z'"),
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "FILE:none.txt"], "none.txt"),
        (["--run", "runs/none"], "does not exist"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--temprature", "1"], "did you mean --temperature?"),
    ],
)
def test_mistakes(call, flags, message):
    result = call(*flags)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_damaged_and_foreign_checkpoints(run, call):
    path = run / "checkpoint.pt"
    whole = path.read_bytes()
    for contents, message in ((whole[: len(whole) // 2], "damaged"), (b"nonsense", "damaged"), (b"", "damaged")):
        path.write_bytes(contents)
        result = call()
        assert result.returncode == 1 and message in result.stderr and "Traceback" not in result.stderr
    torch.save({"format": 0}, path)
    assert "not of this project's format" in call().stderr
    torch.save({"format": 1}, path)
    assert "lacks model" in call().stderr
    state = GPT(GPTConfig(**SMALL)).state_dict()
    save_checkpoint(path, model=state, model_config=dict(SMALL, n_layer=1), tokenizer={})
    assert "holds another model" in call().stderr
