# GPT-2 350M on 10 billion tokens of FineWeb-Edu. Prepare them first:
#     python -m data.prepare fineweb-edu --tokenizer gpt2
#     torchrun --nproc_per_node=8 train.py configs/gpt2_medium.py
# Weights, gradients and moments take 5.7 GB on each GPU (docs/distributed.md has the rest of the memory).
data = "fineweb-edu"
tokenizer = "gpt2"

n_layer = 24
n_head = 16
n_embd = 1024
block_size = 1024
vocab_size = 50304  # 50257 rounded up to a multiple of 128: matmuls of even tiles are faster
bias = False

batch_size = 512  # x 1024 = 524,288 tokens
micro_batch = 16
steps = 19_073  # 10 billion tokens
learning_rate = 3e-4  # of GPT-3 at this size (Brown et al. 2020, table 2.1)
min_learning_rate = 3e-5
warmup_steps = 700
beta2 = 0.95
weight_decay = 0.1
eval_every = 250
eval_batches = 5  # of 512 sequences
save_every = 1000  # a checkpoint has 4.3 GB

# Without a GPU: the same recipe at a size that ends.
cpu = dict(
    n_layer=4, n_head=4, n_embd=128, block_size=128, batch_size=8, micro_batch=8, steps=300, warmup_steps=30,
    eval_every=100, eval_batches=20, save_every=0,
)  # fmt: skip
