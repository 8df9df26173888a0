# nanoGPT's finetune_shakespeare: 20 steps of GPT-2's largest model. It needs pip install -e '.[hub]' and a large GPU.
#     python train.py configs/finetune_shakespeare.py --init_from gpt2      a smaller one, or a run of yours: runs/NAME
init_from = "gpt2-xl"
data = "shakespeare"
batch_size = 32  # x 1024 tokens
micro_batch = 1
steps = 20
learning_rate = 3e-5  # a twentieth of the rate of pretraining, so that little is forgotten
min_learning_rate = 3e-5  # constant
warmup_steps = 0
eval_every = 5
eval_batches = 2  # all of tiny Shakespeare's validation text
compile = "off"  # compiling takes longer than it saves in 20 steps
cpu = dict(init_from="gpt2", block_size=256, batch_size=8, eval_batches=20)
