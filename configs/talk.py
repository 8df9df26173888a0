# A small model that answers questions about kestrels. It needs nothing, and two minutes on two CPU cores.
#     python sample.py talk --chat
from pathlib import Path

data = "chat"
input = Path(__file__).parents[1] / "examples/kestrels.jsonl"  # for conversations of your own: --input FILE.jsonl
tokenizer = "bpe:1024"  # most words of this file are one token
mask_documents = True  # attention does not cross from one conversation to the next

norm = "rmsnorm"
position = "rope"
mlp = "relu2"
qk_norm = True
logit_softcap = 15.0
tie_head = False
n_layer = 2  # more layers learn the file by heart, and answer other wordings no better
n_head = 4
n_kv_head = 2
n_embd = 128
block_size = 128
dropout = 0.2

batch_size = 8
steps = 800
optimizer = "muon"
muon_scale = 2.0
learning_rate = 3e-3
min_learning_rate = 1e-4
warmup_steps = 50
beta2 = 0.99
weight_decay = 2.0
ema = 0.99
eval_every = 800  # only at the end: earlier weights have a lower loss, but answer fewer questions rightly
compile = "off"  # compiling takes longer than it saves in 800 steps
