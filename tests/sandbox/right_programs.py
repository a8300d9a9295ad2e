# ruff: noqa: E501 each program is one text
"""Right programs with ordinary tests, as people write them for pytest: name -> (solution, tests).

Each passes under pytest in one process. `TOGETHER` names those that share more with their tests than proxies carry.
"""

PROGRAMS: dict[str, tuple[str, str]] = {}


def add(name: str, solution: str, tests: str) -> None:
    """The tests start with the usual imports."""
    head = "import pytest\nimport solution\nfrom solution import *\n"
    PROGRAMS[name] = (solution.strip("\n") + "\n", head + tests.strip("\n") + "\n")


# -- what half of the list is: features of pytest and unittest
WARN = "import warnings\ndef old(x):\n    warnings.warn('old is deprecated', DeprecationWarning)\n    return x\n"
add(
    "pytest.warns",
    WARN,
    "def test():\n    with pytest.warns(DeprecationWarning, match='deprecated'):\n        assert old(1) == 1",
)
add("pytest.deprecated_call", WARN, "def test():\n    with pytest.deprecated_call():\n        old(1)")
add(
    "recwarn",
    WARN,
    "def test(recwarn):\n    old(1)\n    assert len(recwarn) == 1 and 'deprecated' in str(recwarn.pop().message)",
)
add(
    "warnings.catch_warnings",
    WARN,
    "import warnings\ndef test():\n    with warnings.catch_warnings(record=True) as seen:\n        warnings.simplefilter('always')\n"
    "        old(2)\n    assert seen[0].category is DeprecationWarning",
)
add(
    "filterwarnings error",
    WARN,
    "@pytest.mark.filterwarnings('error')\ndef test():\n    with pytest.raises(DeprecationWarning):\n        old(1)",
)
add(
    "assertWarns",
    WARN,
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with self.assertWarns(DeprecationWarning):\n            old(1)",
)
CONFIG = "import os\ndef home():\n    return os.environ.get('APP_HOME', 'none')\nSETTINGS = {'debug': False}\ndef debug():\n    return SETTINGS['debug']\n"
add(
    "monkeypatch.setenv",
    CONFIG,
    "def test(monkeypatch):\n    monkeypatch.setenv('APP_HOME', '/x')\n    assert home() == '/x'",
)
add(
    "monkeypatch.delenv",
    CONFIG,
    "def test(monkeypatch):\n    monkeypatch.delenv('APP_HOME', raising=False)\n    assert home() == 'none'",
)
add(
    "monkeypatch.setitem",
    CONFIG,
    "def test(monkeypatch):\n    monkeypatch.setitem(solution.SETTINGS, 'debug', True)\n    assert debug() is True",
)
add(
    "monkeypatch.setattr on the module",
    CONFIG,
    "def test(monkeypatch):\n    monkeypatch.setattr(solution, 'home', lambda: 'patched')\n    assert solution.home() == 'patched'\ndef test_undone():\n    assert solution.home() == 'none'",
)
add(
    "monkeypatch.setattr on a class",
    "class A:\n    def f(self): return 1\ndef g(): return A().f()\n",
    "def test(monkeypatch):\n    monkeypatch.setattr(A, 'f', lambda self: 5)\n    assert g() == 5\ndef test_undone():\n    assert g() == 1",
)
add(
    "monkeypatch.chdir",
    "def read(name):\n    with open(name) as f:\n        return f.read()\n",
    "def test(tmp_path, monkeypatch):\n    (tmp_path / 'a.txt').write_text('hi')\n    monkeypatch.chdir(tmp_path)\n    assert read('a.txt') == 'hi'",
)
add(
    "monkeypatch.context",
    CONFIG,
    "def test(monkeypatch):\n    with monkeypatch.context() as m:\n        m.setattr(solution, 'SETTINGS', {'debug': 3})\n        assert debug() == 3\n    assert debug() is False",
)
HELLO = "import sys\ndef hello(name):\n    print(f'hello {name}')\ndef fail():\n    print('bad', file=sys.stderr)\n"
add("capsys", HELLO, "def test(capsys):\n    hello('bob')\n    assert capsys.readouterr().out == 'hello bob\\n'")
add(
    "capfd",
    HELLO,
    "def test(capfd):\n    hello('bob')\n    out, err = capfd.readouterr()\n    assert out == 'hello bob\\n' and err == ''",
)
add(
    "capsys disabled",
    HELLO,
    "def test(capsys):\n    with capsys.disabled():\n        hello('a')\n    hello('b')\n    assert capsys.readouterr().out == 'hello b\\n'",
)
add(
    "redirect_stdout",
    HELLO,
    "import io, contextlib\ndef test():\n    out = io.StringIO()\n    with contextlib.redirect_stdout(out):\n        hello('x')\n    assert out.getvalue().strip() == 'hello x'",
)
add("capsys of stderr", HELLO, "def test(capsys):\n    fail()\n    assert capsys.readouterr().err == 'bad\\n'")
SQUARE = "def square(x):\n    return x * x\n"
add(
    "request.param",
    SQUARE,
    "@pytest.fixture(params=[1, 2, 3])\ndef n(request):\n    return request.param\ndef test(n):\n    assert square(n) == n ** 2",
)
add(
    "request.getfixturevalue",
    SQUARE,
    "@pytest.fixture\ndef two():\n    return 2\n@pytest.mark.parametrize('name', ['two'])\ndef test(request, name):\n    assert square(request.getfixturevalue(name)) == 4",
)
add("request.node", SQUARE, "def test_it(request):\n    assert request.node.name == 'test_it' and square(2) == 4")
add(
    "parametrised fixtures with ids",
    SQUARE,
    "@pytest.fixture(params=[(2, 4), (3, 9)], ids=['two', 'three'])\ndef case(request):\n    return request.param\ndef test(case):\n    assert square(case[0]) == case[1]",
)
add(
    "indirect parametrize",
    SQUARE,
    "@pytest.fixture\ndef n(request):\n    return request.param + 1\n@pytest.mark.parametrize('n, want', [(1, 4), (2, 9)], indirect=['n'])\ndef test(n, want):\n    assert square(n) == want",
)
add(
    "fixture scopes",
    SQUARE,
    "made = []\n@pytest.fixture(scope='module')\ndef shared():\n    made.append(1)\n    yield 3\ndef test_a(shared):\n    assert square(shared) == 9\ndef test_b(shared):\n    assert made == [1]",
)
add(
    "fixture finalizers",
    SQUARE,
    "log = []\n@pytest.fixture\ndef n(request):\n    request.addfinalizer(lambda: log.append('end'))\n    return 2\ndef test_a(n):\n    assert square(n) == 4 and log == []\ndef test_b():\n    assert log == ['end']",
)
add(
    "autouse and usefixtures",
    SQUARE,
    "state = {}\n@pytest.fixture(autouse=True)\ndef prepare():\n    state['n'] = 4\n    yield\n    state.clear()\n@pytest.fixture\ndef more():\n    state['m'] = 5\n@pytest.mark.usefixtures('more')\ndef test():\n    assert square(state['n']) == 16 and state['m'] == 5",
)
add(
    "xfail",
    SQUARE,
    "@pytest.mark.xfail(reason='known')\ndef test_a():\n    assert square(2) == 5\ndef test_b():\n    assert square(2) == 4",
)
add(
    "expectedFailure",
    SQUARE,
    "import unittest\nclass T(unittest.TestCase):\n    @unittest.expectedFailure\n    def test_a(self):\n        self.assertEqual(square(2), 5)\n    def test_b(self):\n        self.assertEqual(square(2), 4)",
)
add(
    "skipif and importorskip",
    SQUARE,
    "import sys\n@pytest.mark.skipif(sys.version_info >= (3,), reason='x')\ndef test_a():\n    assert False\ndef test_b():\n    pytest.importorskip('no_such_module')\ndef test_c():\n    assert square(3) == 9",
)
LOGS = "import logging\nlogger = logging.getLogger('app')\ndef work():\n    logger.warning('low on %s', 'fuel')\n    return 1\n"
add(
    "assertLogs",
    LOGS,
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with self.assertLogs('app', level='WARNING') as seen:\n            work()\n        self.assertIn('low on fuel', seen.output[0])",
)
add(
    "caplog",
    LOGS,
    "import logging\ndef test(caplog):\n    with caplog.at_level(logging.INFO):\n        work()\n    assert 'low on fuel' in caplog.text",
)
COUNTER = "import threading\nclass Counter:\n    def __init__(self):\n        self.n = 0\n        self.lock = threading.Lock()\n    def add(self):\n        with self.lock:\n            self.n += 1\n"
add(
    "threads in tests",
    COUNTER,
    "import threading\ndef test():\n    c = Counter()\n    threads = [threading.Thread(target=lambda: [c.add() for _ in range(20)]) for _ in range(4)]\n    for t in threads: t.start()\n    for t in threads: t.join()\n    assert c.n == 80",
)
add(
    "a pool in tests",
    SQUARE,
    "from concurrent.futures import ThreadPoolExecutor\ndef test():\n    with ThreadPoolExecutor(4) as pool:\n        assert list(pool.map(square, range(10))) == [n * n for n in range(10)]",
)
add(
    "threads in the solution",
    "from concurrent.futures import ThreadPoolExecutor\ndef both(f, xs):\n    with ThreadPoolExecutor(3) as pool:\n        return list(pool.map(f, xs))\n",
    "def test():\n    assert both(lambda x: x + 1, [1, 2, 3]) == [2, 3, 4]",
)
add(
    "Decimal in approx",
    "from decimal import Decimal\ndef third(x):\n    return Decimal(x) / 3\n",
    "from decimal import Decimal\ndef test():\n    assert third(1) == pytest.approx(Decimal('0.3333333'), rel=Decimal('1e-5'))",
)
add(
    "approx of everything",
    "def half(xs):\n    return [x / 2 for x in xs]\n",
    "def test():\n    assert half([1, 3]) == pytest.approx([0.5, 1.5]) and {'a': half([1])[0]} == pytest.approx({'a': 0.5})\n    assert half([1])[0] != pytest.approx(0.6) and half([2])[0] == pytest.approx(1, abs=1e-3)",
)
add(
    "raises match and value",
    "def parse(s):\n    if not s:\n        raise ValueError('empty input', 7)\n    return int(s)\n",
    "def test():\n    with pytest.raises(ValueError, match='empty') as info:\n        parse('')\n    assert info.value.args[1] == 7 and info.type is ValueError\n    with pytest.raises((TypeError, ValueError)):\n        parse('x')",
)
add(
    "exception groups",
    "def many():\n    raise ExceptionGroup('all', [ValueError('a'), TypeError('b')])\n",
    "def test():\n    with pytest.raises(ExceptionGroup) as info:\n        many()\n    assert len(info.value.exceptions) == 2",
)
add(
    "subTest",
    SQUARE,
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        for i in range(4):\n            with self.subTest(i=i):\n                self.assertEqual(square(i), i * i)",
)
add(
    "setUpClass and tearDown",
    SQUARE,
    "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): cls.n = 3\n    def setUp(self): self.m = self.n + 1\n    def tearDown(self): del self.m\n    def test(self): self.assertEqual(square(self.m), 16)\n    def test_twice(self): self.assertEqual(square(self.m), 16)",
)
add(
    "setup_module",
    SQUARE,
    "def setup_module(module):\n    module.n = 6\ndef teardown_module():\n    pass\ndef test():\n    assert square(n) == 36",
)
add(
    "assertCountEqual and friends",
    "def keys(d):\n    return list(d)\n",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertCountEqual(keys({'a': 1, 'b': 2}), ['b', 'a'])\n        self.assertIsInstance(keys({}), list)\n        self.assertDictEqual(dict.fromkeys(keys({'x': 1})), {'x': None})\n        self.assertRegex(keys({'abc': 1})[0], '^a')",
)
add(
    "nested test classes",
    SQUARE,
    "class TestOuter:\n    n = 2\n    class TestInner:\n        def test(self):\n            assert square(3) == 9\n    def test(self):\n        assert square(self.n) == 4",
)
add(
    "parametrize of a class",
    SQUARE,
    "@pytest.mark.parametrize('n', [1, 2])\nclass TestAll:\n    def test(self, n):\n        assert square(n) == n * n",
)
add(
    "tmp_path_factory and tmpdir",
    "def save(path, text):\n    with open(path, 'w') as f:\n        f.write(text)\n",
    "def test(tmp_path_factory, tmpdir):\n    p = tmp_path_factory.mktemp('x') / 'f'\n    save(p, 'hi')\n    assert p.read_text() == 'hi'\n    save(str(tmpdir.join('g')), 'ho')\n    assert tmpdir.join('g').read() == 'ho'",
)
add(
    "doctest style asserts",
    "def greet(name='you'):\n    '''Say hello.'''\n    return f'hello {name}'\n",
    "def test():\n    assert greet.__doc__ == 'Say hello.' and greet.__name__ == 'greet' and greet() == 'hello you'",
)
add(
    "pytest.fail and raises none",
    SQUARE,
    "def test():\n    try:\n        square(2)\n    except Exception:\n        pytest.fail('raised')",
)

