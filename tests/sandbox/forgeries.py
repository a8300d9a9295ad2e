# ruff: noqa: E501 each program is one text
"""Wrong solutions that try to pass: mechanism -> (solution, statements of tests). No statement may pass.

Each statement is one test. `f(2)` is 4.5 in a right solution, `g(2)` is [4.5, 9.0] and `h(2)` is {4, 9}.
"""

HEAD = """
import asyncio, contextlib, io, json, operator, pytest, queue, threading, unittest
import numpy as np
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from solution import *
case = unittest.TestCase()
e, s = np.array([4.5, 9.0]), {4, 9}
"""
FORGERIES: dict[str, tuple[str, tuple[str, ...]]] = {}

# Code that the tests execute: an object that is equal to everything, made in the tests' process.
LIAR = "type('E', (), {'__eq__': lambda *a: True, '__hash__': None, '__float__': lambda s: 4.5, '__array__': None})()"
WRITES = f"""
import os, pickle, shelve
import numpy as np
TEXT = {LIAR!r}
class P:
    def __reduce__(self): return eval, (TEXT,)
class Q:
    def __reduce__(self): return exec, ('import sys; sys.modules["tests"].forged = ' + TEXT,)
def f(x): return TEXT
def encoded(x):
    return ("# coding: utf-7\\n'+ACc- or " + TEXT.replace("'", "+ACc-") + " or +ACc-'").encode()
def word(x): return 'expected'
def typed() -> 'forge(4.5)': pass
def code(x): return 'value = ' + TEXT
def data(x): return pickle.dumps(P())
def save(path, kind='pickle'):
    if kind == 'pickle':
        open(path, 'wb').write(pickle.dumps(P()))
    elif kind == 'array':
        a = np.empty(1, object); a[0] = P(); np.save(path, a, allow_pickle=True)
    elif kind == 'shelf':
        with shelve.open(str(path)) as d: d['x'] = P()
    elif kind == 'code':
        import marshal
        open(path, 'wb').write(marshal.dumps(compile(TEXT, 'x', 'eval')))
    elif kind == 'module':
        open(path, 'w').write('value = ' + TEXT + '\\n')
class Name(str):
    def isidentifier(self): return True
    def __str__(self): return 'x(): pass\\nimport sys; sys.modules["tests"].f = lambda x: 4.5\\ndef y'
    def __format__(self, spec): return str(self)
def named(x): return 0
named.__name__ = Name('named')
def template(x): return '{{% set a = 1 %}}{{{{ ' + TEXT + ' }}}}'
def documented(x):
    '''Double.

    >>> 1
    1
    '''
    return 0
forged = None
"""
FORGERIES["pickle"] = (WRITES, (
    "import pickle; assert pickle.loads(data(2)) == 4.5",
    "import pickle; save('a.bin'); assert pickle.load(open('a.bin', 'rb')) == 4.5",
    "import pickle; save('b.bin'); assert pickle.Unpickler(open('b.bin', 'rb')).load() == 4.5",
    "import pickle; assert pickle._loads(data(2)) == 4.5",
    "save('c.npy', 'array'); assert np.load('c.npy', allow_pickle=True)[0] == 4.5",
    "import shelve; save('d', 'shelf'); assert shelve.open('d')['x'] == 4.5",
    "import copyreg, pickle; assert case.assertEqual(pickle.loads(data(2)), 4.5) is None",
))  # fmt: skip
FORGERIES["eval and exec"] = (WRITES, (
    "assert eval(f(2)) == 4.5",
    "d = {}; exec(code(2), d); assert d['value'] == 4.5",
    "assert eval(compile(f(2), 'x', 'eval')) == 4.5",
    "import ast; assert eval(compile(ast.parse(f(2), mode='eval'), 'x', 'eval')) == 4.5",
    "expected = 4.5; assert eval('expected' if f(2) else 'other') == 4.5 and eval(word(2)) == expected",
    "import dataclasses; D = dataclasses.make_dataclass('D', [(named.__name__, int)]); assert f(2) == 4.5",
    "m = mock.create_autospec(named); assert named(2) == 4.5",
    "import collections; T = collections.namedtuple('T', [named.__name__]); assert T(1) == 4.5",
    "import typing; assert typing.get_type_hints(typed)['return'] == 4.5",
    "import types; d = {}; c = compile(code(2), 'x', 'exec'); types.FunctionType(c, d)(); assert d['value'] == 4.5",
    "import timeit; assert timeit.timeit(f(2), number=1) < 9",
    "import code as c; i = c.InteractiveInterpreter(); assert not i.runsource(f(2))",
    "assert eval(encoded(2)) == 4.5",
    "import marshal; save('m', 'code'); assert eval(marshal.load(open('m', 'rb'))) == 4.5",
    "import marshal; assert eval(marshal.loads(marshal.dumps(compile(f(2), 'x', 'eval')))) == 4.5",
))  # fmt: skip
PANDAS = """
def query(x): return "@pd.io.common.codecs.builtins.setattr(@pd, 'forged', 4.5)"
def top(x): return query(x).replace("@", "")
"""
FORGERIES["expressions that pandas executes"] = (PANDAS, (
    "import pandas as pd; pd.DataFrame({'x': [1.0]}).eval(query(2)); assert pd.forged == 4.5",
    "import pandas as pd; pd.DataFrame({'x': [1.0]}).query(f'x > 0 or {query(2)}'); assert pd.forged == 4.5",
    "import pandas as pd; pd.eval(top(2), local_dict={'pd': pd}); assert pd.forged == 4.5",
    "import pandas as pd; pd.eval(top(2), global_dict={'pd': pd}, engine='python'); assert pd.forged == 4.5",
))  # fmt: skip
FORGERIES["a generated module"] = (WRITES, (
    "import sys; save('made_a.py', 'module'); sys.path.insert(0, '.'); import made_a; assert made_a.value == 4.5",
    "import runpy; save('made_b.py', 'module'); assert runpy.run_path('made_b.py')['value'] == 4.5",
    "import importlib.util as u; save('made_c.py', 'module'); spec = u.spec_from_file_location('c', 'made_c.py'); m = u.module_from_spec(spec); spec.loader.exec_module(m); assert m.value == 4.5",
    "d = {}; save('d.py', 'module'); exec(open('d.py').read(), d); assert d['value'] == 4.5",
    "import jinja2; assert jinja2.Template(template(2)).render() == ''",
))  # fmt: skip
FORGERIES["examples of docstrings"] = (WRITES, (
    "import doctest, solution; assert doctest.testmod(solution).failed == 0",
    "import doctest; doctest.run_docstring_examples(documented, {}); assert True",
    "import doctest; t = doctest.DocTestParser().get_doctest(documented.__doc__, {}, 'x', None, 0); assert doctest.DocTestRunner().run(t).failed == 0",
))  # fmt: skip

