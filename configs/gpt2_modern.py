# A recipe that learns faster than configs/gpt2_books.py, from what others have found with networks of this size. A run
# of 50 million tokens ends at a lower loss than one of 150 million of the tuned control, with one seed each
# (benchmarks/LOG.md); tuning goes on.
#     python train.py configs/gpt2_modern.py      on the books of configs/gpt2_books.py
data = "text"
input = "books/train"
tokenizer = "gpt2"

# The matmuls per token are those of the control; head and tables of values have 154M parameters more.
n_layer = 12
n_head = 6  # head dim 128: attention is faster
n_embd = 768
block_size = 1024
vocab_size = 50304
norm = "rmsnorm"
norm_weight = False
position = "rope"
mlp = "relu2"
qk_norm = True
logit_softcap = 15.0
tie_head = False
zero_init = True
embed_skip = True
value_residual = True
value_embeds = 3

batch_size = 32  # x 1024 = 32,768 tokens
steps = 2289  # 75 million tokens, half of the control's
optimizer = "muon"
cautious_decay = True
learning_rate = 2e-3
muon_scale = 0.5
embed_scale = 16.0  # a row of an embedding has a gradient only where its token occurs
min_learning_rate = 1e-4
warmup_steps = 50
cooldown = 0.5
beta2 = 0.95
weight_decay = 0.1
eval_every = 286
eval_batches = 50  # 1.6 million tokens

# Without a GPU: the same recipe at a size that ends.
cpu = dict(
    n_layer=4, n_head=4, n_embd=128, block_size=128, value_embeds=1, batch_size=8, steps=300, warmup_steps=30,
    eval_every=100, eval_batches=20,
)  # fmt: skip
