"""The Triton kernels for every GPU: forward, dq, dk/dv and dbias. launch.py starts them."""
