"""Models as Hugging Face publishes them: import, export, fetch, and which tensors map to which.

`views.published` loads them, and uses nothing from here. Users import `holdfast.huggingface`.
"""
