"""Plan which rank writes which boxes, and which bytes a rank reads. Tables in, tables out: no I/O, no torch,
no O(n^2) over chunks."""
