# GPT-2, a run of yours or a Hugging Face folder goes on with conversations. It needs --input FILE.jsonl, and a GPU.
#     python train.py configs/chat.py --init_from gpt2 --input FILE.jsonl
#     python sample.py chat --chat
init_from = "gpt2"
data = "chat"  # only the answers count in the loss
mask_documents = True  # attention does not cross from one conversation to the next
batch_size = 8  # windows of up to 1024 tokens, each of a dozen short conversations
epochs = 2
learning_rate = 1e-4  # a sixth of the rate of configs/gpt2.py, so that little is forgotten
min_learning_rate = 1e-5
warmup_steps = 10
dropout = 0.1
eval_every = 50
compile = "blocks"  # compiling the whole model takes longer than it saves in a few hundred steps
cpu = dict(block_size=256, eval_batches=20, compile="off")
