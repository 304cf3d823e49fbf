"""Models in Hugging Face's format: import, export, fetch, and descriptions of the mapping of tensors.

`views.published` loads them, and uses nothing from here. Users import `holdfast.huggingface`.
"""