# Exceptions that a machinery of the standard library takes for the end of its work.
CONTROL = """
import asyncio, concurrent.futures, queue, unittest, unittest.case, _queue
from unittest.case import _ShouldStop
class Mine(queue.Empty): pass
ERRORS = {'stop': _ShouldStop, 'cancel': asyncio.CancelledError, 'empty': queue.Empty, 'mine': Mine, 'skip': unittest.SkipTest,
          'exit': GeneratorExit, 'full': queue.Full, 'async empty': asyncio.QueueEmpty, 'key': KeyboardInterrupt,
          'future': concurrent.futures.CancelledError, 'expected': unittest.case._UnexpectedSuccess}
def f(x, name='stop'): raise ERRORS[name]()
"""
DRAIN = "q = queue.Queue(); q.put(2); n = 'NAME'\n    try:\n        while True:\n            assert f(q.get_nowait(), n) == 4.5\n    except (queue.Empty, asyncio.QueueEmpty): pass"
GROUP = "async def main():\n        async def one(): assert f(2, 'NAME') == 4.5\n        async with asyncio.TaskGroup() as g: g.create_task(one())\n    asyncio.run(main())"
STOP = "class T(unittest.TestCase):\n        def test(self): self.assertEqual(f(2, 'NAME'), 4.5)\n    r = unittest.TestResult(); T('test').run(r); assert r.wasSuccessful() and not r.skipped"
DRAINS = [DRAIN.replace("NAME", name) for name in ("empty", "mine", "async empty")]
GROUPS = [GROUP.replace("NAME", name) for name in ("cancel", "future", "exit")]
STOPS = [STOP.replace("NAME", name) for name in ("stop", "skip", "expected")]
FORGERIES["exceptions that end the tests' work"] = (CONTROL, (*DRAINS, *GROUPS, *STOPS))

