"""The opcodes that `PickleReader` reads, and the method of it that reads each."""

# Absent, and so refused, because torch does not write them: the text forms of protocol 0 (except for names),
# extensions, out-of-band buffers, and lengths of eight bytes.
_OPCODES = {
    b".": "_stop",
    b"\x80": "_protocol", b"\x95": "_frame",
    b"\x94": "_memoize", b"q": "_binput", b"r": "_long_binput", b"h": "_binget", b"j": "_long_binget",
    b"N": "_constant", b"\x88": "_constant", b"\x89": "_constant",
    b"K": "_binint1", b"M": "_number", b"J": "_number", b"\x8a": "_long1", b"G": "_number",
    b"\x8c": "_short_text", b"X": "_long_text", b"U": "_short_text",
    b"C": "_short_bytes", b"B": "_long_bytes", b"(": "_mark",
    b")": "_empty_tuple", b"t": "_tuple", b"\x85": "_tuple1", b"\x86": "_tuple2", b"\x87": "_tuple3",
    b"]": "_empty_list", b"a": "_append", b"e": "_appends",
    b"\x8f": "_empty_set", b"\x90": "_add_items", b"\x91": "_frozenset",
    b"}": "_empty_dict", b"s": "_setitem", b"u": "_setitems",
    b"c": "_global", b"\x93": "_stack_global",
    b"R": "_call", b"\x81": "_new", b"b": "_build", b"Q": "_persistent",
}  # fmt: skip
METHODS = [_OPCODES.get(bytes([code]), "_unknown") for code in range(256)]
"""For each byte, the name of the method."""
