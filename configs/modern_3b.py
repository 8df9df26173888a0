# A modern network of 3.1B parameters on 60 billion tokens of FineWeb-Edu. Prepare them first:
#     python -m data.prepare fineweb-edu --tokenizer gpt2 --sample 100BT --tokens 60B
#     torchrun --nproc_per_node=8 train.py configs/modern_3b.py --parallel fsdp
# Weights, gradients and moments take 38 GB on one GPU or with DDP, and 4.8 GB on each of 8 GPUs with FSDP
# (docs/distributed.md has the rest of the memory). Nobody has trained it to the end.
data = "fineweb-edu"
tokenizer = "gpt2"

norm = "rmsnorm"
position = "rope"
mlp = "swiglu"
qk_norm = True
tie_head = False
n_layer = 28
n_head = 24
n_kv_head = 6  # grouped queries: a quarter of the keys and values
n_embd = 3072  # head dim 128
block_size = 2048
vocab_size = 50304  # 50257 rounded up to a multiple of 128: matmuls of even tiles are faster

batch_size = 1024  # x 2048 = 2 million tokens
micro_batch = 4
steps = 28_610  # 60 billion tokens, about 20 for each parameter (Hoffmann et al. 2022)
optimizer = "muon"  # one moment for the matrices of the blocks
learning_rate = 3e-4
min_learning_rate = 3e-5
warmup_steps = 1000
beta2 = 0.95
weight_decay = 0.1
checkpoint_activations = "selective"
eval_every = 250
eval_batches = 2  # of 1024 sequences
save_every = 1000  # a checkpoint has 26 GB

# Without a GPU: the same recipe at a size that ends.
cpu = dict(
    n_layer=4, n_head=4, n_kv_head=1, n_embd=128, block_size=128, batch_size=8, micro_batch=8, steps=300,
    warmup_steps=30, learning_rate=1e-3, eval_every=100, eval_batches=20, save_every=0,
)  # fmt: skip
