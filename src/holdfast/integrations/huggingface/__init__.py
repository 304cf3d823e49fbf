"""Models as Hugging Face publishes them: export, and what a tensor is made of.

Loading them needs nothing of this room: `loading.published` does it. `holdfast.huggingface` is what users
import.
"""
