# The control of the recipes: GPT-2 124M with AdamW, tuned. It needs a GPU, and the books of docs/data.md.
#     python benchmarks/recipes.py split classic-books-markdown books --megabytes 220     docs/data.md: how to get them
#     python train.py configs/gpt2_books.py
data = "text"
input = "books/train"
tokenizer = "gpt2"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304  # 50257 rounded up to a multiple of 128: matmuls of even tiles are faster

batch_size = 16  # x 1024 = 16,384 tokens
steps = 9156  # 150 million tokens, about three epochs
learning_rate = 1.1e-3
min_learning_rate = 1.1e-4  # a tenth, by a cosine
warmup_steps = 1600  # 26 million tokens; 400 and 800 steps are worse, 3200 about as good
beta2 = 0.99
weight_decay = 1.0  # better than nanoGPT's 0.1 and than 2.0
eval_every = 1144
eval_batches = 100  # 1.6 million tokens
