"""Documents -> tokens -> batches.

corpus = open_corpus("shakespeare", "bpe:512")  # of data.corpus, which prepares it the first time
inputs, targets = Batches(corpus.train, block_size=256, batch_size=64, seed=1).batch(step)  # of data.loader
"""
