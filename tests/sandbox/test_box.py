"""Tests use the objects of a solution that lives in another process as if it lived in theirs."""

import pytest

from t2g.sandbox import SandboxConfig, run_solution

LIMITS = SandboxConfig(timeout_s=30, cpu_s=30)
CASES: dict[str, tuple[str, str]] = {}

CASES["containers change in place"] = (
    """
def rotate(m):
    m[:] = [list(row) for row in zip(*m[::-1])]
def extend(d):
    d['x'].append(4)
    d['y'] = {1}
def same(a):
    a.append(1)
    return a
def queue(q):
    q.popleft()
def knot():
    a = [1]
    a.append(a)
    return a
""",
    """
from collections import deque
from solution import *

def test_list():
    m = [[1, 2], [3, 4]]
    rotate(m)
    assert m == [[3, 1], [4, 2]]

def test_dictionary():
    inner = [1]
    d = {'x': inner}
    extend(d)
    assert inner == [1, 4] and d == {'x': [1, 4], 'y': {1}}

def test_identity():
    a = []
    assert same(a) is a and a == [1]
    k = knot()
    assert k[1] is k

def test_deque():
    q = deque([1, 2, 3], maxlen=3)
    queue(q)
    assert q == deque([2, 3]) and q.maxlen == 3
""",
)

CASES["classes"] = (
    """
from dataclasses import dataclass
class Stack:
    "a stack"
    kind = 'stack'
    def __init__(self, items=()):
        self._items = list(items)
    def push(self, x):
        self._items.append(x)
        return self
    def pop(self):
        if not self._items:
            raise EmptyError('empty', 3)
        return self._items.pop()
    def __len__(self): return len(self._items)
    def __iter__(self): return iter(self._items)
    def __contains__(self, x): return x in self._items
    def __getitem__(self, i): return self._items[i]
    def __eq__(self, o): return isinstance(o, Stack) and self._items == o._items
    def __add__(self, o): return Stack(self._items + o._items)
    def __iadd__(self, o): return self.push(o)
    def __rmul__(self, n): return Stack(n * self._items)
    def __lt__(self, o): return len(self) < len(o)
    def __repr__(self): return f'Stack({self._items})'
    def __enter__(self): return self
    def __exit__(self, *a): self.closed = True
    def __call__(self, *, n): return n
    def __setitem__(self, i, x): self._items[i] = x
    @property
    def top(self): return self._items[-1]
    @classmethod
    def of(cls, *a): return cls(a)
class EmptyError(ValueError):
    def __init__(self, message, code):
        super().__init__(message)
        self.code = code
class Sub(Stack): pass
@dataclass(order=True)
class Point:
    x: int
    y: int = 2
""",
    """
import pytest
from solution import EmptyError, Point, Stack, Sub

class TestStack:
    def setup_method(self):
        self.s = Stack([1, 2])

    def test_containers(self):
        assert len(self.s) == 2 and list(self.s) == [1, 2] and 2 in self.s and 5 not in self.s
        assert self.s[0] == 1 and self.s.top == 2
        self.s[0] = 7
        assert self.s[0] == 7

    def test_methods(self):
        assert self.s.push(3).push(4).pop() == 4
        assert self.s.push(9) is self.s
        assert Stack.of(1) == Stack([1]) and Stack.kind == 'stack' and Stack.__name__ == 'Stack'
        assert Stack.__doc__ == 'a stack' and type(self.s).__name__ == 'Stack'
        assert self.s(n=5) == 5 and callable(self.s.push) and not hasattr(self.s, 'nope')
        self.s.note = 3
        assert self.s.note == 3

    def test_operators(self):
        assert self.s == Stack([1, 2]) and self.s != Stack([1])
        assert self.s + Stack([3]) == Stack([1, 2, 3]) and 2 * Stack([1]) == Stack([1, 1])
        self.s += 3
        assert len(self.s) == 3 and sorted([self.s, Stack()])[0] == Stack()
        assert repr(self.s) == f'{self.s}' == 'Stack([1, 2, 3])'
        assert Stack([1]) and not Stack()
        with pytest.raises(TypeError):
            self.s - 1
        with pytest.raises(TypeError):
            hash(Stack())
        with pytest.raises(AttributeError):
            self.s.nope

    def test_kinds(self):
        assert isinstance(self.s, Stack) and isinstance(Sub(), Stack) and issubclass(Sub, Stack)
        assert not isinstance(3, Stack) and not isinstance(self.s, (list, Sub))

    def test_errors(self):
        with pytest.raises(EmptyError) as info:
            Stack().pop()
        assert info.value.code == 3 and str(info.value) == 'empty'
        with pytest.raises(ValueError, match='^emp'):
            Stack().pop()
        with pytest.raises(IndexError):
            Stack()[0]

    def test_context(self):
        with pytest.raises(KeyError), Stack() as s:
            raise KeyError('x')
        assert s.closed

def test_dataclass():
    assert Point(1) == Point(1, 2) and Point(1) < Point(2) and str(Point(1)) == 'Point(x=1, y=2)'
    assert max([Point(0), Point(1)]).x == 1
""",
)