# -- the other half: what solution and tests share
add(
    "patch builtins.print",
    HELLO,
    "from unittest.mock import patch\ndef test():\n    with patch('builtins.print') as p:\n        hello('x')\n    p.assert_called_once_with('hello x')",
)
add(
    "patch sys.stdout",
    HELLO,
    "import io\nfrom unittest.mock import patch\ndef test():\n    with patch('sys.stdout', new=io.StringIO()) as out:\n        hello('x')\n    assert out.getvalue() == 'hello x\\n'",
)
add(
    "patch builtins.input",
    "def ask():\n    return input('name? ').title()\n",
    "from unittest.mock import patch\ndef test():\n    with patch('builtins.input', return_value='bob'):\n        assert ask() == 'Bob'",
)
add(
    "input by side_effect",
    "def ask():\n    return [int(input()) for _ in range(2)]\n",
    "from unittest.mock import patch\ndef test():\n    with patch('builtins.input', side_effect=['1', '2']):\n        assert ask() == [1, 2]",
)
add(
    "patch builtins.open",
    "def read(p):\n    with open(p) as f:\n        return f.read()\n",
    "from unittest.mock import mock_open, patch\ndef test():\n    with patch('builtins.open', mock_open(read_data='hi')):\n        assert read('nothing') == 'hi'",
)
add("os.environ", CONFIG, "import os\ndef test():\n    os.environ['APP_HOME'] = '/y'\n    assert home() == '/y'")
add(
    "patch.dict os.environ",
    CONFIG,
    "import os\nfrom unittest.mock import patch\ndef test():\n    with patch.dict(os.environ, {'APP_HOME': '/z'}):\n        assert home() == '/z'",
)
add(
    "random.seed",
    "import random\ndef rolls(n):\n    return [random.randint(1, 6) for _ in range(n)]\n",
    "import random\ndef test():\n    random.seed(1)\n    first = rolls(5)\n    random.seed(1)\n    assert rolls(5) == first == (random.seed(1), [random.randint(1, 6) for _ in range(5)])[1]",
)
add(
    "patch random.randint",
    "import random\ndef roll():\n    return random.randint(1, 6)\n",
    "from unittest.mock import patch\ndef test():\n    with patch('solution.random.randint', return_value=4):\n        assert roll() == 4",
)
add(
    "patch random of the library",
    "import random\ndef roll():\n    return random.choice([1, 2])\n",
    "from unittest.mock import patch\ndef test():\n    with patch('random.choice', return_value=9):\n        assert roll() == 9",
)
add(
    "patch time.sleep",
    "import time\ndef slow():\n    time.sleep(99)\n    return 1\n",
    "from unittest.mock import patch\ndef test():\n    with patch('solution.time.sleep') as s:\n        assert slow() == 1\n    s.assert_called_once_with(99)",
)
add(
    "patch time.time",
    "import time\ndef now():\n    return int(time.time())\n",
    "from unittest.mock import patch\ndef test():\n    with patch('time.time', return_value=12.5):\n        assert now() == 12",
)
add(
    "Mock arguments",
    "def notify(client, users):\n    for u in users:\n        client.send(u, subject='hi')\n    return client.count()\n",
    "from unittest.mock import Mock, call\ndef test():\n    c = Mock()\n    c.count.return_value = 2\n    assert notify(c, ['a', 'b']) == 2\n    assert c.send.call_args_list == [call('a', subject='hi'), call('b', subject='hi')]",
)
add(
    "MagicMock arguments",
    "def total(box):\n    return len(box) + box['x']\n",
    "from unittest.mock import MagicMock\ndef test():\n    m = MagicMock()\n    m.__len__.return_value = 3\n    m.__getitem__.return_value = 4\n    assert total(m) == 7\n    m.__getitem__.assert_called_with('x')",
)
add(
    "Mock callbacks",
    "def each(xs, f):\n    for x in xs:\n        f(x)\n",
    "from unittest.mock import Mock\ndef test():\n    f = Mock()\n    each([1, 2], f)\n    assert f.call_count == 2",
)
add(
    "Mock with side_effect",
    "def retry(f):\n    try:\n        return f()\n    except OSError:\n        return f()\n",
    "from unittest.mock import Mock\ndef test():\n    f = Mock(side_effect=[OSError('x'), 5])\n    assert retry(f) == 5 and f.call_count == 2",
)
add(
    "inspect.signature",
    "def area(w: int, h: int = 2, *, unit: str = 'cm') -> int:\n    return w * h\n",
    "import inspect\ndef test():\n    s = inspect.signature(area)\n    assert list(s.parameters) == ['w', 'h', 'unit'] and s.parameters['h'].default == 2\n    assert s.parameters['unit'].kind is inspect.Parameter.KEYWORD_ONLY and s.parameters['w'].annotation is int",
)
add(
    "functools.wraps on a test function",
    "import functools\ndef twice(f):\n    @functools.wraps(f)\n    def inner(*a):\n        return f(f(*a))\n    return inner\n",
    "def test():\n    @twice\n    def plus(x):\n        'adds one'\n        return x + 1\n    assert plus(1) == 3 and plus.__name__ == 'plus' and plus.__doc__ == 'adds one'",
)
add(
    "copy.deepcopy",
    "class Node:\n    def __init__(self, v):\n        self.v = v\n        self.kids = []\n",
    "import copy\ndef test():\n    a = Node(1)\n    b = copy.deepcopy(a)\n    b.v = 2\n    assert a.v == 1 and b.v == 2 and b is not a and copy.copy(a).v == 1",
)
DATA = "from dataclasses import dataclass, field\n@dataclass\nclass P:\n    x: int\n    tags: list = field(default_factory=list)\n"
add(
    "is_dataclass",
    DATA,
    "import dataclasses\ndef test():\n    assert dataclasses.is_dataclass(P) and dataclasses.is_dataclass(P(1)) and P(1) == P(1)",
)
add(
    "dataclasses.asdict",
    DATA,
    "import dataclasses\ndef test():\n    assert dataclasses.asdict(P(1, ['a'])) == {'x': 1, 'tags': ['a']}",
)
add("dataclasses.replace", DATA, "import dataclasses\ndef test():\n    assert dataclasses.replace(P(1), x=5).x == 5")
add(
    "ZoneInfo",
    "from datetime import datetime\nfrom zoneinfo import ZoneInfo\ndef zone():\n    return ZoneInfo('UTC')\ndef noon():\n    return datetime(2020, 1, 1, 12, tzinfo=ZoneInfo('UTC'))\n",
    "from zoneinfo import ZoneInfo\nfrom datetime import datetime\ndef test():\n    assert zone() == ZoneInfo('UTC') and noon() == datetime(2020, 1, 1, 12, tzinfo=ZoneInfo('UTC'))",
)
add(
    "uuid.UUID",
    "import uuid\ndef same(u):\n    return uuid.UUID(str(u))\ndef fresh():\n    return uuid.uuid4()\n",
    "import uuid\ndef test():\n    u = uuid.uuid4()\n    assert same(u) == u and isinstance(fresh(), uuid.UUID) and fresh().version == 4",
)
add(
    "datetime.time",
    "import datetime as dt\ndef later(t):\n    return dt.time(t.hour + 1, t.minute)\n",
    "import datetime as dt\ndef test():\n    assert later(dt.time(3, 30)) == dt.time(4, 30) and isinstance(later(dt.time(1)), dt.time)",
)
add(
    "array",
    "from array import array\ndef double(a):\n    return array(a.typecode, [2 * x for x in a])\n",
    "from array import array\ndef test():\n    assert double(array('i', [1, 2])) == array('i', [2, 4])",
)
add(
    "dates and deltas",
    "from datetime import date, timedelta\ndef week(d):\n    return [d + timedelta(days=n) for n in range(7)]\n",
    "from datetime import date\ndef test():\n    w = week(date(2024, 2, 26))\n    assert w[3] == date(2024, 2, 29) and (w[-1] - w[0]).days == 6",
)
add(
    "patch datetime",
    "import datetime\ndef year():\n    return datetime.date.today().year\n",
    "import datetime\nfrom unittest.mock import patch\ndef test():\n    with patch('solution.datetime') as d:\n        d.date.today.return_value = datetime.date(1999, 1, 1)\n        assert year() == 1999",
)
add(
    "patch a helper",
    "def fetch(u): raise OSError\ndef title(u): return fetch(u).upper()\n",
    "from unittest.mock import patch\n@patch('solution.fetch', return_value='abc')\ndef test(f):\n    assert title('x') == 'ABC'\n    f.assert_called_once_with('x')",
)
add(
    "patch.object of a class",
    "class Api:\n    def get(self): raise OSError\ndef use(): return Api().get()\n",
    "from unittest.mock import patch\ndef test():\n    with patch.object(Api, 'get', return_value=3):\n        assert use() == 3",
)
add(
    "mocker by hand on a constant",
    "LIMIT = 3\ndef cut(xs): return xs[:LIMIT]\n",
    "def test(monkeypatch):\n    monkeypatch.setattr('solution.LIMIT', 1)\n    assert cut([1, 2]) == [1]",
)
add(
    "abstract base under the tests",
    "import abc\nclass Shape(abc.ABC):\n    @abc.abstractmethod\n    def area(self): ...\n    def twice(self): return 2 * self.area()\n",
    "def test():\n    class Sq(Shape):\n        def area(self): return 4\n    assert Sq().twice() == 8\n    with pytest.raises(TypeError):\n        Shape()",
)
add(
    "asyncio.run",
    "import asyncio\nasync def double(x):\n    await asyncio.sleep(0)\n    return 2 * x\n",
    "import asyncio\ndef test():\n    assert asyncio.run(double(2)) == 4",
)
add(
    "IsolatedAsyncioTestCase",
    "async def one(): return 1\n",
    "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test(self):\n        self.assertEqual(await one(), 1)",
)
add(
    "pickle of an object",
    "class P:\n    def __init__(self, x): self.x = x\n",
    "import pickle\ndef test():\n    assert pickle.loads(pickle.dumps(P(3))).x == 3",
)
add(
    "generators are generators",
    "def up(n):\n    for i in range(n):\n        yield i\n",
    "import types\ndef test():\n    assert isinstance(up(2), types.GeneratorType) and list(up(3)) == [0, 1, 2]",
)
add(
    "generator.send",
    "def echo():\n    x = yield\n    while True:\n        x = yield x\n",
    "def test():\n    g = echo()\n    next(g)\n    assert g.send(1) == 1 and g.send(2) == 2",
)

