# A small modern network on tiny Shakespeare: begin here. It needs nothing, and two minutes on two CPU cores.
data = "shakespeare"
tokenizer = "bpe:384"  # more text per context than single characters

norm = "rmsnorm"
position = "rope"
mlp = "relu2"
qk_norm = True
logit_softcap = 15.0
n_layer = 6
n_head = 6
n_embd = 384
block_size = 1024  # shorter contexts end at a higher loss
dropout = 0.25  # a megabyte of text overfits within a few epochs

batch_size = 16
steps = 850  # 1,500 steps end at a lower loss
optimizer = "muon"  # reaches a lower loss than AdamW in the same number of steps
muon_scale = 4.0
learning_rate = 1e-3
min_learning_rate = 1e-4
warmup_steps = 100
beta2 = 0.99
weight_decay = 6.0  # strong, for the same reason as the dropout
ema = 0.99
eval_every = 100
compile = "off"  # compiling takes longer than it saves in 850 steps; use "blocks" for longer runs
eval_batches = 30  # all of tiny Shakespeare's validation text, a part of a long one

# On two cores: about two minutes. Contexts are short there, so tokens are longer.
cpu = dict(
    tokenizer="bpe:512", n_layer=4, n_head=4, n_kv_head=2, n_embd=128, block_size=128, window=32, dropout=0.15,
    steps=520, learning_rate=3e-3, muon_scale=2.0, weight_decay=1.0,
)  # fmt: skip