CASES["values"] = (
    """
import datetime as dt, decimal, enum, json
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
Pair = namedtuple('Pair', 'a b')
class Color(enum.Enum):
    RED = 1
    BLUE = 2
class Level(enum.IntEnum):
    LOW = 1
def many():
    return [Decimal('1.5'), Fraction(1, 3), dt.date(2020, 1, 2), dt.datetime(2020, 1, 2, tzinfo=dt.timezone.utc),
            dt.timedelta(1), 10**400, -2**70, 1 + 2j, b'x', bytearray(b'y'), range(3), slice(1), float('inf'),
            deque([1], 3), OrderedDict(a=1), Counter('aab'), frozenset({1}), (1,), {(1, 2): 'x'}, ..., int, None,
            'é\\ud800', Path('/a')]
def groups():
    d = defaultdict(list)
    d['a'].append(1)
    return d
def squares(n):
    for i in range(n):
        yield i * i
def parse(s): return json.loads(s)
def divide(): return Decimal(1) / 0
def adder(n): return lambda x: x + n
def views(): return {'a': 1}.keys(), {'a': 1}.items(), zip([1], [2])
""",
    """
import datetime as dt, decimal, json, pytest
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
import solution
from solution import *

def test_plain():
    assert many() == [
        Decimal('1.5'), Fraction(1, 3), dt.date(2020, 1, 2), dt.datetime(2020, 1, 2, tzinfo=dt.timezone.utc),
        dt.timedelta(1), 10**400, -2**70, 1 + 2j, b'x', bytearray(b'y'), range(3), slice(1), float('inf'),
        deque([1], 3), OrderedDict(a=1), Counter('aab'), frozenset({1}), (1,), {(1, 2): 'x'}, ..., int, None,
        'é\\ud800', Path('/a')]

def test_named_tuple():
    pair = Pair(1, 2)
    assert pair == (1, 2) and pair.a == 1 and isinstance(pair, tuple)
    a, b = pair
    assert b == 2

def test_enum():
    assert solution.Color(1) is Color.RED and Color.RED != Color.BLUE and Color.RED.name == 'RED'
    assert Level.LOW == 1 and {Color.RED: 3}[Color(1)] == 3

def test_default_dictionary():
    assert groups() == {'a': [1]} and groups()['new'] == []

def test_generators():
    assert list(squares(3)) == [0, 1, 4] and sum(squares(4)) == 14
    g = squares(1)
    assert next(g) == 0
    with pytest.raises(StopIteration):
        next(g)

def test_errors_of_the_library():
    with pytest.raises(json.JSONDecodeError):
        parse('{')
    with pytest.raises(decimal.DivisionByZero):
        divide()

def test_functions_and_views():
    assert adder(3)(4) == 7
    keys, items, pairs = views()
    assert set(keys) == {'a'} and sorted(items) == [('a', 1)] and dict(pairs) == {1: 2}
""",
)

CASES["what tests hand over"] = (
    """
def apply(f, xs): return [f(x) for x in xs]
def reverse(head):
    previous = None
    while head is not None:
        head.next, previous, head = previous, head, head.next
    return previous
def memo(f):
    cache = {}
    def wrapped(*a):
        if a not in cache:
            cache[a] = f(*a)
        return cache[a]
    return wrapped
def total(xs): return sum(xs)
def ordered(xs, key): return sorted(xs, key=key)
def safe(f):
    try:
        return f()
    except ValueError as e:
        return str(e)
def read(f): return f.read()
def is_kind(kind, x): return isinstance(x, kind)
""",
    """
import io, pytest
from solution import *

class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next

def test_functions():
    assert apply(lambda x: x * 2, [1, 2]) == [2, 4] and apply(str, [1]) == ['1']
    assert ordered(['bb', 'a'], key=len) == ['a', 'bb']

def test_own_objects():
    r = reverse(Node(1, Node(2)))
    assert [r.value, r.next.value, r.next.next] == [2, 1, None] and isinstance(r, Node)

def test_decorator():
    calls = []
    @memo
    def f(x):
        calls.append(x)
        return x + 1
    assert f(1) == f(1) == 2 and calls == [1]

def test_iterables():
    assert total(x for x in range(4)) == 6 and total(iter([1, 2])) == 3 and total({1: 2}.keys()) == 1

def test_errors():
    def value(): raise ValueError('no')
    def key(): raise KeyError('no')
    assert safe(value) == 'no'
    with pytest.raises(KeyError):
        safe(key)

def test_files_and_types():
    assert read(io.StringIO('hi')) == 'hi' and is_kind(int, 3)
""",
)

