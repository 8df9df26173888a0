"""The kernels for Hopper GPUs (sm_90), in Gluon: the same results, faster. launch.py starts them."""
