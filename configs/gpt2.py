# GPT-2 124M with nanoGPT's hyperparameters for a shorter run. It needs a GPU, and FineWeb-Edu (docs/guide.md).
#     python -m data.prepare fineweb-edu --tokenizer gpt2      10 billion tokens
# Larger sizes are flags. Weights, gradients and moments take 5.7 and 24.9 GB on a GPU; --parallel fsdp spreads them.
#     350M   --n_layer 24 --n_head 16 --n_embd 1024 --micro_batch 16 --learning_rate 3e-4 --min_learning_rate 3e-5
#     1.5B   --n_layer 48 --n_head 25 --n_embd 1600 --micro_batch 8 --learning_rate 2e-4 --min_learning_rate 2e-5
#            --checkpoint_activations selective
# These rates are GPT-3's (Brown et al. 2020, table 2.1). Nobody has trained these sizes here.
name = "gpt2_fineweb"
data = "fineweb-edu"
tokenizer = "gpt2"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304  # 50257 rounded up to a multiple of 128: matmuls of even tiles are faster

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