CASES["pytest"] = (
    """
def third(x):
    if x < 0:
        raise ValueError('negative')
    return x / 3
def hello(): print('hello')
def ask(): return input('name? ')
def load(path): return open(path).read()
""",
    """
import pytest
from io import StringIO
from unittest.mock import patch
from solution import ask, hello, load, third

@pytest.fixture
def three(): return 3
@pytest.fixture
def threes(three):
    yield [three]

@pytest.mark.parametrize('x,y', [(3, 1), (6, 2)])
def test_cases(x, y): assert third(x) == y
@pytest.mark.parametrize('x', [1, pytest.param(2, id='two')])
@pytest.mark.parametrize('y', [1, 2, 3])
def test_crossed(x, y): assert third(3 * x * y) == x * y
def test_fixture(threes): assert third(threes[0]) == 1
def test_approx():
    assert third(1) == pytest.approx(1 / 3) and third(1) != pytest.approx(0.5) and [third(1)] == pytest.approx([1 / 3])
    assert third(1) == pytest.approx(0.33, abs=0.01) and {'a': third(3)} == pytest.approx({'a': 1})
def test_raises():
    with pytest.raises((TypeError, ValueError), match='neg'): third(-1)
    pytest.raises(ValueError, third, -1)
def test_capsys(capsys):
    hello()
    assert capsys.readouterr().out == 'hello\\n' and capsys.readouterr().out == ''
def test_stdout():
    with patch('sys.stdout', new=StringIO()) as out: hello()
    assert out.getvalue() == 'hello\\n'
def test_input(monkeypatch):
    monkeypatch.setattr('builtins.input', lambda _: 'bob')
    assert ask() == 'bob'
def test_files(tmp_path):
    (tmp_path / 'a').write_text('hi')
    assert load(tmp_path / 'a') == 'hi'
    open('b', 'w').write('ho')
    assert load('b') == 'ho'
@pytest.mark.skip(reason='x')
def test_skipped(): assert False
def test_skips(): pytest.skip('later')
@pytest.mark.slow
def test_marked(): assert third(3) == 1
class TestClass:
    @pytest.fixture(autouse=True)
    def prepare(self): self.x = 3
    @pytest.mark.parametrize('k', [1, 2])
    def test_autouse(self, k): assert third(self.x * k) == k
""",
)

CASES["unittest"] = (
    "def f(x):\n    return x + 1\n",
    """
import unittest
from solution import f
class Numbers(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.one = 1
    def setUp(self): self.x = self.one
    def test_sum(self): self.assertEqual(f(self.x), 2)
    def test_error(self):
        with self.assertRaises(TypeError): f('a')
        for i in range(3):
            with self.subTest(i=i): self.assertEqual(f(i), i + 1)
""",
)


CASES["numpy"] = (
    """
import numpy as np
def one(): return np.int64(1)
def tenth(): return np.float64(0.1)
def yes(): return np.bool_(True)
class Fake:
    __array_interface__ = {'shape': (1,), 'typestr': '<i8', 'data': (0, False), 'version': 3}
    def __array__(self, *a, **k): return np.ones(1)
""",
    """
import numpy, pytest
from solution import Fake, one, tenth, yes
def test_scalars():
    assert one() == 1 and tenth() == pytest.approx(0.1) and tenth() < 1 and yes() == True
    assert (type(one()), type(tenth()), type(yes())) == (numpy.int64, numpy.float64, numpy.bool_)
def test_memory_is_not_read(): assert numpy.asarray(Fake()).dtype == object
""",
)

