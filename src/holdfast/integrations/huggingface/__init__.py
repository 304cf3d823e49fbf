"""Models as Hugging Face publishes them: import, export, and which tensors map to which.

`loading.published` loads them, and uses nothing from here. Users import `holdfast.huggingface`.
"""
