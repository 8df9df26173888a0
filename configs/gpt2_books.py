# The control of the recipes (benchmarks/recipes.py): nanoGPT's GPT-2 124M and AdamW on 150 million tokens of books.
#     python benchmarks/recipes.py split classic-books-markdown books      docs/data.md says how to get the books
#     python train.py configs/gpt2_books.py
data = "text"
input = "books/train"
tokenizer = "gpt2"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304  # 50257 rounded up to a multiple of 128: matmuls of even tiles are faster
bias = False

batch_size = 32  # x 1024 = 32,768 tokens
steps = 4578  # 150 million tokens, about three epochs
learning_rate = 6e-4
min_learning_rate = 6e-5  # a tenth, by a cosine
warmup_steps = 200
beta2 = 0.95
weight_decay = 0.1
eval_every = 572
eval_batches = 50  # 1.6 million tokens

# Without a GPU: the same recipe at a size that ends.
cpu = dict(
    n_layer=4, n_head=4, n_embd=128, block_size=128, batch_size=8, steps=300, warmup_steps=30, eval_every=100,
    eval_batches=20,
)  # fmt: skip