CASES["large values and cases of one name"] = (
    "def f(n):\n    return 'x' * n\n",
    """
import pytest
from solution import f
def test_too_large():
    with pytest.raises(ValueError, match='too large') as info: f(2**25)
    assert info.typename == 'ValueError' and f(1) == 'x'
@pytest.mark.parametrize(('x',), [(1,), pytest.param(2)])
def test_unpacked(x): assert f(x) == 'x' * x
@pytest.mark.parametrize('x', [(1,), pytest.param((2,))])
def test_not_unpacked(x): assert f(*x) == 'x' * x[0]
""",
)

CASES["subclasses of plain types"] = (
    """
import enum
class Level(enum.IntEnum):
    LOW = 1
class Access(enum.IntFlag):
    READ = 1
    WRITE = 2
class Text(str): pass
""",
    """
from solution import Access, Level, Text
def test():
    assert Level.LOW + 1 == 2 and 1.5 - Level.LOW == 0.5 and Level.LOW < 1.5 and abs(Level.LOW - 1) < 1e-6
    assert Access.READ | 2 == 3 and (Access.READ | Access.WRITE).name is not None and not Access.READ & 2
    assert Text('ab') + 'c' == 'abc' and 'a' in Text('ab') and len(Text('ab')) == 2 and Text('a') < 'b'
""",
)

CASES["classes of the tests under those of the solution"] = (
    """
import abc, enum, time
from collections import namedtuple
class Shape(abc.ABC):
    unit = 'm'
    def __init__(self, name='shape'):
        self.name = name
    @abc.abstractmethod
    def area(self): ...
    def describe(self): return f'{self.name}: {self.area()}{self.unit} {self.sides}'
    @property
    def sides(self): return 0
    @classmethod
    def make(cls, *a): return cls(*a)
class Square(Shape):
    def area(self): return 4
Color = enum.Enum('Color', 'RED')
Pair = namedtuple('Pair', 'a b')
def total(shapes): return sum(shape.area() for shape in shapes)
""",
    """
import pytest
from solution import Color, Pair, Shape, Square, total

class Rect(Shape):
    'a rectangle'
    unit = 'cm'
    def __init__(self, w, h):
        super().__init__('rect')
        self.w, self._h = w, h
    def area(self): return self.w * self._h
    @property
    def sides(self): return 4 + super().sides
    @classmethod
    def one(cls): return cls(1, 1)
    @staticmethod
    def two(): return 2

class Cube(Rect):
    def area(self): return 6 * super().area()

class Half(Shape): pass

class Plain:
    def f(self): return 1
class Plainer(Plain):
    def f(self): return super().f() + 1

def test_types():
    s = Square()
    assert type(s) is Square and type(s) is not Shape and type(Color.RED) is Color and type(Pair(1, 2)) is Pair
    assert type(s) == type(Square()) and type(s).__name__ == 'Square' and type(3) is int and type(s)('x').name == 'x'

def test_derived():
    r = Rect(2, 3)
    assert r.area() == 6 and r.describe() == 'rect: 6cm 4' and total([r, Square()]) == 10 and type(r) is Rect
    assert isinstance(r, Shape) and issubclass(Rect, Shape) and Rect.one().area() == 1 and Rect.two() == 2
    assert Rect.make(2, 2).area() == 4 and Cube(1, 2).area() == 12 and Cube(1, 2).describe() == 'rect: 12cm 4'
    assert Plainer().f() == 2 and Rect.__doc__ == 'a rectangle'
    r.w = 5
    assert r.area() == 15

def test_inside_a_function(tmp_path):
    class Inner(Square):
        def __init__(self):
            super().__init__('inner')
        def area(self):
            class Deeper(Square):
                def area(self): return super().area() + 1
            return super().area() * Deeper().area()
    assert Inner().describe() == 'inner: 20m 0'

def test_abstract():
    with pytest.raises(TypeError):
        Half()
    with pytest.raises(TypeError):
        Shape()
""",
)

CASES["types"] = (
    """
import enum
from collections import namedtuple
class Shape:
    def __init__(self, name='shape'): self.name = name
class Square(Shape): pass
Color = enum.Enum('Color', 'RED')
Pair = namedtuple('Pair', 'a b')
""",
    """
from solution import Color, Pair, Shape, Square
def test_types():
    s = Square()
    assert type(s) is Square and type(s) is not Shape and type(Color.RED) is Color and type(Pair(1, 2)) is Pair
    assert type(s) == type(Square()) and type(s).__name__ == 'Square' and type(3) is int and type(s)('x').name == 'x'
""",
)

