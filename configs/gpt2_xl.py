# GPT-2 1.5B on 30 billion tokens of FineWeb-Edu. Prepare them first:
#     python -m data.prepare fineweb-edu --tokenizer gpt2 --sample 100BT --tokens 30B
#     torchrun --nproc_per_node=8 train.py configs/gpt2_xl.py --parallel fsdp
# Weights, gradients and moments take 25 GB on one GPU or with DDP, and 3.1 GB on each of 8 GPUs with FSDP
# (docs/distributed.md has the rest of the memory).
data = "fineweb-edu"
tokenizer = "gpt2"

n_layer = 48
n_head = 25
n_embd = 1600
block_size = 1024
vocab_size = 50304  # 50257 rounded up to a multiple of 128: matmuls of even tiles are faster
bias = False

batch_size = 1024  # x 1024 = 1 million tokens
micro_batch = 8
steps = 28_610  # 30 billion tokens, about 20 for each parameter (Hoffmann et al. 2022)
learning_rate = 2e-4  # of GPT-3 at this size (Brown et al. 2020, table 2.1)
min_learning_rate = 2e-5
warmup_steps = 700
beta2 = 0.95
weight_decay = 0.1
checkpoint_activations = "selective"
eval_every = 250
eval_batches = 3  # of 1024 sequences
save_every = 1000  # a checkpoint has 19 GB

# Without a GPU: the same recipe at a size that ends.
cpu = dict(
    n_layer=4, n_head=4, n_embd=128, block_size=128, batch_size=8, micro_batch=8, steps=300, warmup_steps=30,
    eval_every=100, eval_batches=20, save_every=0,
)  # fmt: skip
