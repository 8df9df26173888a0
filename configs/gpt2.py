# GPT-2 124M on 10 billion tokens of FineWeb-Edu, with nanoGPT's hyperparameters for a shorter run. Prepare them first:
#     python -m data.prepare fineweb-edu --tokenizer gpt2
# To try it on any text: python train.py configs/gpt2.py --data text --input FOLDER --steps 2000 --batch_size 32
data = "fineweb-edu"
tokenizer = "gpt2"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304  # 50257 rounded up to a multiple of 128: matmuls of even tiles are faster
bias = False

batch_size = 512  # x 1024 = 524,288 tokens
micro_batch = 32  # on a small GPU: --micro_batch auto
steps = 19_073  # 10 billion tokens
learning_rate = 6e-4
min_learning_rate = 6e-5
warmup_steps = 700
beta2 = 0.95
weight_decay = 0.1
eval_every = 250
eval_batches = 5  # of 512 sequences: about the 2.5M tokens that nanoGPT takes

# Without a GPU: the same recipe at a size that ends.
cpu = dict(
    n_layer=4, n_head=4, n_embd=128, block_size=128, batch_size=8, micro_batch=8, steps=300, warmup_steps=30,
    eval_every=100, eval_batches=20,
)  # fmt: skip