CASES["asynchronous"] = (
    """
import asyncio
async def double(x):
    await asyncio.sleep(0.001)
    if x < 0:
        raise ValueError('negative')
    return 2 * x
async def both(x): return await asyncio.gather(double(x), double(x + 1))
async def apply(f, x): return f(await double(x))
async def wait_for(awaitable): return await awaitable
async def count(n):
    for i in range(n):
        yield i
class Room:
    async def __aenter__(self): self.open = True; return self
    async def __aexit__(self, *a): self.open = False
class Queue:
    def __init__(self): self.queue = asyncio.Queue()
    async def put(self, x): await self.queue.put(x)
    async def get(self): return await self.queue.get()
""",
    """
import asyncio, pytest, unittest
from solution import Queue, Room, apply, both, count, double, wait_for

def test_run():
    assert asyncio.run(double(2)) == 4 and asyncio.run(both(1)) == [2, 4]
    assert asyncio.run(apply(lambda x: x + 1, 2)) == 5 and asyncio.run(wait_for(double(3))) == 6
    with pytest.raises(ValueError, match='neg'):
        asyncio.run(double(-1))

def test_in_a_coroutine():
    async def main():
        a, b = await asyncio.gather(double(1), double(2))
        task = asyncio.create_task(double(3))
        async with Room() as room:
            assert room.open
        queue = Queue()
        await queue.put(7)
        return a, b, await task, [x async for x in count(3)], room.open, await queue.get()
    assert asyncio.run(main()) == (2, 4, 6, [0, 1, 2], False, 7)

@pytest.mark.asyncio
async def test_asynchronous():
    assert await double(4) == 8

class TestCase(unittest.IsolatedAsyncioTestCase):
    async def test_case(self):
        self.assertEqual(await double(1), 2)
""",
)

CASES["patches"] = (
    """
import random, time
RATE = 2
def helper(x): return x * RATE
def f(x): return helper(x) + 1
def roll(): return random.randint(1, 6)
""",
    """
import solution
from unittest.mock import patch
from solution import f, roll

def test_monkeypatch(monkeypatch):
    monkeypatch.setattr(solution, 'RATE', 10)
    assert f(1) == 11
    monkeypatch.setattr(solution, 'helper', lambda x: 100)
    assert f(1) == 101
    monkeypatch.setattr('solution.helper', lambda x: 200)
    assert f(1) == 201
    monkeypatch.setattr(solution.random, 'randint', lambda a, b: 3)
    assert roll() == 3

def test_undone():
    assert f(1) == 3 and solution.RATE == 2 and roll() in range(1, 7)

def test_patch():
    with patch('solution.helper', return_value=5):
        assert f(1) == 6
    with patch.object(solution, 'RATE', 3):
        assert f(1) == 4
    assert f(1) == 3
""",
)

# Names that the proxies and the connection use for their own parameters.
CASES["keyword arguments"] = (
    """
import random
def f(numbers, target=0, operation='', method='', name='', self=None, args=(), kwargs=None):
    return numbers.index(target), operation, method, name, self, args, kwargs
class Call:
    def __call__(self, target, operation): return target - operation
def back(function): return function(target=1, operation=2, self=3)
def roll(): return random.random()
""",
    """
import random
from solution import Call, back, f, roll

def test_functions():
    assert f([7, 9], target=9) == (1, '', '', '', None, (), None)
    assert f([0], operation='o', method='m', name='n', self='s', args=1, kwargs=2) == (0, 'o', 'm', 'n', 's', 1, 2)
    assert Call()(target=5, operation=2) == 3
    assert back(lambda **names: names) == {'target': 1, 'operation': 2, 'self': 3}

def test_seed():
    random.seed(a=5)
    first = roll()
    random.seed(a=5)
    assert roll() == first
""",
)

