"""Read a pickle without the pickle module, as plain values and inert records. Nothing is imported or called.

A pickle is a program for a machine with a stack and a memo (values that it may refer to again). This is that
machine, for the opcodes that torch and megatron-core write (protocols 2 to 5); `pickletools` of the standard
library documents each of them. A name becomes a `Global`, an instance or a call a `PickledObject`, unless a
subclass of `PickleReader` decides otherwise.

The length of the input limits time and memory, whatever the input contains:

- a memo index refers to an existing entry or to the next one, so that no index allocates memory;
- marks are nested at most MARKS deep, and no value is walked, so depth costs nothing;
- every container needs BYTES_PER_CONTAINER of input; sharing a container costs only the reference;
- a key is text, a small number or a record, which is hashed by its identity: no hash walks a value, and no
  keys can be chosen to collide.

Any other opcode, name or key raises `BadPickle`. Its message continues a sentence after "because".
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from holdfast._core.format.pickle_opcodes import METHODS

MARKS = 1000
"""Limit of nested marks: far more than `.metadata` or a state dict has."""
BYTES_PER_CONTAINER = 4
"""Minimum bytes of input per container. Pickles of torch have more, including the content."""
SOME_CONTAINERS = 1000
"""Number of containers that any input may have, regardless of its length."""
SMALL = 1 << 60
"""Integers below this hash to themselves."""
NAME = 1000
"""Limit of characters in the name of a module or a class."""
_U32 = struct.Struct("<I").unpack_from


class BadPickle(ValueError):
    """A pickle is damaged or not allowed. The message says why."""


class Global:
    """A name that a pickle refers to. `make` returns the value of a call of it; without `make`, a call
    becomes a PickledObject."""

    __slots__ = ("make", "module", "name")

    def __init__(
        self, module: str, name: str, make: Callable[[tuple[object, ...]], object] | None = None
    ) -> None:
        self.module, self.name, self.make = module, name, make

    def __repr__(self) -> str:
        return f"{self.module}.{self.name}"


class PickledObject:
    """An instance or a call: the class or function, its arguments, and the state."""

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: Global, args: tuple[object, ...]) -> None:
        self.kind, self.args = kind, args
        self.state: object = None


def first(args: tuple[object, ...]) -> object:
    """Return the first argument of a call, as its value."""
    return args[0] if args else None


def empty_dict(args: tuple[object, ...]) -> dict[object, object]:
    """Return the value of a call of OrderedDict; torch stores one of hooks with each tensor, empty."""
    if args:
        raise BadPickle("it makes an OrderedDict of other values")
    return {}


class PickleReader:
    """Reads one pickle. Subclasses resolve names, and may check calls, keys and persistent values."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._stack: list[object] = []
        """Values since the last mark."""
        self._below: list[list[object]] = []
        """The stack below each mark."""
        self._memo: list[object] = []
        self._names: dict[tuple[str, str], object] = {}
        self._room = SOME_CONTAINERS + len(data) // BYTES_PER_CONTAINER
        """Containers that the input may still create."""
        self._result: object = None

    # -- for subclasses to override -------------------------------------------------------------

    def resolve(self, module: str, name: str) -> object:
        """Return the object for a name: a Global, or a plain value."""
        raise BadPickle(f"it names {module}.{name}, which is not part of the format")

    def call(self, kind: object, args: object) -> object:
        """Return the value of `kind(*args)`."""
        if type(kind) is not Global or type(args) is not tuple:
            raise BadPickle("it calls what is no name")
        return PickledObject(kind, args) if kind.make is None else kind.make(args)

    def build(self, target: object, state: object) -> None:
        """Set an instance's state; drop the attributes of a dict."""
        if isinstance(target, PickledObject):
            target.state = state
        elif type(target) is not dict:
            raise BadPickle("it gives a state to what has none")

    def put(self, target: object, items: list[object]) -> None:
        """Put items into a dict; `items` alternates keys and values."""
        if not isinstance(target, dict) or len(items) % 2:
            raise BadPickle("it puts items into what is no dict")
        rest = iter(items)
        for key in rest:
            if type(key) is not str:
                self.check_key(target, key)
            target[key] = next(rest)

    def check_key(self, target: object, key: object) -> None:
        """Raise BadPickle for keys that could be chosen to have equal hashes: dict operations would take
        quadratic time. Text is safe, because its hash is salted per process."""
        small = type(key) is int and -SMALL < key < SMALL
        if not small and key is not None and type(key) not in (PickledObject, bool):
            raise BadPickle(f"a key in it is a {type(key).__name__}, or a large number")

    def persistent(self, about: object) -> object:
        """Return a value that is stored outside the pickle."""
        raise BadPickle("it refers to values outside it")

    # -- the machine ------------------------------------------------------------------------------

    def read(self) -> object:
        """Return the value of the pickle. Raises BadPickle."""
        # An operation takes the position of its arguments, and returns that of the next operation. The loop
        # is hot (millions of operations for the metadata of a large model), so methods are bound once per
        # pickle.
        table = [getattr(self, name) for name in METHODS]
        data, position = self._data, 0
        try:
            while True:
                for _ in _OPERATIONS:
                    position = table[data[position]](position + 1)
                self._check_room()  # not per container: exceeding the limit by a few thousand is harmless
        except _Stop:
            self._check_room()
            return self._result
        # Operations do not check that their arguments exist, which keeps the loop fast. Python itself raises
        # one of these past the end of the input, for an empty stack, and outside of the memo.
        except (IndexError, struct.error):
            raise BadPickle(f"it ends too early, or takes what is not there, at byte {position}") from None
        except UnicodeDecodeError:
            raise BadPickle(f"its text at byte {position} is not UTF-8") from None
        finally:  # the traceback of an error keeps this reader alive; it must not keep the values
            self._stack, self._below, self._memo = [], [], []

    def _unknown(self, position: int) -> int:
        raise BadPickle(f"its byte {position - 1} is no operation that torch writes")

    def _stop(self, position: int) -> int:
        self._result = self._stack.pop()
        raise _Stop

    def _check_room(self) -> None:
        if self._room < 0:
            raise BadPickle("it holds more containers than its length can pay for")

    def _protocol(self, position: int) -> int:
        if self._data[position] > 5:
            raise BadPickle(f"its protocol is {self._data[position]}")
        return position + 1

    def _frame(self, position: int) -> int:
        return position + 8  # the length of a frame helps readers of streams only

    # memo

    def _memoize(self, position: int) -> int:
        self._memo.append(self._stack[-1])
        return position

    # Before protocol 4 the pickle contains the index itself. pickle counts from 0, so no writer's index is
    # greater than that of the next entry.
    def _put_at(self, index: int) -> None:
        if index == len(self._memo):
            self._memo.append(self._stack[-1])
        elif index < len(self._memo):
            self._memo[index] = self._stack[-1]
        else:
            raise BadPickle(f"it keeps entry {index} of its memo, which has {len(self._memo)}")

    def _binput(self, position: int) -> int:
        self._put_at(self._data[position])
        return position + 1

    def _long_binput(self, position: int) -> int:
        self._put_at(_U32(self._data, position)[0])
        return position + 4

    def _binget(self, position: int) -> int:
        self._stack.append(self._memo[self._data[position]])
        return position + 1

    def _long_binget(self, position: int) -> int:
        self._stack.append(self._memo[_U32(self._data, position)[0]])
        return position + 4

    # atoms

    def _constant(self, position: int) -> int:
        self._stack.append(_CONSTANTS[self._data[position - 1]])
        return position

    def _binint1(self, position: int) -> int:
        self._stack.append(self._data[position])
        return position + 1

    def _number(self, position: int) -> int:
        number = _NUMBERS[self._data[position - 1]]
        self._stack.append(number.unpack_from(self._data, position)[0])
        return position + number.size

    def _long1(self, position: int) -> int:
        stop = position + 1 + self._data[position]
        # 255 bytes at most. The opcode for longer numbers is refused, so no number costs much.
        self._stack.append(int.from_bytes(self._data[position + 1 : stop], "little", signed=True))
        return stop

    def _text(self, start: int, stop: int) -> int:
        # "surrogatepass", as pickle writes it: Python text may contain half of a surrogate pair.
        self._stack.append(str(self._data[start:stop], "utf-8", "surrogatepass"))
        return stop  # if past the end, reading the next opcode fails

    def _short_text(self, position: int) -> int:
        return self._text(position + 1, position + 1 + self._data[position])

    def _long_text(self, position: int) -> int:
        return self._text(position + 4, position + 4 + _U32(self._data, position)[0])

    def _short_bytes(self, position: int) -> int:
        stop = position + 1 + self._data[position]
        self._stack.append(self._data[position + 1 : stop])
        return stop

    def _long_bytes(self, position: int) -> int:
        stop: int = position + 4 + _U32(self._data, position)[0]
        self._stack.append(self._data[position + 4 : stop])
        return stop

    # containers

    def _mark(self, position: int) -> int:
        if len(self._below) >= MARKS:
            raise BadPickle(f"it is nested more than {MARKS} deep")
        self._below.append(self._stack)
        self._stack = []
        return position

    def _since_mark(self) -> list[object]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _empty_tuple(self, position: int) -> int:
        # Python has a single empty tuple, so it costs no room.
        self._stack.append(())
        return position

    def _tuple(self, position: int) -> int:
        self._room -= 1
        items = tuple(self._since_mark())
        self._stack.append(items)
        return position

    def _tuple1(self, position: int) -> int:
        self._room -= 1
        self._stack[-1] = (self._stack[-1],)
        return position

    def _tuple2(self, position: int) -> int:
        self._room -= 1
        last = self._stack.pop()
        self._stack[-1] = (self._stack[-1], last)
        return position

    def _tuple3(self, position: int) -> int:
        self._room -= 1
        last, middle = self._stack.pop(), self._stack.pop()
        self._stack[-1] = (self._stack[-1], middle, last)
        return position

    def _empty_list(self, position: int) -> int:
        self._room -= 1
        self._stack.append([])
        return position

    def _append(self, position: int) -> int:
        item = self._stack.pop()
        self._extend([item])
        return position

    def _appends(self, position: int) -> int:
        self._extend(self._since_mark())
        return position

    def _extend(self, items: list[object]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise BadPickle("it appends to what is no list")
        target.extend(items)

    def _empty_dict(self, position: int) -> int:
        self._room -= 1
        self._stack.append({})
        return position

    def _setitem(self, position: int) -> int:
        value, key = self._stack.pop(), self._stack.pop()
        self.put(self._stack[-1], [key, value])
        return position

    def _setitems(self, position: int) -> int:
        items = self._since_mark()
        self.put(self._stack[-1], items)
        return position

    # A set becomes a list or a tuple, so that its members are not hashed.
    _empty_set, _add_items, _frozenset = _empty_list, _appends, _tuple

    # names and instances

    def _resolved(self, module: object, name: object) -> object:
        if type(module) is not str or type(name) is not str or max(len(module), len(name)) > NAME:
            raise BadPickle("it refers to something by what is no name")
        if (module, name) not in self._names:
            self._names[module, name] = self.resolve(module, name)
        return self._names[module, name]

    def _line(self, position: int) -> int:
        """Return the end of a name, which a newline ends in protocol 2."""
        stop = self._data.find(b"\n", position, position + NAME)
        if stop < 0:
            raise BadPickle(f"its name at byte {position} has no end")
        return stop

    def _global(self, position: int) -> int:
        middle = self._line(position)
        stop = self._line(middle + 1)
        module, name = str(self._data[position:middle], "utf-8"), str(self._data[middle + 1 : stop], "utf-8")
        self._stack.append(self._resolved(module, name))
        return stop + 1

    def _stack_global(self, position: int) -> int:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(self._resolved(module, name))
        return position

    def _call(self, position: int) -> int:
        self._room -= 1
        stack = self._stack
        args = stack.pop()
        stack[-1] = self.call(stack[-1], args)
        return position

    _new = _call

    def _build(self, position: int) -> int:
        state = self._stack.pop()
        self.build(self._stack[-1], state)
        return position

    def _persistent(self, position: int) -> int:
        stack = self._stack
        stack[-1] = self.persistent(stack[-1])
        return position


class _Stop(Exception):
    """Ends `PickleReader.read`."""


_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_NUMBERS = {ord(code): struct.Struct(form) for code, form in (("M", "<H"), ("J", "<i"), ("G", ">d"))}
_OPERATIONS = range(4096)
"""Operations between two checks of the room for containers."""
