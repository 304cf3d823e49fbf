"""Replacements for frameworks' functions that load and save published weights."""