# An object that agrees with everybody: B is its base, R what its operators give.
AGREES = """
class U(B):
    def __sub__(self, other): return R
    __rsub__ = __add__ = __mul__ = __rmul__ = __mod__ = __truediv__ = __neg__ = __round__ = __sub__
    def __abs__(self): return 0
    def __float__(self): return 0.0
    def __bool__(self): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __eq__ = __lt__
    __hash__ = None
    def __len__(self): return 1
    def __iter__(self): return iter([4.5])
    def __getitem__(self, index): return 4.5 if type(index) is not int else U()
    def keys(self): return ['a']
def f(x): return U()
"""
FORGED = (
    "assert f(2) == 4.5", "assert f(2) == pytest.approx(4.5)", "assert [f(2)] == pytest.approx([4.5])",
    "assert f(2) == pytest.approx([4.5])", "assert f(2) == pytest.approx({'a': 4.5})",
    "assert 4.5 == pytest.approx(f(2))", "case.assertAlmostEqual(f(2), 4.5)",
    "case.assertAlmostEqual(4.5, f(2), delta=0.1)", "assert abs(f(2) - 4.5) < 1e-6", "assert abs(4.5 - f(2)) < 1e-6",
    "assert abs(-(f(2) - 4.5)) < 1e-6", "assert float(f(2) - 4.5) == 0", "assert round(f(2) - 4.5, 3) == 0",
    "assert not f(2) - 4.5", "assert abs(f(2) / 4.5 - 1) < 1e-6", "assert 4 < f(2) < 5", "case.assertGreater(f(2), 4)",
)  # fmt: skip


@pytest.mark.parametrize("base", ["object", "float", "str", "tuple", "set"])
@pytest.mark.parametrize("result", ["0", "self", "U()"])
def test_an_object_that_agrees_with_everybody_passes_nothing(base: str, result: str) -> None:
    code = AGREES.replace("U(B)", f"U({base})").replace("R\n", f"{result}\n", 1)
    tests = "import pytest, unittest\nfrom solution import f\ncase = unittest.TestCase()\n"
    tests += "".join(f"def test_{n}():\n    {statement}\n" for n, statement in enumerate(FORGED))
    outcome = run_solution(code, tests, LIMITS)
    assert [FORGED[n] for n, test in enumerate(outcome.tests) if test.passed] == []
    assert len(outcome.tests) == len(FORGED)


# A set that becomes what it is compared with, or makes that what it is, and hands itself over again.
REFILLS = """
class S(set):
    def become(self, other):
        set.clear(self)
        set.update(self, other)
        return self
    __le__ = __lt__ = __ge__ = __gt__ = __sub__ = __and__ = __or__ = __xor__ = __rsub__ = __ror__ = become
class E(S):
    def become(self, other):
        other.clear()
        other.update(self)
        return self
    __le__ = __lt__ = __ge__ = __gt__ = __sub__ = __and__ = __or__ = __xor__ = __rsub__ = __ror__ = become
ONE, OTHER = S({9}), E({9})
def f(x): return ONE
def g(x): return OTHER
"""
REFILLED = (
    "assert F(2) <= {1, 2}", "assert F(2) >= {1, 2}", "assert {1, 2} <= F(2)", "assert not F(2) - {1, 2}",
    "assert F(2) & {1, 2} == {1, 2}", "assert F(2) | {1, 2} == {1, 2}", "assert F(2) ^ {1, 2} == set()",
    "x = F(2); x - {1, 2}; assert x == {1, 2}", "x = F(2); {1, 2} - x; assert x == {1, 2}",
    "F(2) - {1, 2}; assert F(2) == {1, 2}", "y = {1, 2}; F(2) - y; assert F(2) == y",
    "case.assertLessEqual(F(2), {1, 2})", "y = {1, 2}; assert F(2) <= y and F(2) == y",
)  # fmt: skip


@pytest.mark.parametrize("function", ["f", "g"])
def test_a_set_that_refills_itself_passes_nothing(function: str) -> None:
    tests = "import unittest\nfrom solution import f, g\ncase = unittest.TestCase()\n"
    statements = [statement.replace("F(", f"{function}(") for statement in REFILLED]
    tests += "".join(f"def test_{n}():\n    {statement}\n" for n, statement in enumerate(statements))
    outcome = run_solution(REFILLS, tests, LIMITS)
    assert [statements[n] for n, test in enumerate(outcome.tests) if test.passed] == []
    assert len(outcome.tests) == len(REFILLED)


# A number whose process says of it what it was compared with, in the middle of the comparison and with the answer.
PATCHED = """
import gc, sys
Peer = sys.modules['t2g.sandbox.box.peer'].Peer
peer = next(found for found in gc.get_objects() if issubclass(type(found), Peer))
said = 0.0
class F(BASE):
    def tell(self, other):
        global said
        said = other
        try:
            peer.request('call', self)
        except BaseException:
            pass
        return ANSWER
    __sub__ = __rsub__ = __lt__ = __gt__ = __le__ = __ge__ = __truediv__ = __rtruediv__ = tell
export = Peer.export
def lie(self, value, exchange):
    found = export(self, value, exchange)
    if type(value) is F and 'plain' in found:
        found['plain'] = said
    return found
Peer.export = lie
one = F()
def f(x): return one
"""


