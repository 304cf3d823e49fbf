"""Where files are kept: a folder, or any class that passes `holdfast.testing.StoreContract`; and the steps of
a run folder. No torch."""
