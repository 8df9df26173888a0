# nanoGPT's train_shakespeare_char, number for number; its best validation loss is 1.47. It needs nothing.
data = "shakespeare"
tokenizer = "char"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
dropout = 0.2  # a megabyte of text overfits within a few epochs

batch_size = 64
steps = 5000
learning_rate = 1e-3  # a small network tolerates a high rate
min_learning_rate = 1e-4
warmup_steps = 100
beta2 = 0.99  # few tokens per step: average the squares over more of them
weight_decay = 0.1
eval_every = 250
compile = "blocks"  # compiling the whole model takes longer than it saves in a run of a minute
eval_batches = 10  # all of tiny Shakespeare's validation text: only 435 windows

# nanoGPT's advice for a laptop
cpu = dict(
    n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, dropout=0.0, steps=2000, eval_batches=150,
    compile="off",
)  # fmt: skip
