# ruff: noqa: E501 each program is one text
"""Right programs that share arrays, frames, streams, library objects and errors with their tests.

name -> (solution, tests). Each passes under pytest in one process. The first half was used to develop the sandbox, the
second half was written before and not tuned on: `HELD_OUT`.
"""

PROGRAMS: dict[str, tuple[str, str]] = {}
IMPORTS = "import io, json, math, os, sys\nimport numpy as np\nimport pytest\nimport solution\nfrom unittest.mock import Mock, patch\n"


def add(name: str, solution: str, tests: str) -> None:
    """Add a program; its tests start with the usual imports and `from solution import *`."""
    PROGRAMS[name] = (solution.strip("\n") + "\n", f"{IMPORTS}from solution import *\n{tests.strip(chr(10))}\n")


# -- arrays
add("array sum", "def f(a): return a.sum()", "def test(): assert f(np.array([1, 2, 3])) == 6")
add("array shape", "def f(a): return a.shape", "def test(): assert f(np.zeros((2, 3))) == (2, 3)")
add(
    "array product",
    "def f(a, b): return a @ b",
    "def test(): assert np.array_equal(f(np.eye(2), np.array([1, 2])), [1, 2])",
)
add("array mask", "def f(a): return a[a > 1]", "def test(): assert f(np.array([1, 2, 3])).tolist() == [2, 3]")
add(
    "returned array is an array",
    "import numpy as np\ndef f(n): return np.arange(n)",
    "def test():\n    assert isinstance(f(3), np.ndarray) and f(3).dtype == np.arange(3).dtype and f(3).ndim == 1",
)
add(
    "approx of an array",
    "import numpy as np\ndef f(x): return np.array([x / 3, x])",
    "def test(): assert f(1) == pytest.approx(np.array([1 / 3, 1.0])) and f(3) == pytest.approx([1, 3])",
)
add(
    "assert_allclose",
    "import numpy as np\ndef softmax(x):\n    e = np.exp(x - x.max())\n    return e / e.sum()",
    "def test():\n    p = softmax(np.array([1.0, 2.0]))\n    np.testing.assert_allclose(p.sum(), 1.0)\n    assert np.max(np.abs(p - np.array([0.26894142, 0.73105858]))) < 1e-6",
)
add(
    "array in place",
    "def f(a): a *= 2; a[0] = 7",
    "def test():\n    a = np.array([1, 2, 3])\n    f(a)\n    assert a.tolist() == [7, 4, 6]",
)
add(
    "array unchanged",
    "import numpy as np\ndef f(a): return np.sort(a)",
    "def test():\n    a = np.array([3, 1])\n    b = f(a)\n    assert a.tolist() == [3, 1] and b.tolist() == [1, 3] and b is not a",
)
add(
    "same array",
    "def f(a): a.sort(); return a",
    "def test():\n    a = np.array([3, 1])\n    assert f(a) is a and (a == [1, 3]).all()",
)
add(
    "numpy scalar",
    "import numpy as np\ndef f(a): return np.mean(a)",
    "def test(): assert isinstance(f(np.array([1.0, 2.0])), (float, np.floating)) and f(np.ones(3)) == pytest.approx(1)",
)
add(
    "two-dimensional slice",
    "def f(a): return a[:, 1]",
    "def test(): assert (f(np.arange(6).reshape(2, 3)) == np.array([1, 4])).all()",
)
# -- frames
PD = "import pandas as pd\n"
add("frame column", PD + "def f(d): return d['a'].sum()", PD + "def test(): assert f(pd.DataFrame({'a': [1, 2]})) == 3")
add(
    "frame returned",
    PD + "def f(n): return pd.DataFrame({'n': range(n), 's': ['x'] * n})",
    PD
    + "def test():\n    d = f(2)\n    assert isinstance(d, pd.DataFrame) and list(d.columns) == ['n', 's'] and len(d) == 2 and d['s'].iloc[0] == 'x'",
)
add(
    "assert_frame_equal",
    PD + "def f(d): return d.assign(b=d['a'] * 2)",
    PD
    + "def test():\n    d = pd.DataFrame({'a': [1, 2]})\n    pd.testing.assert_frame_equal(f(d), pd.DataFrame({'a': [1, 2], 'b': [2, 4]}))\n    assert 'b' not in d",
)
add(
    "frame query",
    PD + "def f(d): return d.query('a > 1')",
    PD
    + "def test():\n    n = 2\n    d = pd.DataFrame({'a': [1, 2], 'b': [3, 4]})\n    assert f(d).query('a == @n & b < 5').eval('a + b').tolist() == [6]",
)
add(
    "frame in place",
    PD + "def f(d): d['b'] = d['a'] + 1",
    PD + "def test():\n    d = pd.DataFrame({'a': [1, 2]})\n    f(d)\n    assert d['b'].tolist() == [2, 3]",
)
add(
    "group by",
    PD + "def f(d): return d.groupby('k')['v'].mean()",
    PD
    + "def test():\n    s = f(pd.DataFrame({'k': ['a', 'a', 'b'], 'v': [1, 3, 5]}))\n    assert s['a'] == 2 and s.to_dict() == {'a': 2.0, 'b': 5.0}",
)
add(
    "series",
    PD + "def f(s): return s.cumsum()",
    PD + "def test(): pd.testing.assert_series_equal(f(pd.Series([1, 2], name='x')), pd.Series([1, 3], name='x'))",
)
# -- standard input
add(
    "stdin read",
    "import sys\ndef main():\n    a, b = map(int, sys.stdin.read().split())\n    print(a + b)",
    "def test(monkeypatch, capsys):\n    monkeypatch.setattr('sys.stdin', io.StringIO('3 4\\n'))\n    main()\n    assert capsys.readouterr().out == '7\\n'",
)
add(
    "stdin lines",
    "import sys\ndef main(): print(sum(int(line) for line in sys.stdin))",
    "def test(monkeypatch, capsys):\n    monkeypatch.setattr(sys, 'stdin', io.StringIO('1\\n2\\n3\\n'))\n    main()\n    assert capsys.readouterr().out.strip() == '6'",
)
add(
    "stdin readline",
    "import sys\ndef main():\n    n = int(sys.stdin.readline())\n    return [sys.stdin.readline().strip() for _ in range(n)]",
    "def test():\n    with patch('sys.stdin', io.StringIO('2\\na\\nb\\nc\\n')):\n        assert main() == ['a', 'b'] and sys.stdin.readline() == 'c\\n'",
)
add(
    "stdin buffer",
    "import sys\ndef main(): return len(sys.stdin.buffer.read().split())",
    "def test(monkeypatch):\n    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BytesIO(b'a b c')))\n    assert main() == 3",
)
add(
    "input from stdin",
    "def main(): return [input() for _ in range(2)]",
    "def test(monkeypatch):\n    monkeypatch.setattr('sys.stdin', io.StringIO('x\\ny\\nz\\n'))\n    assert main() == ['x', 'y'] and input() == 'z'\n    with pytest.raises(EOFError):\n        main()",
)
add(
    "a script by runpy",
    "import sys\nif __name__ == '__main__':\n    print(int(input()) * 2)",
    "import runpy\ndef test(monkeypatch, capsys):\n    monkeypatch.setattr('sys.stdin', io.StringIO('21\\n'))\n    runpy.run_path(solution.__file__, run_name='__main__')\n    assert capsys.readouterr().out == '42\\n'",
)
# -- what the harness itself calls
add(
    "patch json.loads",
    "import json\ndef f(s): return json.loads(s)['a']",
    "def test():\n    with patch('solution.json.loads', return_value={'a': 5}):\n        assert f('x') == 5\n    assert f('{\"a\": 1}') == 1",
)
add(
    "patch json.dumps",
    "import json\ndef f(x): return json.dumps(x)",
    "def test():\n    with patch('solution.json.dumps', side_effect=TypeError('bad')):\n        with pytest.raises(TypeError):\n            f(1)\n    assert f([1]) == '[1]'",
)
add(
    "patch os.getpid",
    "import os\ndef name(): return f'job-{os.getpid()}'",
    "def test(monkeypatch):\n    monkeypatch.setattr(solution.os, 'getpid', lambda: 7)\n    assert name() == 'job-7'",
)
add(
    "patch time.monotonic",
    "import time\ndef f():\n    start = time.monotonic()\n    return time.monotonic() - start",
    "def test():\n    with patch('solution.time.monotonic', side_effect=[1.0, 3.5]):\n        assert f() == 2.5",
)
add(
    "patch json in both",
    "import json\ndef f(): return json.dumps({})",
    "def test():\n    with patch('json.loads') as m:\n        assert f() == '{}'\n    assert not m.called",
)
# -- the module
add(
    "inspect.getsource",
    "def f(x):\n    # double\n    return 2 * x\ndef g(): pass",
    "import inspect\ndef test(): assert '# double' in inspect.getsource(solution.f) and 'def g' not in inspect.getsource(solution.f) and 'def g' in inspect.getsource(solution)",
)
add(
    "importlib.reload",
    "COUNT = 0\ndef add():\n    global COUNT\n    COUNT += 1\n    return COUNT",
    "import importlib\ndef test():\n    assert add() == 1 and solution.COUNT == 1\n    importlib.reload(solution)\n    assert solution.COUNT == 0 and solution.add() == 1",
)
add(
    "__file__",
    "X = 1",
    "def test():\n    text = open(solution.__file__).read()\n    assert text == 'X = 1\\n' and os.path.basename(solution.__file__) == 'solution.py'",
)
add(
    "doctest",
    "def f(x):\n    '''Double.\n\n    >>> f(2)\n    4\n    '''\n    return 2 * x",
    "import doctest\ndef test():\n    r = doctest.testmod(solution)\n    assert r.failed == 0 and r.attempted == 1",
)
# -- arguments of the library
add(
    "Random",
    "def roll(rng, n): return [rng.randint(1, 6) for _ in range(n)]",
    "import random\ndef test(): assert roll(random.Random(3), 4) == [random.Random(3).randint(1, 6), *roll(random.Random(3), 4)[1:]]",
)
add(
    "Queue",
    "def drain(q):\n    out = []\n    while not q.empty(): out.append(q.get())\n    return out",
    "import queue\ndef test():\n    q = queue.Queue()\n    for i in range(3): q.put(i)\n    assert drain(q) == [0, 1, 2] and q.empty()",
)
add(
    "Pattern",
    "def find(p, s): return [m.group(0) for m in p.finditer(s)]",
    "import re\ndef test(): assert find(re.compile(r'\\d+'), 'a1b22') == ['1', '22']",
)
add(
    "Event",
    "def finish(e):\n    if not e.is_set(): e.set()",
    "import threading\ndef test():\n    e = threading.Event()\n    finish(e)\n    assert e.is_set()",
)
add(
    "SimpleNamespace",
    "def move(p): p.x += 1; return p.x + p.y",
    "from types import SimpleNamespace\ndef test():\n    p = SimpleNamespace(x=1, y=2)\n    assert move(p) == 4 and p.x == 2 and p == SimpleNamespace(x=2, y=2)",
)
add(
    "Namespace",
    "def run(args): return args.name * args.times",
    "import argparse\ndef test(): assert run(argparse.Namespace(name='a', times=3)) == 'aaa'",
)
add(
    "dataclass of the tests",
    "def area(r): return r.w * r.h",
    "from dataclasses import dataclass\n@dataclass\nclass R:\n    w: int\n    h: int\ndef test(): assert area(R(2, 3)) == 6",
)
add(
    "enum of the tests",
    "def nxt(c): return type(c)((c.value + 1) % 3)\ndef name(c): return c.name.lower()",
    "import enum\nclass C(enum.Enum):\n    A = 0\n    B = 1\n    D = 2\ndef test(): assert name(C.B) == 'b'",
)
add(
    "Lock",
    "def bump(lock, d):\n    with lock:\n        d['n'] += 1",
    "import threading\ndef test():\n    lock, d = threading.Lock(), {'n': 0}\n    bump(lock, d)\n    assert d['n'] == 1 and not lock.locked()",
)
# -- errors
add(
    "__cause__",
    "def f(s):\n    try:\n        return int(s)\n    except ValueError as e:\n        raise RuntimeError('bad') from e",
    "def test():\n    with pytest.raises(RuntimeError) as info: f('x')\n    assert isinstance(info.value.__cause__, ValueError) and 'invalid' in str(info.value.__cause__)",
)
add(
    "__notes__",
    "def f():\n    e = ValueError('v')\n    e.add_note('look here')\n    raise e",
    "def test():\n    with pytest.raises(ValueError) as info: f()\n    assert info.value.__notes__ == ['look here']",
)
add(
    "__context__",
    "def f():\n    try:\n        {}['k']\n    except KeyError:\n        raise TypeError('t')",
    "def test():\n    with pytest.raises(TypeError) as info: f()\n    assert isinstance(info.value.__context__, KeyError) and info.value.__cause__ is None",
)
add(
    "own error with a cause",
    "class E(Exception): pass\ndef f():\n    try: 1 / 0\n    except ZeroDivisionError as z: raise E('e') from z",
    "def test():\n    with pytest.raises(E) as info: f()\n    assert type(info.value.__cause__) is ZeroDivisionError",
)
add(
    "from None",
    "def f():\n    try: 1 / 0\n    except ZeroDivisionError: raise ValueError('v') from None",
    "def test():\n    with pytest.raises(ValueError) as info: f()\n    assert info.value.__cause__ is None and info.value.__suppress_context__",
)
# -- patterns
P = "class P:\n    __match_args__ = ('x', 'y')\n    def __init__(self, x, y=0): self.x, self.y = x, y\n"
add(
    "match by keyword",
    P + "def make(x): return P(x)",
    "def test():\n    match make(1):\n        case P(x=1): pass\n        case _: assert False",
)
add(
    "match by position",
    P,
    "def test():\n    match P(1, 2):\n        case P(1, y): assert y == 2\n        case _: assert False",
)
add(
    "match a dataclass",
    "from dataclasses import dataclass\n@dataclass\nclass A:\n    v: int\n@dataclass\nclass B:\n    v: int\n",
    "def kind(o):\n    match o:\n        case A(v=v): return 'a', v\n        case B(v): return 'b', v\ndef test(): assert kind(A(1)) == ('a', 1) and kind(B(2)) == ('b', 2)",
)
# -- many calls
add("many calls", "def f(x): return x + 1", "def test():\n    for i in range(3000): assert f(i) == i + 1")
add(
    "many attribute reads",
    "class C:\n    def __init__(self): self.n = 0",
    "def test():\n    c = C()\n    assert sum(c.n for _ in range(3000)) == 0",
)
add(
    "a long list of nodes",
    "class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\ndef build(n):\n    head = None\n    for i in reversed(range(n)): head = Node(i, head)\n    return head",
    "def test():\n    node, seen = build(1500), 0\n    while node:\n        assert node.v == seen\n        node, seen = node.next, seen + 1\n    assert seen == 1500",
)
add(
    "nodes of the tests",
    "def length(head):\n    n = 0\n    while head: n, head = n + 1, head.next\n    return n",
    "class Node:\n    def __init__(self, next=None): self.next = next\ndef test():\n    head = None\n    for _ in range(1500): head = Node(head)\n    assert length(head) == 1500",
)
add(
    "Counter and deque",
    "def f(c, d):\n    c['a'] += 1\n    d.rotate(1)\n    return c.most_common(1)",
    "from collections import Counter, deque\ndef test():\n    c, d = Counter('ab'), deque([1, 2])\n    assert f(c, d) == [('a', 2)] and d == deque([2, 1]) and c['a'] == 2",
)
add(
    "stdout buffer",
    "import sys\ndef main(): sys.stdout.buffer.write(sys.stdin.buffer.read().upper())",
    "def test(monkeypatch, capsys):\n    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BytesIO(b'ab')))\n    main()\n    assert capsys.readouterr().out == 'AB'",
)
add(
    "series of strings",
    PD + "def f(s): return s.str.upper()",
    PD
    + "def test():\n    r = f(pd.Series(['a', None]))\n    assert r[0] == 'A' and r.isna().tolist() == [False, True]",
)
add(
    "eval of a returned literal",
    "def f(x): return repr({'a': [x, (1, 2.5)]})",
    "import ast\ndef test(): assert eval(f(3)) == ast.literal_eval(f(3)) == {'a': [3, (1, 2.5)]}",
)

