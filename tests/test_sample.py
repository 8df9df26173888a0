"""Sampling: cached logits, greedy decoding, top_k and top_p, streamed text, and errors that name the mistake."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data import make_tokenizer, to_state
from model import GPT, Cache, GPTConfig
from sample import choose, generate, load, next_logits, stream_text
from training.checkpoint import FORMAT, save_checkpoint

SCRIPT = str(Path(__file__).parents[1] / "sample.py")
FLAGS = ("--device", "cpu", "--max_tokens", "20")
SMALL = dict(vocab_size=256, block_size=16, n_layer=2, n_head=2, n_embd=32)
MODELS = {
    "gpt2": {},
    "modern": dict(position="rope", norm="rmsnorm", mlp="relu2", n_head=4, n_kv_head=1, qk_norm=True),
}


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def model(request):
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


def test_samples_depend_on_the_seed_and_have_no_padding_tokens(model):
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
def test_streamed_text_has_whole_characters(spec):
    text = "naïve 🌊 waves"
    tokenizer = make_tokenizer(spec, text)
    pieces = list(stream_text(tokenizer.encode_ordinary(text), tokenizer, ""))
    assert "".join(pieces) == text and len([piece for piece in pieces if piece]) == len(text)


def test_a_sample_ends_before_the_stop_text():
    tokenizer = make_tokenizer("bytes", "")
    stream = tokenizer.encode_ordinary("to be or END not")
    assert "".join(stream_text(stream, tokenizer, "END")) == "to be or "
    assert "".join(stream_text(stream, tokenizer, "ENDS")) == "to be or END not"


def save(path, tokenizer, **changes):
    """Write the checkpoint of an untrained model; returns its contents."""
    config = SMALL | dict(vocab_size=8)
    contents = dict(format=FORMAT, model=GPT(GPTConfig(**config)).state_dict(), model_config=config, step=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(path, contents | dict(tokenizer=to_state(tokenizer)) | changes)
    return contents


@pytest.fixture
def run(folder):
    """A run folder with one checkpoint, for the characters a to f and newline."""
    save(folder / "runs/tiny/checkpoint.pt", make_tokenizer("char", "abcdef\n"))
    return folder / "runs/tiny"


@pytest.fixture
def call(run, monkeypatch, capsys):
    """sample.py in this process, because starting another takes seconds: call(*flags) -> (exit code, out, err)."""

    def call(*flags):
        monkeypatch.setattr(sys, "argv", [SCRIPT, *FLAGS, *flags])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(SCRIPT, run_name="__main__")
            sys.exit(0)
        return end.value.code, *capsys.readouterr()

    return call


def test_the_command_takes_the_newest_run(run):
    command = [sys.executable, SCRIPT, *FLAGS, "--prompt", "abc", "--num_samples", "2"]
    result = subprocess.run(command, cwd=run.parents[1], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "runs/tiny/checkpoint.pt" in result.stderr, result.stderr
    first, second = result.stdout.split("---------------\n")
    assert first != second and set(first + second) <= set("abcdef\n") and len(second) <= len("abc") + 20 + 1
    assert first.startswith("abc") and second.startswith("abc")


def test_greedy_samples_and_a_prompt_file(call, folder):
    (folder / "prompt.txt").write_text("fade\n")
    samples = [call("--prompt", prompt, "--temperature", "0") for prompt in ("fade\n", "FILE:prompt.txt")]
    assert samples[0][:2] == samples[1][:2] and samples[0][0] == 0
    assert samples[0][1].startswith("fade\n") and len(samples[0][1]) == 5 + 20 + 1


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--prompt", "xyz"], ["'x'"]),
        (["--prompt", ""], ["prompt"]),
        (["--prompt", "FILE:none.txt"], ["none.txt"]),
        (["--run", "runs/none"], ["runs/none"]),
        (["--device", "gpu"], ["device='gpu'"]),
        (["--temperature", "-1"], ["temperature=-1.0"]),
        (["--top_p", "nan"], ["top_p=nan"]),
        (["--temprature", "1"], ["--temprature", "--temperature"]),
    ],
)
def test_mistakes(call, flags, words):
    code, out, err = call(*flags)
    message = str(code)
    if code == 2:  # tyro has printed it
        message = err
    else:  # sys.exit() prints it
        assert code.startswith("error: ") and "\n" not in code
    assert all(word in message for word in words) and out == "", message


def test_load_prefers_best_and_takes_folders_and_files(run):
    tokenizer = make_tokenizer("char", "abcdef\n")
    best = save(run / "best.pt", tokenizer)
    model, loaded_tokenizer, contents = load("")  # the newest run
    assert contents["path"] == Path("runs/tiny/best.pt") and loaded_tokenizer.decode([0, 1]) == tokenizer.decode([0, 1])
    assert all(torch.equal(weight, best["model"][name]) for name, weight in model.state_dict().items())
    for path in (run / "checkpoint.pt", run / "best.pt"):
        assert load(str(path))[2]["path"] == path
    save(run.parent / "other/best.pt", tokenizer)
    assert load(str(run.parent / "other"))[2]["path"] == run.parent / "other/best.pt"


def test_a_damaged_best_gives_way_to_the_newest_checkpoint(run, capsys):
    (run / "best.pt").write_bytes(b"damaged")
    assert load(str(run))[2]["path"] == run / "checkpoint.pt"
    assert "best.pt" in capsys.readouterr().err


def test_damaged_and_foreign_checkpoints(run, call):
    path = run / "checkpoint.pt"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"nonsense", b""):
        path.write_bytes(damaged)
        code, out, _ = call()
        assert code.startswith("error: ") and "checkpoint.pt" in code and out == ""
    for contents in ({"format": 0}, [1]):
        torch.save(contents, path)
        assert "format" in call()[0]
