"""How ranks agree on a save, a load or a task, without a collective.

`core` is the protocol: generators that yield effects and do no I/O, so that a simulation can run them.
`runner` runs them on a roster and a clock. `call` is the value that every public function makes once: ranks,
deadline, roster. Imported by all higher packages; contains no tensor or file code.
"""
