# GPT-2 124M with nanoGPT's hyperparameters. Give your own corpus with --data text --input FOLDER; the default text is
# only large enough to try it out.
data = "shakespeare"
tokenizer = "gpt2"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304  # 50257 rounded up to a multiple of 128: matmuls of even tiles are faster
bias = False

batch_size = 480  # half a million tokens
micro_batch = 12
steps = 600_000
learning_rate = 6e-4
min_learning_rate = 6e-5
warmup_steps = 2000
beta2 = 0.95
weight_decay = 0.1
eval_every = 1000
eval_batches = 5  # of 480 sequences: the 2.5M tokens that nanoGPT takes

# Without a GPU: the same recipe at a size that ends.
cpu = dict(
    n_layer=4, n_head=4, n_embd=128, block_size=128, batch_size=8, micro_batch=8, steps=300, warmup_steps=30,
    eval_every=100, eval_batches=20,
)  # fmt: skip
