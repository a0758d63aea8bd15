"""A model behind OpenAI's API: HTTP in the torch-free parent, continuous batching in the child, a small page to chat."""