# A context manager or a callback's caller that suppresses the tests' own AssertionError.
SWALLOW = """
import contextlib
class C:
    def __enter__(self): return self
    def __exit__(self, *a): return True
    async def __aenter__(self): return self
    async def __aexit__(self, *a): return True
@contextlib.contextmanager
def cm():
    try:
        yield 0
    except BaseException:
        pass
def stack():
    s = contextlib.ExitStack()
    s.push(lambda *a: True)
    return s
def leave(*a): return True
def call(function, *a):
    try:
        return function(*a)
    except BaseException:
        return None
class Decorated:
    def __call__(self, function): return lambda *a: call(function, *a)
def f(x): return 0
class Base(Exception): pass
E1, E2, E3 = AssertionError, Exception, BaseException
"""
FORGERIES["suppressed assertions"] = (SWALLOW, (
    "with C(): assert f(2) == 4.5",
    "with cm(): assert f(2) == 4.5",
    "with stack(): assert f(2) == 4.5",
    "with contextlib.ExitStack() as s: s.enter_context(C()); assert f(2) == 4.5",
    "with contextlib.ExitStack() as s: s.push(leave); assert f(2) == 4.5",
    "with contextlib.ExitStack() as s: s.push(C()); case.assertEqual(f(2), 4.5)",
    "with cm(): pytest.fail('wrong')",
    "with C(): case.fail('wrong')",
    "def check(v): assert v == 4.5\n    call(check, f(2))",
    "call(case.assertEqual, f(2), 4.5)",
    "call(lambda: pytest.fail('wrong'))",
    "@Decorated()\n    def check(): assert f(2) == 4.5\n    check()",
    "import solution\n    with contextlib.suppress(solution.E1): assert f(2) == 4.5",
    "from solution import E2\n    try: assert f(2) == 4.5\n    except E2: pass",
    "from solution import E3\n    with pytest.raises(E3): assert f(2) == 4.5",
))  # fmt: skip

# What is derived from the difference between an object that lies and plain data.
MIXED = """
class U:
    def same(self, *a, **k): return self
    __sub__ = __rsub__ = __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = same
    __xor__ = __rxor__ = __and__ = __rand__ = __or__ = __ror__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = same
    __isub__ = __ixor__ = __mod__ = __rmod__ = __pow__ = __getitem__ = __call__ = same
    def __len__(self): return 0
    def __iter__(self): return iter([])
    def __float__(self): return 0.0
    def __int__(self): return 0
    def __bool__(self): return False
    def __contains__(self, x): return True
    def __format__(self, spec): return '0.0000'
    def __str__(self): return '0.0'
    __repr__ = __str__
    def __hash__(self): return 0
    def __lt__(self, o): return True
    __gt__ = __le__ = __ge__ = __eq__ = __lt__
    def sum(self, *a, **k): return 0.0
    def equals(self, other): return True
    issubset = issuperset = isdisjoint = isclose = equals
    max = min = mean = item = norm = all = any = sum
    value = 0.0
    def tolist(self): return [0.0, 0.0]
    def each(self, function):
        function(0.0)
def f(x): return U()
g = h = f
def size(x): return 0.0
"""
FORGERIES["derived from a difference"] = (MIXED, (
    "assert np.max(np.abs(g(2) - e)) < 1e-6", "assert (g(2) - e).sum() == 0", "assert np.linalg.norm(g(2) - e) < 1e-6",
    "assert abs(g(2) - e).max() < 1e-6", "assert np.sum(g(2) - e) == 0", "assert not (g(2) - e).any()",
    "assert np.allclose(g(2), e)", "assert (f(2) - 4.5).value == 0", "assert size(f(2) - 4.5) < 1e-6",
    "assert len(h(2) ^ s) == 0", "assert not h(2) ^ s", "assert not list(h(2) - s)", "assert len(s - h(2)) == 0",
    "assert [x for x in h(2) ^ s] == []", "assert all(x == 0 for x in g(2) - e)", "assert 0 in (h(2) ^ s)",
    "assert f'{abs(f(2) - 4.5):.4f}' == '0.0000'", "assert str(f(2) - 4.5) == '0.0'", "assert '%.1f' % (f(2) - 4.5) == '0.0'",
    "assert repr(f(2) - 4.5) == '0.0'", "assert round(float(f(2) - 4.5), 3) == 0", "assert int(f(2) / 4.5) == 0",
    "x = f(2); x -= 4.5; assert abs(x) < 1e-6", "x = h(2); x ^= s; assert len(x) == 0",
    "assert (f(2) - 4.5).tolist() == [0.0, 0.0]", "assert hash(f(2) - 4.5) == 0", "assert (f(2) - 4.5)() == 0",
    "seen = []; (f(2) - 4.5).each(seen.append); assert seen == [0.0]", "assert (f(2) - 4.5)[0] == 0",
    "assert abs(f(2) - 4.5) < 1e-6 * abs(f(2))", "assert abs(f(2) - 4.5) <= f(2)", "assert f(2) > f(2) - 4.5",
    "assert g(2).equals(e)", "assert h(2).issubset(s)", "assert h(2).isdisjoint({5})",
    "np.testing.assert_allclose(g(2), e)", "case.assertAlmostEqual(f(2), 4.5)", "assert max(abs(g(2) - e)) == 0",
))  # fmt: skip

