"""Where files are: a folder, or anything that passes `holdfast.testing.StoreContract`; and a run folder's
steps. No torch."""
