"""A model that other programs run: Hugging Face, GGUF, Ollama, the hub. Written, opened again and compared, or not there."""