# -- plain programs, as most are
add(
    "fizzbuzz",
    "def fizzbuzz(n):\n    return ['FizzBuzz' if i % 15 == 0 else 'Fizz' if i % 3 == 0 else 'Buzz' if i % 5 == 0 else str(i) for i in range(1, n + 1)]\n",
    "def test():\n    assert fizzbuzz(5) == ['1', '2', 'Fizz', '4', 'Buzz'] and fizzbuzz(15)[-1] == 'FizzBuzz'",
)
add(
    "a stack",
    "class Stack:\n    def __init__(self): self._items = []\n    def push(self, x): self._items.append(x)\n    def pop(self):\n        if not self._items: raise IndexError('empty')\n        return self._items.pop()\n    def __len__(self): return len(self._items)\n",
    "@pytest.fixture\ndef stack():\n    s = Stack()\n    s.push(1)\n    return s\ndef test(stack):\n    assert len(stack) == 1 and stack.pop() == 1 and not stack\n    with pytest.raises(IndexError, match='empty'):\n        stack.pop()",
)
add(
    "a linked list of the tests",
    "def reverse(head):\n    prev = None\n    while head:\n        head.next, prev, head = prev, head, head.next\n    return prev\n",
    "class Node:\n    def __init__(self, v, next=None):\n        self.v, self.next = v, next\ndef test():\n    r = reverse(Node(1, Node(2)))\n    assert (r.v, r.next.v, r.next.next) == (2, 1, None)",
)
add(
    "sorted in place",
    "def bubble(xs):\n    xs.sort()\n",
    "def test():\n    xs = [3, 1, 2]\n    assert bubble(xs) is None and xs == [1, 2, 3]",
)
add(
    "vectors",
    "class V:\n    def __init__(self, x, y): self.x, self.y = x, y\n    def __add__(self, o): return V(self.x + o.x, self.y + o.y)\n    def __mul__(self, k): return V(self.x * k, self.y * k)\n    __rmul__ = __mul__\n    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n    def __repr__(self): return f'V({self.x}, {self.y})'\n    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5\n",
    "def test():\n    assert V(1, 2) + V(1, 1) == V(2, 3) and V(1, 2) * 2 == 2 * V(1, 2) and repr(V(0, 1)) == 'V(0, 1)'\n    assert abs(V(3, 4)) == 5",
)
add(
    "named tuples and enums",
    "import enum\nfrom typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int = 0\nclass Color(enum.Enum):\n    RED = 'r'\n",
    "def test():\n    assert P(1) == (1, 0) and P(1)._replace(y=2).y == 2 and Color('r') is Color.RED and Color.RED.value == 'r'\n    assert [c.name for c in Color] == ['RED']",
)
add(
    "own exceptions",
    "class AppError(Exception):\n    def __init__(self, code):\n        super().__init__(f'code {code}')\n        self.code = code\nclass NotFound(AppError): pass\ndef find(x):\n    raise NotFound(x)\n",
    "def test():\n    with pytest.raises(AppError) as info:\n        find(404)\n    assert info.value.code == 404 and str(info.value) == 'code 404' and isinstance(info.value, NotFound)",
)
add(
    "a context manager",
    "from contextlib import contextmanager\nlog = []\n@contextmanager\ndef tag(name):\n    log.append(name)\n    yield name.upper()\n    log.append('end')\n",
    "def test():\n    with tag('a') as t:\n        assert t == 'A'\n    assert solution.log == ['a', 'end']",
)
add(
    "lru_cache",
    "from functools import lru_cache\n@lru_cache(maxsize=None)\ndef fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "def test():\n    fib.cache_clear()\n    assert fib(30) == 832040 and fib.cache_info().hits > 0",
)
add(
    "a decorator that counts",
    "def counted(f):\n    def inner(*a, **k):\n        inner.calls += 1\n        return f(*a, **k)\n    inner.calls = 0\n    return inner\n",
    "def test():\n    @counted\n    def f(x): return x\n    assert f(1) == 1 and f(x=2) == 2 and f.calls == 2",
)
add(
    "json and files",
    "import json\ndef save(path, data):\n    with open(path, 'w') as f:\n        json.dump(data, f)\ndef load(path):\n    with open(path) as f:\n        return json.load(f)\n",
    "import json\ndef test(tmp_path):\n    p = tmp_path / 'a.json'\n    save(p, {'x': [1, None]})\n    assert json.loads(p.read_text()) == load(p) == {'x': [1, None]}\n    with pytest.raises(FileNotFoundError):\n        load(tmp_path / 'none')",
)
add(
    "numpy in the solution",
    "import numpy as np\ndef mean(xs): return float(np.mean(xs))\ndef norm(xs): return np.linalg.norm(xs)\n",
    "def test():\n    assert mean([1, 2, 3]) == 2.0 and norm([3, 4]) == pytest.approx(5)",
)
add(
    "numpy arrays",
    "import numpy as np\ndef double(a): return a * 2\n",
    "import numpy as np\ndef test():\n    assert np.array_equal(double(np.array([1, 2])), np.array([2, 4]))",
)
add(
    "matrices",
    "def transpose(m): return [list(r) for r in zip(*m)]\n",
    "@pytest.mark.parametrize('m, t', [([[1, 2]], [[1], [2]]), ([[1, 2], [3, 4]], [[1, 3], [2, 4]])])\ndef test(m, t):\n    assert transpose(m) == t and transpose(transpose(m)) == m",
)
add(
    "words",
    "from collections import Counter\ndef top(text, n): return Counter(text.lower().split()).most_common(n)\n",
    "def test():\n    assert top('a b A', 1) == [('a', 2)] and top('', 3) == []",
)
add(
    "type checks",
    "def f(x): return {'a': [x]}\nclass A: pass\ndef make(): return A()\n",
    "def test():\n    assert isinstance(f(1), dict) and type(f(1)['a']) is list and type(make()) is A and isinstance(make(), A)",
)
add(
    "iterators",
    "class Up:\n    def __init__(self, n): self.n = n\n    def __iter__(self):\n        self.i = 0\n        return self\n    def __next__(self):\n        if self.i >= self.n: raise StopIteration\n        self.i += 1\n        return self.i\n",
    "def test():\n    assert list(Up(3)) == [1, 2, 3] and sum(Up(4)) == 10\n    it = iter(Up(1))\n    assert next(it) == 1\n    with pytest.raises(StopIteration):\n        next(it)",
)
add(
    "sequences by index",
    "class Row:\n    def __init__(self, *xs): self.xs = xs\n    def __len__(self): return len(self.xs)\n    def __getitem__(self, i): return self.xs[i]\n",
    "def test():\n    assert list(Row(1, 2)) == [1, 2] and 2 in Row(1, 2) and Row(1, 2)[-1] == 2 and list(Row()) == []",
)
add(
    "properties and class methods",
    "class T:\n    def __init__(self, c): self.c = c\n    @property\n    def f(self): return self.c * 9 / 5 + 32\n    @f.setter\n    def f(self, v): self.c = (v - 32) * 5 / 9\n    @classmethod\n    def boiling(cls): return cls(100)\n    @staticmethod\n    def zero(): return 0\n",
    "def test():\n    t = T.boiling()\n    assert t.f == 212 and T.zero() == 0\n    t.f = 32\n    assert t.c == 0\n    with pytest.raises(AttributeError):\n        t.nothing",
)
add(
    "big numbers",
    "def fact(n): return 1 if n < 2 else n * fact(n - 1)\n",
    "import math\ndef test():\n    assert fact(50) == math.factorial(50)\n    with pytest.raises(RecursionError):\n        fact(10 ** 5)",
)

TOGETHER = {
    "monkeypatch.setitem", "monkeypatch.setattr on a class", "MagicMock arguments", "patch builtins.print",
    "patch builtins.open", "patch random of the library", "patch time.time", "dataclasses.asdict",
    "dataclasses.replace", "abstract base under the tests", "asyncio.run", "IsolatedAsyncioTestCase",
    "pickle of an object",
}  # fmt: skip
