# Our recipe, for any size: --depth is the number of layers, 2 on a CPU. It needs the books of docs/data.md or --input.
# dial() derives the other options, unless flags give them.
#     python train.py configs/modern.py --tokens 36_000_000        GPT-2's size, on books: docs/recipes.md
#     python train.py configs/modern.py --depth 4 --data text --input FOLDER --tokenizer bpe:8192
# docs/recipes.md says what each part of the network and of the optimizer gives, and how far the formulas were tried.
import math

data = "text"
input = "books/train"
tokenizer = "gpt2"
depth = 12
cpu = dict(depth=2, tokenizer="bpe:2048", block_size=256, eval_batches=10)

block_size = 1024
norm = "rmsnorm"
norm_weight = False
position = "rope"
mlp = "relu2"
qk_norm = True
logit_softcap = 15.0
embed_skip = True
value_residual = True
key_offset = True

optimizer = "muon"
muon_scale = 0.5
cooldown = 0.5
beta2 = 0.99


def dial(depth, tokens, block_size, n_embd, batch_size, learning_rate, vocab_size, corpus_tokens):
    """The options that follow from depth and from those that are given; None are not.

    At depth 12 with 48M tokens they are those of the recipe found there, from which warm-up and lowest rate come too.
    Width and ten tokens a weight as nanochat's --depth; batch from Bergsma et al. 2025, Power lines; rate by width from
    sweeps at depths 2 to 6 (benchmarks/LOG.md), and by the root of the batch; rate x weight decay x steps is constant
    (Wang and Aitchison 2024, How to set AdamW's weight decay), times the epochs up to four; dropout after 3 is a guess.
    The head has a table of its own from two tokens a weight on, a guess: at depth 12 one table for head and embedding
    was better with 1.1 tokens a weight, at depth 2 two tables were with 1 to 25 (benchmarks/LOG.md).
    """
    width = n_embd or -(-64 * depth // 128) * 128
    vocab_size = -(-vocab_size // 128) * 128  # matmuls of even tiles are faster
    weights = 12 * depth * width**2 + vocab_size * width  # of the blocks and the head
    tokens = tokens or 10 * weights
    batch = 2 ** round(math.log2(32_768 * (tokens / 48e6) ** 0.383))  # tokens of a step
    batch_size = batch_size or max(1, batch // block_size)
    steps = max(1, round(tokens / batch_size / block_size))
    rate = learning_rate or 2e-3 * math.sqrt(batch_size * block_size / 32_768) * 768 / width
    epochs = tokens / corpus_tokens
    return dict(
        n_layer=depth,
        n_head=width // (128 if width >= 512 else 64),  # attention is faster with a head dim of 128
        n_embd=width,
        vocab_size=vocab_size,
        tie_head=tokens < 2 * vocab_size * width,
        batch_size=batch_size,
        steps=steps,
        warmup_steps=round(steps / 29.3),
        learning_rate=rate,
        min_learning_rate=rate / 20,
        weight_decay=0.1 * (2e-3 * 1465) / (rate * steps) * min(max(epochs, 1.0), 4.0),
        dropout=0.1 if epochs > 3 and corpus_tokens < weights else 0.0,
        eval_every=-(-steps // 8),
    )
