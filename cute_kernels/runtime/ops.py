"""Operators: a table says once what each takes, and everything else follows from the table by name.

A table is made of typed dictionaries in a file `request.py`: `Inputs`, which callers give by position, `Options`, which
they give by name, and `Request`, which has both and what adapters of this package may ask for. The docstrings of the
first two describe each argument. `Operator` reads from them torch's schema, defaults, the public function's signature
and docstring, refusal of gradients, checks of options, and what the key of a prepared launch has of them.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch._C import _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from cute_kernels.runtime.checks import refuse_gradients, refuse_transformed
from cute_kernels.runtime.overlap import check_written, share_storage

NAMESPACE = __name__.partition(".")[0]
"""The package's name: cute_kernels, or the name that a loader of kernels has given to a copy of it."""
_library = torch.library.Library(NAMESPACE, "FRAGMENT")

Function = TypeVar("Function", bound=Callable[..., Any])
Values = Mapping[str, Any]
"""Arguments by name: a `Request` of some operator."""

WRITTEN: Final = "written"
"""Marks a tensor of a table that the operator writes."""
Written = Annotated[torch.Tensor, WRITTEN]
Output = Annotated[torch.Tensor | None, WRITTEN]
LATER: Final = "later"
"""Marks a tensor that was added to the operator after its first release: the schema has its default."""
Later = Annotated[torch.Tensor | None, LATER]
ADDRESS: Final = "address"
"""Marks a tensor that a kernel gets as an address, so the key of a prepared launch has all that it must fit."""
Address = Annotated[torch.Tensor | None, ADDRESS]
_SIGNATURE: Final = "(t.shape, t.stride(), t.dtype, t.get_device(), t.is_neg())"
_KEPT: Final = 1024
"""Calls whose addresses a prepared launch remembers; 0.1 MB."""


@dataclass(frozen=True)
class Option:
    """Describes an argument that is not a tensor.

    default  default of the public function
    check    check(name, value) raises for a wrong value; it is not called for a None that is allowed
    planned  the plan depends on the value, so the key of a prepared launch has it
    fact     fact(value) is fixed at compile time: it is in the key, and in the spec's field of the argument's name
    fits     whether a kernel may be given the value; it is asked in every call, since no key has the value
    given    given(value) is what a kernel gets for a value that is not None; a bool becomes 0 or 1
    hidden   only adapters of this package may give it, so a request may lack it
    later    added to the operator after its first release: the schema has its default
    schema   torch's type, if the annotation does not imply it; "" for options that only eager calls know
    """

    default: Any = None
    check: Callable[[str, Any], None] | None = None
    planned: bool = False
    fact: Callable[[Any], Any] | None = None
    fits: Callable[[Any], bool] | None = None
    given: Callable[[Any], Any] | None = None
    hidden: bool = False
    later: bool = False
    schema: str | None = None


@dataclass(frozen=True)
class Argument:
    """A row of the table. `option` is None for a tensor."""

    name: str
    annotation: Any
    written: bool
    later: bool
    address: bool
    option: Option | None

    @classmethod
    def of(cls, name: str, hint: Any) -> Argument:
        """Makes a row from the type annotation that a table gives a name."""
        marks: tuple[Any, ...] = ()
        if get_origin(hint) is Annotated:
            hint, marks = hint.__origin__, hint.__metadata__
        tensor = torch.Tensor in (hint, *get_args(hint))
        option = next((mark for mark in marks if isinstance(mark, Option)), None)
        later = LATER in marks or bool(option and option.later)
        return cls(name, hint, WRITTEN in marks, later, ADDRESS in marks, None if tensor else option or Option())

    @property
    def may_be_none(self) -> bool:
        """Whether callers may leave the argument out or give None."""
        return types.NoneType in get_args(self.annotation)

    def schema(self, alias: str) -> str:
        """Returns the argument as a torch schema writes it; `alias` marks a written tensor."""
        if self.written:
            return f"Tensor({alias}!) {self.name}"
        if self.option is None:
            return f"Tensor{'?' * self.may_be_none} {self.name}" + "=None" * self.later
        known = next(t for t in (*get_args(self.annotation), self.annotation) if t is not types.NoneType)
        name = self.option.schema or known.__name__ + "?" * self.may_be_none
        return f"{name} {self.name}" + f"={self.option.default}" * self.later


