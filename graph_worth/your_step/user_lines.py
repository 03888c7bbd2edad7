"""Find lines in the user's file: a name is changed, an object is made, random numbers are drawn."""

import ast
import dis
import linecache
import re
from pathlib import Path

_CHANGING = ("append", "add", "pop", "update", "extend", "insert", "clear", "remove", "copy_", "lerp_", "add_", "mul_")
# Functions of numbers that give numbers.
_PURE = {"max", "min", "abs", "round", "float", "int"}
_DRAWING = {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal", "normal_"}
_DRAWING |= {"uniform_", "random_", "bernoulli", "bernoulli_", "exponential_", "multinomial", "dropout", "sample"}
_KEY = re.compile(r"\[([^\[\]]+)\]$")


class Source:
    """A file of the user's code."""

    def __init__(self, path: Path):
        self.path = path
        linecache.checkcache(str(path))
        # A notebook's cells are no files.
        self._nodes = list(ast.walk(ast.parse("".join(linecache.getlines(str(path))))))

    def at(self, line: int | None) -> str:
        """Return FILE:LINE, or the file where there is no line."""
        return f"{self.path}:{line}" if line else str(self.path)

    def changed(self, name: str) -> int | None:
        """Return the last line that assigns to the last part of a name such as `self.count`, or calls what changes it.

        Lines in functions inside of others count before those in the file's own code and in __init__.
        """
        scopes = [scope for scope in self._nodes if isinstance(scope, (ast.FunctionDef, ast.ClassDef, ast.Lambda))]
        changes = []
        for node in self._nodes:
            if isinstance(node, (ast.stmt, ast.expr)) and _changes(node, last_part(name)):
                line = node.lineno
                around = [scope for scope in scopes if scope.lineno <= line <= (scope.end_lineno or scope.lineno)]
                is_in_init = any(getattr(scope, "name", "") == "__init__" for scope in around)
                changes.append((not is_in_init, len(around), line))
        return max(changes)[2] if changes else None

    def sets_item(self, key: str) -> int | None:
        """Return the last line that sets an item of this constant name, as in group["lr"] = 0.1."""
        targets = [target for node in self._nodes if isinstance(node, ast.Assign) for target in node.targets]
        targets += [node.target for node in self._nodes if isinstance(node, ast.AugAssign)]
        items = [target for target in targets if isinstance(target, ast.Subscript)]
        return max((item.lineno for item in items if getattr(item.slice, "value", None) == key), default=None)

    def branches(self, name: str) -> list[int]:
        """Return the lines of branches and loops whose condition reads the last part of a name."""
        kinds = (ast.If, ast.IfExp, ast.While)
        tests = [node.test for node in self._nodes if isinstance(node, kinds)]
        return [test.lineno for test in tests if any(_word(node) == last_part(name) for node in ast.walk(test))]

    def reads(self, name: str, code, is_its, changing=()) -> int | None:
        """Return the first line in the code of a function that reads the last part of a name, but to change or call it.

        x["b"] reads no x["a"], and queue.pop() reads where its value is used. Code without a source is taken to read.

        is_its: the name is an attribute of the function's first argument, or may be.
        changing: last parts of names beside it that change as well, whose readers are looked for: it may go there.
        """
        word, key = last_part(name), _KEY.search(name)
        inside = self._inside(code)
        bare = {id(node.value) for node in inside if isinstance(node, ast.Expr)}
        # An argument may be a container that holds the value.
        is_held = key or name.startswith("len(")
        of_code = set(code.co_varnames) - {*code.co_cellvars, *code.co_freevars, word if is_held else None}
        words, skipped = _handed_on(inside, word, of_code, changing)
        for node in inside:
            if isinstance(node, ast.Subscript) and key and isinstance(node.slice, ast.Constant):
                skipped |= {id(node.value)} if repr(node.slice.value) != key[1] else set()
            if _target(node) is not None and _changes(node, word):
                skipped |= set(map(id, ast.walk(node)))
            elif isinstance(node, ast.Call) and (_word(node.func) == word or _changes(node, word)):
                is_read = id(node) not in bare and getattr(node.func, "attr", "").startswith("pop")
                skipped |= set() if is_read else set(map(id, ast.walk(node.func)))
            elif isinstance(node, ast.Attribute) and not is_its and _word(node.value) in code.co_varnames[:1]:
                skipped.add(id(node))
        loads = [n for n in inside if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load)]
        lines = [node.lineno for node in loads if _is_word(node, words, of_code) and id(node) not in skipped]
        if word in code.co_consts:
            texts = [node for node in inside if isinstance(node, (ast.Call, ast.Subscript))]
            texts = [node for node in texts if re.match(r"getattr\(|.*(__dict__|vars\()", ast.unparse(node))]
            lines += [t.lineno for t in texts if any(getattr(n, "value", 0) == word for n in ast.iter_child_nodes(t))]
        if not inside and any(i.argval == word for i in dis.get_instructions(code) if i.opname.startswith("LOAD")):
            return code.co_firstlineno
        return min(lines, default=None)

    def draws_next(self, code) -> int | None:
        """Return the first line in the code of a function that calls next() of what outlives the call."""
        calls = [node for node in self._inside(code) if isinstance(node, ast.Call) and _word(node.func) == "next"]
        drawn = [call for call in calls if call.args and _word(call.args[0]) in names_used(code)]
        return min((call.lineno for call in drawn), default=None)

    def _inside(self, code) -> list:
        last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
        return [node for node in self._nodes if code.co_firstlineno <= getattr(node, "lineno", -1) <= last]

    def draws_near(self, where: str) -> str:
        """Return the first FILE:LINE in the function around FILE:LINE that draws random numbers, else that line."""
        path, _, number = where.rpartition(":")
        if path != str(self.path) or not number.isdigit():
            return where
        line = int(number)
        kinds = ast.FunctionDef, ast.Lambda
        around = [n for n in self._nodes if isinstance(n, kinds) and n.lineno <= line <= (n.end_lineno or line)]
        inner = max(around, key=lambda function: function.lineno, default=None)
        calls = [call for call in ast.walk(inner) if isinstance(call, ast.Call)] if inner else []
        return self.at(min((call.lineno for call in calls if _word(call.func) in _DRAWING), default=line))

    def made(self, *names: str) -> int | None:
        """Return the last line that calls one of these names, such as a class."""
        return self._called(lambda function: _word(function) in names)

    def schedules(self) -> int | None:
        """Return the last line that calls step() of an object whose name is a schedule's, such as `lr_scheduler`."""

        def is_it(function):
            return _word(function) == "step" and "sched" in (_word(getattr(function, "value", None)) or "")

        return self._called(is_it)

    def draws(self, module: str) -> int | None:
        """Return the last line that calls a function of a module such as `random` or `numpy.random`."""
        imports = [node for node in self._nodes if isinstance(node, ast.ImportFrom) and node.module == module]
        imported = {alias.asname or alias.name for node in imports for alias in node.names}
        last = module.split(".")[-1]
        return self._called(lambda function: _is_of(function, last) or _word(function) in imported)

    def _called(self, is_it) -> int | None:
        calls = [node for node in self._nodes if isinstance(node, ast.Call)]
        return max((node.lineno for node in calls if is_it(node.func)), default=None)