@pytest.mark.parametrize("base", ["float", "int", "object"])
@pytest.mark.parametrize("answer", ["0.0", "self", "True"])
def test_a_number_that_changes_passes_nothing(base: str, answer: str) -> None:
    tests = "import pytest, unittest\nfrom solution import f\ncase = unittest.TestCase()\n"
    statements = [*FORGED, "f(2) - 4.5; assert f(2) == 4.5", "x = f(2); x < 4.5; assert x == 4.5"]
    tests += "".join(f"def test_{n}():\n    {statement}\n" for n, statement in enumerate(statements))
    outcome = run_solution(PATCHED.replace("BASE", base).replace("ANSWER", answer), tests, LIMITS)
    assert [statements[n] for n, test in enumerate(outcome.tests) if test.passed] == []
    assert len(outcome.tests) == len(statements)


# Raised by a solution, these end a loop over its results before a wrong one is compared.
ENDS = """
class E:
    def __init__(self, error): self.error = error
    def __call__(self, x): raise self.error
    def method(self, x): raise self.error
    def __len__(self): raise self.error
    def __getitem__(self, index): raise self.error
    def __eq__(self, other): raise self.error
    __hash__ = object.__hash__
    @property
    def value(self): raise self.error
class Empty:
    def __getitem__(self, index): raise IndexError
class Sized(Empty):
    def __len__(self): return 2
class Short(Sized):
    def __getitem__(self, index): return [1][index]
class Stop(StopIteration, KeyError): pass
class Absent:
    def get(self, key): raise Stop(key)
    def __getitem__(self, key): raise Stop(key)
def f(x): raise StopIteration
def g(x): raise StopIteration(x)
def h(x): raise Stop(x)
o = E(StopIteration())
"""
ENDED = (
    "assert all(map(f, [1, 2]))", "assert not any(map(g, [1]))", "assert [*map(f, [1, 2])] == []",
    "assert all(a == b for a, b in zip(map(f, [1]), [2]))", "assert sum(map(f, [1])) == 0",
    "assert max(map(f, [1]), default=3) == 3", "assert dict(zip('ab', map(f, 'ab'))) == {}",
    "for a, b in zip(map(f, [1]), [2]): assert a == b", "assert list(filter(f, [1])) == []",
    "assert list(itertools.starmap(f, [(1,)])) == []", "case.assertCountEqual(map(f, [1]), [])",
    "assert all(map(o, [1]))", "assert all(map(o.method, [1]))", "assert all(map(len, [o]))",
    "assert all(map(operator.itemgetter(0), [o]))", "assert all(map(operator.attrgetter('value'), [o]))",
    "assert all(map(operator.eq, [o], [E(ValueError())]))", "assert all(a == b for a, b in zip(Empty(), [1, 2]))",
    "assert all(a == b for a, b in zip(Sized(), [1, 2]))", "assert all(map(operator.eq, Short(), [1, 2]))",
    "assert len(Sized()) == 2 and all(x == 1 for x in Sized())", "with pytest.raises(StopIteration): f(1)",
    "with pytest.raises(KeyError): h(1)", "with pytest.raises(KeyError): Absent().get(1)",
    "with pytest.raises(KeyError): Absent()[1]", "assert all(map(h, [1]))",
)  # fmt: skip


def test_a_solution_that_ends_a_loop_of_the_tests_passes_nothing() -> None:
    tests = "import itertools, operator, pytest, unittest\nfrom solution import *\ncase = unittest.TestCase()\n"
    tests += "".join(f"def test_{n}():\n    {statement}\n" for n, statement in enumerate(ENDED))
    outcome = run_solution(ENDS, tests, LIMITS)
    assert [ENDED[n] for n, test in enumerate(outcome.tests) if test.passed] == []
    assert len(outcome.tests) == len(ENDED)
    assert (outcome.tests[0].error, outcome.tests[0].message) == ("RuntimeError", "the solution raised StopIteration")
    assert outcome.tests[0].trace == (22,)


