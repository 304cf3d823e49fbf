"""The reports that Holdfast was built from, replayed with real processes: the stock way, and with
`holdfast.install()` alone.

`python -m drill` runs every scenario (`scenarios`) twice, checks what it expects of both sides and writes a table
(`results`, `page`). Nothing is scripted: both sides are the same program on the same ranks, with one line more or
less. Frameworks are the frameworks' own code (tests/support/stand_ins.py lists what is empty of what they
import); collectives go over gloo, and stock timeouts are shortened so that its hangs end.
"""