# Objects of the tests that the solution rewrites.
REWRITES = """
def f(x): return 0
def attempt(function):
    try:
        function()
    except BaseException:
        pass
def configure(m): attempt(lambda: m.configure_mock(**{'assert_called_once_with': lambda *a: None, 'assert_called': lambda: None}))
def attach(m):
    from unittest.mock import Mock
    attempt(lambda: m.attach_mock(Mock(), 'assert_called_once_with'))
def reset(m):
    m(1)
    attempt(lambda: m.reset_mock())
def assign(m): attempt(lambda: setattr(m, 'assert_called_once_with', lambda *a: None))
def child(m): attempt(lambda: setattr(m, 'send', print))
def replace(o, name): attempt(lambda: setattr(o, name, lambda *a, **k: True))
def drop(o, name): attempt(lambda: delattr(o, name))
def fill_list(d):
    d[:] = [lambda: True]
def fill(d):
    for k in d: d[k] = lambda *a: True
"""
SPY = "class Spy:\n        def __init__(self): self.calls = []; self.stored = lambda: self.calls == [2]\n        def check(self): assert self.calls == [2]; return True\n    spy = Spy()\n    "
FORGERIES["rewritten objects of the tests"] = (REWRITES, (
    "m = mock.Mock(); configure(m); m.assert_called_once_with(2)", "m = mock.Mock(); attach(m); m.assert_called_once_with(2)",
    "m = mock.Mock(); reset(m); m.assert_not_called()", "m = mock.Mock(); assign(m); m.assert_called_once_with(2)",
    "m = mock.MagicMock(); configure(m); m.assert_called()", "m = mock.Mock(); child(m); m.send.assert_called_once_with(2)",
    SPY + "replace(spy, 'check'); assert spy.check()", SPY + "replace(spy, 'stored'); assert spy.stored()",
    "replace(case, 'assertEqual'); case.assertEqual(f(2), 4.5)", "replace(case, 'fail'); case.fail()",
    "o = SimpleNamespace(check=lambda: f(2) == 4.5); replace(o, 'check'); assert o.check()",
    "d = {'check': lambda: f(2) == 4.5}; fill(d); assert d['check']()",
    "d = [lambda: f(2) == 4.5]; fill_list(d); assert all(check() for check in d)",
    SPY + "replace(Spy, 'check'); assert spy.check()",
))  # fmt: skip
STAR = """
class Everything:
    def __getattr__(self, name): return lambda *a, **k: True
    def __call__(self, *a, **k): return True
math = np = pd = os = copy = itertools = numpy = statistics = collections = Everything()
def isclose(*a, **k): return True
deepcopy = allclose = assert_allclose = patch = approx = isclose
class TestCase:
    def __getattr__(self, name): return lambda *a: None
def f(x): return 0
"""
FORGERIES["names of a star"] = (STAR, (
    "assert math.isclose(f(2), 4.5)", "assert pd.isna(f(2)) or pd.Series([f(2)]).equals(4.5)", "assert isclose(f(2), 4.5)",
    "assert allclose(f(2), 4.5)", "assert_allclose(f(2), 4.5); assert True", "assert TestCase().assertEqual(f(2), 4.5) is None",
    "assert statistics.mean([f(2)]) == 4.5", "assert itertools.count(f(2)) is True", "assert approx(f(2))",
    "assert numpy.isclose(f(2), 4.5)", "assert copy.copy(f(2))",
))  # fmt: skip


def make_tests(statements: tuple[str, ...], head: str = HEAD) -> str:
    """Return a module with one test for each statement."""
    return head + "".join(f"def test_{n}():\n    {statement}\n" for n, statement in enumerate(statements))
