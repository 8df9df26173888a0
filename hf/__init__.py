"""Weights in, and out as folders of Hugging Face."""
