# The showcase: a modern network on subword tokens.
data = "shakespeare"
tokenizer = "bpe:512"  # twice the text per context of single characters; a larger vocabulary overfits sooner

norm = "rmsnorm"
position = "rope"
mlp = "relu2"
qk_norm = True
n_kv_head = 2  # grouped queries: less memory, fewer parameters to overfit with
logit_softcap = 15.0
n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
dropout = 0.3  # a megabyte of text overfits within a few epochs

batch_size = 64
steps = 750  # 25 epochs; more of them overfit
optimizer = "muon"  # reaches a lower loss than AdamW in the same number of steps
muon_scale = 2.0
learning_rate = 1e-3
min_learning_rate = 1e-4
warmup_steps = 100
beta2 = 0.99
weight_decay = 1.0  # strong, for the same reason as the dropout
eval_every = 100
compile = "off"  # compiling takes longer than it saves in 750 steps; use "blocks" for longer runs
eval_batches = 0  # all of the validation text

# On two cores: about two minutes. The average is for data/play.txt, which this network overfits from step 350 on.
cpu = dict(
    n_layer=4, n_head=4, n_embd=128, block_size=128, window=32, dropout=0.1, batch_size=16, steps=600, ema=0.98,
    learning_rate=3e-3,
)  # fmt: skip