class Operator:
    """An operator of this package and of `torch.ops.cute_kernels`.

    Args:
        name: name of the operator, here and in torch.
        inputs: typed dictionary of the arguments that callers may give by position.
        options: typed dictionary of the arguments that callers give by name.
        request: typed dictionary of both and of hidden arguments, in the order of the schema.
        returns: the schema's return type.
    """

    def __init__(self, name: str, inputs: type, options: type, request: type, returns: str = "()") -> None:
        hints = get_type_hints(request, include_extras=True)
        self.name, self.returns = name, returns
        self.arguments = {key: Argument.of(key, hint) for key, hint in hints.items()}
        self._options = {key: self.arguments[key] for key in options.__annotations__}
        self._docs = "\n".join(_described(table) for table in (inputs, options))
        rows = self.arguments.values()
        self.tensors = tuple(row.name for row in rows if row.option is None)
        self.written = tuple(row.name for row in rows if row.written)
        self.defaults: Any = {
            row.name: row.option.default if row.option else None
            for row in rows
            if not (row.option and row.option.hidden)
        }
        self.names = tuple(row.name for row in rows if row.option is None or row.option.schema != "")
        self._checked = [row for row in rows if row.option and row.option.check]
        self._facts = [(row.name, row.option.fact) for row in rows if row.option and row.option.fact]
        values = ", ".join(f"r[{name!r}]" for name in self.tensors)
        self.tensors_of: Callable[[Values], tuple[Any, ...]] = compiled(f"lambda r: ({values},)")
        """tensors_of(request): the tensor arguments, in the order of `tensors`."""
        types = ", ".join(f"type(r[{name!r}])" for name in self.tensors)
        self.types_of: Callable[[Values], set[type]] = compiled(f"lambda r: {{{types}}}")
        """types_of(request): the types of the tensor arguments."""
        self.key = self._key()
        """key(request): the part of a prepared launch's key that options, outputs and addresses decide."""
        self.check_addresses = self._check_addresses()
        """check_addresses(request, apart): `check_outputs` for a prepared launch, which keeps the set `apart`."""

    # ---- the public function

    def describe(self, function: Function) -> Function:
        """Gives the public function the signature that `**options` stand for, and adds descriptions of arguments."""
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        keyword = inspect.Parameter.KEYWORD_ONLY
        named = [
            inspect.Parameter(row.name, keyword, default=self.defaults[row.name], annotation=row.annotation)
            for row in self._options.values()
            if row.name not in signature.parameters
        ]
        by_position = [p for p in own if p.kind is not keyword]
        by_name = [*named, *(p for p in own if p.kind is keyword)]
        function.__signature__ = signature.replace(parameters=[*by_position, *by_name])  # type: ignore[attr-defined]
        if function.__doc__:  # python -OO has none
            before, end, after = inspect.cleandoc(function.__doc__).partition("\n\nReturns:")
            if not end:
                before, end, after = before.partition("\n\nRaises:")
            function.__doc__ = f"{before}\n\nArgs:\n{self._docs}{end}{after}"
        return function

    def refuse_unknown(self, options: Values) -> None:
        """Raises the error that Python raises for a keyword argument that a function does not have.

        Callers ask only if a request has more names than `defaults`.
        """
        name = next(name for name in options if name not in self._options)
        raise TypeError(f"{self.name}() got an unexpected keyword argument {name!r}")

    def request(self, **given: Any) -> Any:
        """Returns all arguments: the given ones, and the defaults of the others."""
        unknown = given.keys() - self.arguments.keys()
        if unknown:
            raise TypeError(f"{self.name}: got {', '.join(sorted(unknown))}; needs {', '.join(self.arguments)}")
        return {**self.defaults, **given}

    def arguments_of(self, reference: Callable[..., Any]) -> Callable[[Values], dict[str, Any]]:
        """Returns the function that picks the arguments of a reference out of a request, by name."""
        names = [name for name in inspect.signature(reference).parameters if name in self.arguments]
        return lambda request: {name: request[name] for name in names}

    # ---- checks

    def refuse_gradients(self, request: Values) -> None:
        """Raises ValueError for the first tensor that requires gradients.

        Callers test `torch.is_grad_enabled()` first, which takes 0.04 us: serving code runs without gradients.
        """
        refuse_gradients(self.name, {name: request[name] for name in self.tensors})

    def check_options(self, request: Values) -> None:
        """Raises an error for the first wrong argument that is not a tensor."""
        for row in self._checked:
            value = request.get(row.name)
            if value is not None or not row.may_be_none:
                row.option.check(row.name, value)  # type: ignore[union-attr,misc]

    def check_outputs(self, request: Values) -> None:
        """Raises if an output shares memory with another argument. Only `out` may be `q`, row for row."""
        written = {name: request[name] for name in self.written}
        read = {name: request[name] for name in self.tensors if name not in written}
        check_written(written, read, in_place=("out", "q"))

    # ---- prepared launches

    def _key(self) -> Callable[[Values], tuple[Any, ...]]:
        """Makes the function `key`: it collects what a plan and a spec depend on, and the types of numbers.

        A kernel takes True for 1, and 1.0 finds the launch that 1 prepared, so types count. For values that are not in
        the key, the key says whether a kernel may be given them: a prepared launch had acceptable ones. For outputs it
        has the neg bit and any strides that are not contiguous.
        """
        parts, known = [], dict[str, Any]()
        for row in self.arguments.values():
            option, value = row.option, f"r[{row.name!r}]"
            if row.address:
                parts.append(f"None if (t := {value}) is None else {_SIGNATURE}")
            elif row.written and row.may_be_none:
                usual = "t.is_contiguous() and not t.is_neg()"  # one number is contiguous, negated or not
                parts.append(f"None if (t := {value}) is None or {usual} else (t.stride(), t.is_neg())")
            elif option and option.schema != "":
                known |= {f"fact_{row.name}": option.fact, f"fits_{row.name}": option.fits}
                facts = ["v"] if option.planned else []
                facts += [f"{what}_{row.name}(v)" for what in ("fact", "fits") if getattr(option, what)]
                if str not in (row.annotation, *get_args(row.annotation)):
                    facts.append("type(v)")
                value = f"r.get({row.name!r})" if option.hidden else value
                parts.append(f"None if (v := {value}) is None else ({', '.join(facts)})")
        return compiled(f"lambda r: ({''.join(f'{part}, ' for part in parts)})", **known)

    def _check_addresses(self) -> Callable[[Values, set[tuple[int, ...]]], object]:
        """Makes the function `check_addresses`, which does not look at shapes and strides: a launch's key has them.

        Tensors of different storages cannot overlap. Looking at storages takes 2 us, so `apart` keeps the addresses of
        earlier calls whose storages differed: the next call in a layer has them again. None counts as address 0, and so
        does a `q` that is also `out`, which is allowed.
        """
        parts = {name: f"0 if (t := r[{name!r}]) is None else t.data_ptr()" for name in self.tensors}
        if "q" in parts and "out" in self.written:
            parts["q"] = "0 if (t := r['q']) is r['out'] else t.data_ptr()"
        addresses = f"({', '.join(parts.values())},)"
        return compiled(f"lambda r, apart: (at := {addresses}) in apart or check(r, apart, at)", check=self._check_new)

    def _check_new(self, request: Values, apart: set[tuple[int, ...]], addresses: tuple[int, ...]) -> None:
        """Runs `check_addresses` on addresses that are not in `apart` yet."""
        written = {name: request[name] for name in self.written}
        if share_storage(written, dict(zip(self.tensors, addresses, strict=True))):
            self.check_outputs(request)
            return
        if len(apart) >= _KEPT:
            apart.clear()
        apart.add(addresses)

    def facts_of(self, request: Values) -> dict[str, Any]:
        """Returns the fields of the kernel's spec that options decide."""
        return {name: fact(request.get(name)) for name, fact in self._facts}

    # ---- torch

    @property
    def schema(self) -> str:
        """Arguments and results as a torch schema."""
        aliases = dict(zip(self.written, "abcdefgh", strict=False))
        rows = ", ".join(self.arguments[name].schema(aliases.get(name, "")) for name in self.names)
        return f"({rows}) -> {self.returns}"

    def register(
        self,
        run: Callable[[Any], Any],
        fake: Callable[[Any], Any],
        *,
        backward: Callable[..., Mapping[str, Any]] | None = None,
        setup_context: Callable[[Any, Any, Any], None] | None = None,
    ) -> Callable[[Any], Any]:
        """Registers the operator with torch for CPU and CUDA tensors, and returns the function that callers use.

        That function takes a request. In eager mode it calls `run` directly, which saves the 7 us of torch's
        dispatcher. It calls the operator while something traces (see `is_traced`), and if autograd must record the
        call.

        Args:
            run: computes the results of a request of real tensors.
            fake: returns empty tensors of the right shape and dtype, or None for "-> ()".
            backward: backward(ctx, *gradients of the results) returns gradients by argument name; absent ones are None.
                It is traced too, so it calls operators (`torch.ops`), never a `run`. Written outputs allow no backward.
            setup_context: setup_context(ctx, request, output) saves what `backward` needs.
        """
        _library.define(f"{self.name}{self.schema}", tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _library.impl(self.name, self._by_position(run), key)
        full_name = f"{NAMESPACE}::{self.name}"
        torch.library.register_fake(full_name, self._by_position(fake), lib=_library)
        op = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        if backward is not None:
            differentiate, keep = backward, setup_context

            def gradients(ctx: Any, *given: torch.Tensor | None) -> tuple[Any, ...]:
                found = differentiate(ctx, *given)
                return tuple(found.get(name) for name in self.names)

            def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                if keep is not None:
                    keep(ctx, dict(zip(self.names, inputs, strict=True)), output)

            torch.library.register_autograd(full_name, gradients, setup_context=setup, lib=_library)

        def call(request: Values) -> Any:
            if forward_ad._current_level >= 0:  # a traced call of the operator would lose derivatives
                refuse_transformed(self.tensors, self.tensors_of(request))
            if is_traced() or (backward is not None and needs_grad(*self.tensors_of(request))):
                given = {**self.defaults, **request}
                # by position, because torch.compile inspects an argument named `out`; omitted arguments come last
                return op(*[given[name] for name in self.names if name in given])
            return run(request)

        return call

    def _by_position(self, run: Callable[[Any], Any]) -> Callable[..., Any]:
        """Returns `run` in the form that torch's dispatcher calls: by position, with trailing defaults left out."""
        return lambda *values: run({**self.defaults, **dict(zip(self.names, values, strict=False))})


def compiled(expression: str, **known: Any) -> Any:
    """Evaluates a Python expression of this package over known names.

    The compiled expression names all arguments: a loop over a table in each launch would take 2 us.
    """
    return eval(expression, known)


signature: Callable[[torch.Tensor | None], tuple[Any, ...] | None] = compiled(
    f"lambda t: None if t is None else {_SIGNATURE}"
)
"""The properties of a tensor that a compiled kernel cannot check when it gets an address."""


def _described(table: type) -> str:
    """Returns the lines of a table's docstring that describe arguments, in Google's docstring format."""
    text = inspect.cleandoc(table.__doc__ or "").partition("\n\n")[2]
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())


def is_given(value: object) -> bool:
    """Whether an argument is not None."""
    return value is not None


def is_traced() -> bool:
    """Whether calls must go through torch's dispatcher.

    torch.compile and torch.export record them; a dispatch mode, such as FakeTensorMode, computes shapes without memory
    or counts. It takes 0.15 us.
    """
    return is_compiling() or _len_torch_dispatch_stack() > 0


def needs_grad(*values: Any) -> bool:
    """Whether autograd would record an operation on these arguments."""
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in values)