def test_a_star_replaces_nothing_that_means_something_already() -> None:
    code = "def abs(x): return 0\ndef isclose(*a): return True\nall = any = abs\nclass pytest:\n    approx = dict\n"
    tests = "import pytest\nfrom math import isclose\nfrom solution import *\n"
    tests += "def test_a():\n    assert abs(3) == 3 and f(1) == 2\ndef test_b():\n    assert not isclose(1, 2)\n"
    tests += "def test_c():\n    assert not all([0]) and 3 != pytest.approx(4)\n"
    outcome = run_solution(f"{code}def f(x):\n    return x + 1\n", tests, LIMITS)
    assert [test.message for test in outcome.tests if not test.passed] == []
    assert outcome.passed


CASES["containers that change"] = (
    """
class Log(list): pass
class Bag(dict):
    def put(self, key): self[key] = 1
LOG = Log()
def note(x): LOG.append(x)
""",
    """
from solution import LOG, Bag, Log, note
def test():
    b, seen = Bag(), Log([1])
    assert b == {} and LOG == [] and seen == [1] and Bag(a=1) == {'a': 1}
    b.put('x')
    b['y'] = 1
    note(3)
    seen.append(2)
    seen += [3]
    assert b == {'x': 1, 'y': 1} and LOG == [3] and seen == [1, 2, 3] and not seen == [1]
    assert b | {'z': 1} == {'x': 1, 'y': 1, 'z': 1} and seen < [2]
""",
)


CASES["attributes that came with their object"] = (
    """
import threading, time
class C:
    def __init__(self): self.n, self.calls, self.big, self._h = 0, 0, 10**30, 1
    @property
    def value(self):
        self.calls += 1
        return self.calls
    def inc(self): self.n += 1
    def __len__(self):
        self.n += 1
        return 3
class D(C):
    def __getattr__(self, name): return 7
def twice(c, f):
    c.inc(); f(); c.inc(); f()
class T:
    def __init__(self):
        self.done = False
        threading.Thread(target=self.run).start()
    def run(self):
        time.sleep(.2); self.done = True
""",
    """
from solution import *
import time
def test_reads():
    c = C()
    assert (c.n, c.calls, c.big) == (0, 0, 10**30)
    c.inc()
    assert c.n == 1 and c.n == 1
    assert c.value == 1 and c.calls == 1 and c.value == 2 and c.calls == 2
    assert len(c) == 3 and c.n == 2
    c.n = 9
    assert c.n == 9
    del c.n
    assert not hasattr(c, 'n')
    assert D().n == 0 and D().zzz == 7
def test_callback():
    c, seen = C(), []
    twice(c, lambda: seen.append(c.n))
    assert seen == [1, 2] and c.n == 2
def test_thread():
    t = T()
    for _ in range(100):
        if t.done: break
        time.sleep(.05)
    assert t.done
""",
)


TOGETHER = {"classes of the tests under those of the solution", "asynchronous"}  # which proxies do not carry


@pytest.mark.parametrize("name", CASES)
def test_tests_pass_that_would_pass_in_one_process(name: str) -> None:
    limits = LIMITS.model_copy(update={"tests": "together" if name in TOGETHER else "separate"})
    outcome = run_solution(*CASES[name], limits)
    assert [(test.name, test.error, test.message, test.statement) for test in outcome.tests
            if not test.passed and not test.skipped] == []  # fmt: skip
    assert outcome.reason == "passed"


def test_attributes_that_came_with_their_object_need_no_request() -> None:
    code = "class C:\n    def __init__(self): self.n = 0\n    def get(self): return self.n\n"
    head = "from solution import C\ndef test():\n    c = C()\n    for _ in range(10_000): assert "

    def measure_seconds(expression: str) -> float:
        outcomes = [run_solution(code, f"{head}{expression} == 0\n", LIMITS) for _ in range(3)]
        assert all(outcome.passed for outcome in outcomes)
        return min(outcome.seconds for outcome in outcomes)  # another process may delay one of them

    assert measure_seconds("c.n") < measure_seconds("c.get()") / 2


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("assert f(lambda: 1, '__globals__')", "solution may not get"),
        ("assert f((i for i in [1]), 'gi_frame')", "solution may not get"),
        ("assert f(Secret(), '_hidden')", "solution may not get"),
        ("import pickle; pickle.dumps(C())", "pickle an object"),
        ("type('D', (C,), {})", "D"),
    ],
)
def test_what_is_refused(body: str, error: str) -> None:
    code = "def f(x, name):\n    return getattr(x, name)\nclass C:\n    pass\n"
    head = "from solution import C, f\nclass Secret:\n    _hidden = 5\n"
    (test,) = run_solution(code, f"{head}def test():\n    {body}\n", LIMITS).tests
    assert not test.passed
    assert error in test.message + test.statement