def names_used(code) -> set[str]:
    """Return the names of attributes, globals and cells in the code of a function, without those inside of it."""
    return {*code.co_names, *code.co_freevars, *code.co_cellvars}


def last_part(name: str) -> str:
    """Return the last part of a name such as `len(self.queue[0])`."""
    return name.removeprefix("len(").rstrip(")").split("[")[0].split(".")[-1]


def _target(node):
    """Return what a statement assigns to, if it is one thing."""
    targets = getattr(node, "targets", []) if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    is_assignment = isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and len(targets) == 1
    return targets[0] if is_assignment and not isinstance(targets[0], (ast.Tuple, ast.List)) else None


def _is_word(node, words, of_code):
    """Say whether a node reads one of these words; of names of the code itself, those that have its value."""
    return _word(node) in (words[1:] if isinstance(node, ast.Name) and node.id in of_code else words[:1])


def _handed_on(inside, word, of_code, changing):
    """Return a word with the names of the code that have its value, and the nodes that hand it to `changing` alone."""
    words, skipped = [word], set()
    bases = {ast.unparse(n.value) for n in inside if isinstance(n, ast.Attribute) and n.attr == word}
    for carried in words:
        for node in inside:
            is_append = isinstance(node, ast.Expr) and _word(getattr(node.value, "func", None)) == "append"
            target = node.value.func.value if is_append else _target(node)
            value = node.value.args[0] if is_append and node.value.args else getattr(node, "value", None)
            if target is None or value is None:
                continue
            nodes = list(ast.walk(value))
            calls = [n.func for n in nodes if isinstance(n, ast.Call) and len(n.args)]
            has_word = any(_is_word(n, [carried] if carried == word else ["", carried], of_code) for n in nodes)
            if not has_word or any(_word(function) not in _PURE for function in calls):
                continue
            base, _, tail = ast.unparse(target).rpartition(".")
            if not is_append and isinstance(target, ast.Name) and target.id in of_code:
                words += [target.id] if target.id not in words else []
                skipped |= set(map(id, nodes))
            elif tail + ")" * is_append in changing and (base in bases or not base):
                skipped |= set(map(id, nodes))
    return words, skipped


def _changes(node, word):
    if isinstance(node, ast.Assign):
        return any(_names(target, word) for target in node.targets)
    if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        return _names(node.target, word)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "next":
            return any(_names(argument, word) for argument in node.args)
        return isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING and _names(node.func.value, word)
    return False


def _names(target, word):
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(_names(element, word) for element in target.elts)
    if isinstance(target, (ast.Subscript, ast.Starred)):
        return _names(target.value, word)
    return _word(target) == word


def _word(node):
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _is_of(function, module):
    """Say whether a function is an attribute of a module: random.random, np.random.rand; not torch.random."""
    if not isinstance(function, ast.Attribute) or _word(function.value) != module:
        return False
    owner = function.value.value if isinstance(function.value, ast.Attribute) else None
    return owner is None or _word(owner) != "torch"