NUM_DEVELOPMENT = len(PROGRAMS)
# -- held out: arrays and frames
add(
    "h normalise rows",
    "import numpy as np\ndef f(m): return m / np.linalg.norm(m, axis=1, keepdims=True)",
    "def test():\n    r = f(np.array([[3.0, 4.0], [0.0, 2.0]]))\n    assert r.shape == (2, 2) and np.allclose(r, [[0.6, 0.8], [0, 1]])",
)
add(
    "h boolean array",
    "def f(a): return a % 2 == 0",
    "def test():\n    r = f(np.array([1, 2, 4]))\n    assert r.dtype == bool and r.sum() == 2 and not r[0]",
)
add(
    "h solve",
    "import numpy as np\ndef f(a, b): return np.linalg.solve(a, b)",
    "def test():\n    a, b = np.array([[2.0, 0], [0, 4]]), np.array([2.0, 4])\n    np.testing.assert_array_almost_equal(a @ f(a, b), b)",
)
add(
    "h float32 stays",
    "def f(a): return a * 2",
    "def test(): assert f(np.ones(2, dtype=np.float32)).dtype == np.float32",
)
add(
    "h dtype argument",
    "import numpy as np\ndef f(n, dtype): return np.zeros(n, dtype=dtype)",
    "def test(): assert f(2, np.int16).dtype == np.int16 and f(2, 'f4').itemsize == 4",
)
add(
    "h empty array",
    "import numpy as np\ndef f(a): return np.unique(a)",
    "def test(): assert f(np.array([])).size == 0 and f(np.array([2, 2, 1])).tolist() == [1, 2]",
)
add(
    "h strings in an array",
    "import numpy as np\ndef f(a): return np.char.upper(a)",
    "def test(): assert f(np.array(['a', 'b'])).tolist() == ['A', 'B']",
)
add(
    "h list of arrays",
    "import numpy as np\ndef f(arrays): return np.concatenate(arrays)",
    "def test(): assert list(f([np.array([1]), np.array([2, 3])])) == [1, 2, 3]",
)
add(
    "h array in a class",
    "import numpy as np\nclass Layer:\n    def __init__(self, w): self.w = np.asarray(w)\n    def forward(self, x): return x @ self.w",
    "def test():\n    layer = Layer([[1.0], [2.0]])\n    assert layer.forward(np.array([[1.0, 1.0]])).item() == 3 and layer.w.shape == (2, 1)",
)
add(
    "h argmax",
    "import numpy as np\ndef f(a): return np.argmax(a)",
    "def test(): assert f(np.array([1, 5, 2])) == 1 and isinstance(f(np.array([3])), (int, np.integer))",
)
add(
    "h generator of numpy",
    "def f(rng, n): return rng.normal(size=n)",
    "def test():\n    assert f(np.random.default_rng(0), 3).shape == (3,)\n    np.testing.assert_array_equal(f(np.random.default_rng(1), 2), np.random.default_rng(1).normal(size=2))",
)
add(
    "h raises of numpy",
    "import numpy as np\ndef f(a): return np.linalg.inv(a)",
    "def test():\n    with pytest.raises(np.linalg.LinAlgError):\n        f(np.zeros((2, 2)))",
)
add(
    "h nan",
    "import numpy as np\ndef f(a): return np.where(a < 0, np.nan, a)",
    "def test():\n    r = f(np.array([-1.0, 2.0]))\n    assert np.isnan(r[0]) and r[1] == 2 and np.isnan(r).sum() == 1",
)
add(
    "h filter a frame",
    PD + "def f(d, n): return d[d['age'] >= n].reset_index(drop=True)",
    PD
    + "def test():\n    r = f(pd.DataFrame({'age': [5, 30], 'n': ['a', 'b']}), 18)\n    assert r.shape == (1, 2) and r.loc[0, 'n'] == 'b' and r.equals(pd.DataFrame({'age': [30], 'n': ['b']}))",
)
add(
    "h merge",
    PD + "def f(a, b): return a.merge(b, on='k', how='left')",
    PD
    + "def test():\n    r = f(pd.DataFrame({'k': [1, 2]}), pd.DataFrame({'k': [1], 'v': ['x']}))\n    assert r['v'].isna().tolist() == [False, True]",
)
add(
    "h dates in a frame",
    PD + "def f(d): return d.set_index('t').resample('D')['v'].sum()",
    PD
    + "def test():\n    d = pd.DataFrame({'t': pd.to_datetime(['2024-01-01 01:00', '2024-01-01 02:00', '2024-01-02 00:00']), 'v': [1, 2, 3]})\n    s = f(d)\n    assert s.tolist() == [3, 3] and s.index[0] == pd.Timestamp('2024-01-01')",
)
add(
    "h drop in place",
    PD + "def f(d): d.dropna(inplace=True)",
    PD + "def test():\n    d = pd.DataFrame({'a': [1.0, None]})\n    f(d)\n    assert len(d) == 1",
)
add(
    "h pivot",
    PD + "def f(d): return d.pivot_table(index='a', columns='b', values='v', aggfunc='sum', fill_value=0)",
    PD
    + "def test():\n    r = f(pd.DataFrame({'a': [1, 1, 2], 'b': ['x', 'y', 'x'], 'v': [1, 2, 3]}))\n    assert r.loc[1, 'y'] == 2 and r.loc[2, 'y'] == 0",
)
add(
    "h categories",
    PD + "def f(s): return s.astype('category')",
    PD
    + "def test():\n    r = f(pd.Series(['a', 'b', 'a']))\n    assert r.dtype == 'category' and list(r.cat.categories) == ['a', 'b'] and r.tolist() == ['a', 'b', 'a']",
)
# -- held out: standard input
add(
    "h readlines",
    "import sys\ndef main():\n    lines = sys.stdin.readlines()\n    return [line.rstrip() for line in lines]",
    "def test(monkeypatch):\n    monkeypatch.setattr('sys.stdin', io.StringIO('a\\nb\\n'))\n    assert main() == ['a', 'b']",
)
add(
    "h stdin name imported",
    "from sys import stdin\ndef main(): return sum(map(int, stdin.read().split()))",
    "def test(monkeypatch):\n    monkeypatch.setattr(solution, 'stdin', io.StringIO('1 2'))\n    assert main() == 3",
)
add(
    "h grid",
    "import sys\ndef main():\n    h, w = map(int, input().split())\n    grid = [input() for _ in range(h)]\n    print(sum(row.count('#') for row in grid))",
    "@pytest.mark.parametrize('text, want', [('1 2\\n#.\\n', '1'), ('2 1\\n#\\n#\\n', '2')])\ndef test(text, want, monkeypatch, capsys):\n    monkeypatch.setattr('sys.stdin', io.StringIO(text))\n    main()\n    assert capsys.readouterr().out.strip() == want",
)
add(
    "h mixed reading",
    "import sys\ndef main():\n    n = int(input())\n    rest = sys.stdin.read().split()\n    return n, rest",
    "def test(monkeypatch):\n    monkeypatch.setattr('sys.stdin', io.StringIO('2\\nx y\\nz\\n'))\n    assert main() == (2, ['x', 'y', 'z'])",
)
add(
    "h buffer lines",
    "import sys\ndef main():\n    data = sys.stdin.buffer\n    n = int(data.readline())\n    return [int(data.readline()) for _ in range(n)]",
    "def test(monkeypatch):\n    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BytesIO(b'2\\n5\\n6\\n')))\n    assert main() == [5, 6]",
)
add(
    "h stdout write",
    "import sys\ndef main():\n    for line in sys.stdin:\n        sys.stdout.write(line.strip()[::-1] + '\\n')",
    "import contextlib\ndef test(monkeypatch):\n    monkeypatch.setattr('sys.stdin', io.StringIO('ab\\ncd\\n'))\n    out = io.StringIO()\n    with contextlib.redirect_stdout(out):\n        main()\n    assert out.getvalue() == 'ba\\ndc\\n'",
)
add(
    "h stdin as an argument",
    "import sys\ndef count(stream=sys.stdin): return len(stream.read().split())",
    "def test(): assert count(io.StringIO('a b')) == 2",
)
add("h script with input at import", "n = int(input())\nprint(n + 1)", "")
PROGRAMS["h script with input at import"] = (
    "n = int(input())\nprint(n + 1)\n",
    "import io, sys\ndef test(monkeypatch, capsys):\n    monkeypatch.setattr('sys.stdin', io.StringIO('4\\n'))\n    import solution\n    assert capsys.readouterr().out == '5\\n' and solution.n == 4\n",
)
# -- held out: what the harness itself calls
add(
    "h patch random.seed",
    "import random\ndef f(s):\n    random.seed(s)\n    return random.random()",
    "def test():\n    with patch('solution.random.seed') as m:\n        f(3)\n    m.assert_called_once_with(3)\n    assert f(1) == f(1)",
)
add(
    "h patch copy.deepcopy",
    "import copy\ndef f(x): return copy.deepcopy(x)",
    "def test():\n    with patch('solution.copy.deepcopy', return_value=9):\n        assert f([1]) == 9\n    assert f([1]) == [1]",
)
add(
    "h patch time.time and sleep",
    "import time\ndef wait(until):\n    n = 0\n    while time.time() < until:\n        time.sleep(1)\n        n += 1\n    return n",
    "def test(monkeypatch):\n    now = [0]\n    monkeypatch.setattr(solution.time, 'time', lambda: now[0])\n    monkeypatch.setattr(solution.time, 'sleep', lambda s: now.__setitem__(0, now[0] + s))\n    assert wait(3) == 3",
)
add(
    "h patch os functions",
    "import os\ndef f(p):\n    if os.path.exists(p):\n        os.remove(p)\n        return True\n    return False",
    "def test():\n    with patch('solution.os.path.exists', return_value=True), patch('solution.os.remove') as r:\n        assert f('/x') is True\n    r.assert_called_once_with('/x')",
)
add(
    "h patch traceback",
    "import traceback\ndef f():\n    try: 1 / 0\n    except ZeroDivisionError: return traceback.format_exc()",
    "def test():\n    with patch('solution.traceback.format_exc', return_value='tb'):\n        assert f() == 'tb'\n    assert 'ZeroDivisionError' in f()",
)
add(
    "h patch open",
    "def f(p):\n    with open(p) as s: return s.read()",
    "from unittest.mock import mock_open\ndef test():\n    with patch('solution.open', mock_open(read_data='hi'), create=True):\n        assert f('x') == 'hi'",
)
add(
    "h patch print",
    "def f(): print('x')",
    "def test():\n    with patch('solution.print', create=True) as p:\n        f()\n    p.assert_called_once_with('x')",
)
# -- held out: the module
add(
    "h getsource of a method",
    "class A:\n    def f(self):\n        return sorted([2, 1])\n    def g(self): pass",
    "import inspect\ndef test(): assert 'sorted' in inspect.getsource(A.f) and 'class A' in inspect.getsource(A)",
)
add(
    "h signature and doc",
    "def f(a, *, b: int = 2) -> int:\n    'Add.'\n    return a + b",
    "import inspect\ndef test():\n    s = inspect.signature(f)\n    assert list(s.parameters) == ['a', 'b'] and s.parameters['b'].default == 2 and inspect.getdoc(f) == 'Add.'",
)
add(
    "h inspect kinds",
    "def f(): pass\nclass C:\n    def m(self): pass\ndef g(): yield 1",
    "import inspect\ndef test(): assert inspect.isfunction(f) and inspect.isclass(C) and inspect.isgenerator(g()) and callable(C().m)",
)
add(
    "h names of the module",
    "def f(): pass\nX = 1\n__version__ = '1.2'",
    "def test(): assert hasattr(solution, 'f') and 'X' in dir(solution) and solution.__version__ == '1.2' and solution.__name__ == 'solution'",
)
add(
    "h import again",
    "import os\nMODE = os.environ.get('MODE', 'dev')",
    "import importlib\ndef test(monkeypatch):\n    assert solution.MODE == 'dev'\n    monkeypatch.setenv('MODE', 'prod')\n    importlib.reload(solution)\n    assert solution.MODE == 'prod'",
)
# -- held out: arguments of the library
add(
    "h shuffle with Random",
    "def f(xs, rng):\n    rng.shuffle(xs)\n    return rng.choice(xs)",
    "import random\ndef test():\n    xs, ys = [1, 2, 3], [1, 2, 3]\n    a, r = f(xs, random.Random(5)), random.Random(5)\n    r.shuffle(ys)\n    assert xs == ys and a == r.choice(ys)",
)
add(
    "h PriorityQueue",
    "def take(q): return [q.get_nowait() for _ in range(q.qsize())]",
    "from queue import PriorityQueue\ndef test():\n    q = PriorityQueue()\n    for i in (3, 1, 2): q.put(i)\n    assert take(q) == [1, 2, 3]",
)
add(
    "h logger",
    "def work(log):\n    log.warning('low %s', 3)",
    "import logging\ndef test(caplog):\n    work(logging.getLogger('a'))\n    assert 'low 3' in caplog.text",
)
add(
    "h match object",
    "def f(m): return m.group(1), m.start()",
    "import re\ndef test(): assert f(re.search('(b+)', 'abb')) == ('bb', 1)",
)
add(
    "h partial",
    "def f(p): return p(2) + p.args[0]",
    "import functools\ndef test(): assert f(functools.partial(pow, 3)) == 12",
)
add(
    "h nested namespaces",
    "def f(c): return c.db.host + ':' + str(c.db.port)",
    "from types import SimpleNamespace as N\ndef test(): assert f(N(db=N(host='h', port=1))) == 'h:1'",
)
add(
    "h thread and event",
    "import threading\ndef start(done):\n    threading.Thread(target=done.set).start()",
    "import threading\ndef test():\n    e = threading.Event()\n    start(e)\n    assert e.wait(5)",
)
add(
    "h StringIO writer",
    "import csv\ndef f(out, rows): csv.writer(out).writerows(rows)",
    "def test():\n    out = io.StringIO()\n    f(out, [[1, 'a']])\n    assert out.getvalue().split() == ['1,a']",
)
add(
    "h path and date",
    "def f(p, d): return p / f'{d:%Y}.txt'",
    "import datetime, pathlib\ndef test(): assert f(pathlib.Path('a'), datetime.date(2024, 1, 1)) == pathlib.Path('a/2024.txt')",
)
add(
    "h named tuple of the tests",
    "def f(p): return p.x + p[1], p._replace(x=0).x if False else 0",
    "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef test(): assert f(P(1, 2)) == (3, 0)",
)
# -- held out: errors, patterns, calls
add(
    "h chain of three",
    "class A(Exception): pass\nclass B(Exception): pass\ndef f():\n    try:\n        try: int('x')\n        except ValueError as e: raise A('a') from e\n    except A as e: raise B('b') from e",
    "def test():\n    with pytest.raises(B) as info: f()\n    assert isinstance(info.value.__cause__, A) and isinstance(info.value.__cause__.__cause__, ValueError)",
)
add(
    "h notes of an own error",
    "class E(Exception): pass\ndef f(n):\n    e = E('e')\n    for i in range(n): e.add_note(f'n{i}')\n    raise e",
    "def test():\n    with pytest.raises(E) as info: f(2)\n    assert info.value.__notes__ == ['n0', 'n1']",
)
add(
    "h match nested",
    P,
    "def area(s):\n    match s:\n        case (P(x=0, y=0), P(x=w, y=h)): return w * h\n        case P(): return 0\ndef test(): assert area((P(0), P(2, 3))) == 6 and area(P(1)) == 0",
)
add(
    "h class in a registry",
    "class A: pass\nclass B(A): pass\nREG = {'a': A, 'b': B}",
    "def test(): assert REG['b'] is B and issubclass(REG['b'], A) and type(REG['a']()) is A and isinstance(B, type)",
)
add(
    "h many method calls",
    "class C:\n    def __init__(self): self.n = 0\n    def inc(self): self.n += 1",
    "def test():\n    c = C()\n    for _ in range(2000): c.inc()\n    assert c.n == 2000",
)
add(
    "h a tree",
    "class T:\n    def __init__(self, v): self.v, self.l, self.r = v, None, None\ndef build(lo, hi):\n    if lo > hi: return None\n    m = (lo + hi) // 2\n    t = T(m)\n    t.l, t.r = build(lo, m - 1), build(m + 1, hi)\n    return t",
    "def walk(t): return walk(t.l) + [t.v] + walk(t.r) if t else []\ndef test(): assert walk(build(1, 400)) == list(range(1, 401))",
)
add(
    "h objects in a loop",
    "class Item:\n    def __init__(self, n): self.name, self.price = f'i{n}', n\ndef items(n): return [Item(i) for i in range(n)]",
    "def test():\n    xs = items(500)\n    assert [x.price for x in xs] == list(range(500)) and all(x.name == f'i{x.price}' for x in xs)",
)
add(
    "h vectors and numbers",
    "class V:\n    def __init__(self, x, y): self.x, self.y = x, y\n    def __add__(self, o): return V(self.x + o.x, self.y + o.y)\n    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n    def length(self): return (self.x ** 2 + self.y ** 2) ** 0.5",
    "def test():\n    v = V(1, 2) + V(2, 2)\n    assert v == V(3, 4) and v.length() == 5 and v.x == 3",
)
HELD_OUT = [*PROGRAMS][NUM_DEVELOPMENT:]

# In a process of its own; see "What differs" in t2g/sandbox/README.md.
REFUSED = {"doctest", "h inspect kinds", "h thread and event", "h class in a registry"}
