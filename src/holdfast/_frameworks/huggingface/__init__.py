"""Functions of frameworks that load and save published weights, replaced."""
