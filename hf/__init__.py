"""Folders of Hugging Face, read and written, and GGUF files."""
