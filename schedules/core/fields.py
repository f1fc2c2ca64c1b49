"""Frozen dataclasses whose fields are what a person types: read from words, written back as them."""

from __future__ import annotations

import dataclasses
import operator
import reprlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

from schedules.core.errors import UnknownNameError, UsageError

Pair = tuple[int, int]
Scale = float | str  # a number, or a word that says where it comes from
F = TypeVar("F", bound="Fields")


@dataclass(frozen=True)
class Fields:
    """A frozen dataclass that is read from ``name=value`` words and written back as them."""

    error: ClassVar[type[UsageError]] = UsageError
    noun: ClassVar[str] = "value"
    letters: ClassVar[int] = 100  # of a text at most
    # fields that the class did not always have: at their default they are not written, so that names of files and lines
    # of journals are those of before
    later: ClassVar[tuple[str, ...]] = ()
    most: ClassVar[int] = 2**63 - 1  # of a whole number's size: what a program's int64 holds

    @classmethod
    def parse(cls: type[F], words: Mapping[str, Any]) -> F:
        """Make one from strings (command line) or plain values (JSON).

        Raises the class's error for a missing, extra or malformed field, naming it.
        """
        hints = hints_of(typing.cast(Any, cls))
        if words.keys() - hints.keys():
            name = next(name for name in words if name not in hints)
            raise UnknownNameError(f"{cls.noun} field", name, hints)
        if missing := [name for name in required_fields(typing.cast(Any, cls)) if name not in words]:
            raise cls.error(
                f"missing {cls.noun} {', '.join(missing)}; give {' '.join(name + '=...' for name in missing)}"
            )
        return cls(**{name: cls._convert(name, hints[name], value) for name, value in words.items()})

    @classmethod
    def _convert(cls, name: str, kind: Any, value: Any) -> Any:
        try:
            if kind == Pair:
                pair = tuple(cls._whole(part) for part in _parts(value))
                if len(pair) not in (1, 2):
                    raise ValueError
                return pair * (2 // len(pair))
            if kind is int:
                return cls._whole(value)
            if kind is float and not isinstance(value, bool):
                return float(value)
            if kind == Scale and not isinstance(value, bool):
                return value if isinstance(value, str) and value.isalpha() else float(value)
            if kind is bool and isinstance(value, str):
                return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[value.lower()]
            if kind is bool and isinstance(value, bool):
                return value
            if kind is str and isinstance(value, str) and value.isprintable() and len(value) <= cls.letters:
                return value
            raise ValueError
        except OverflowError:
            raise cls.error(f"{cls.noun} {name}={reprlib.repr(value)} is too large; at most {cls.most}") from None
        except (ValueError, TypeError, KeyError):
            wanted = {
                Pair: "one or two whole numbers (h,w)",
                int: "a whole number",
                float: "a number",
                Scale: "a number or a word",
                bool: "true or false",
            }.get(kind, "a word")
            raise cls.error(f"{cls.noun} {name}={reprlib.repr(value)} is not {wanted}") from None

    @classmethod
    def is_given(cls, name: str) -> bool:
        """Whether the field `name` is one that is written, rather than derived from others."""
        return name in given_names(typing.cast(Any, cls))

    @classmethod
    def _whole(cls, value: Any) -> int:
        """A whole number that is one, or text of one.  Raises ValueError, TypeError, OverflowError."""
        if isinstance(value, bool):
            raise ValueError
        number = int(value) if isinstance(value, str) else operator.index(value)
        if abs(number) > cls.most:
            raise OverflowError
        return number

    def to_json(self, every: bool = False) -> dict[str, Any]:
        """The fields as plain JSON values; of those in `later`, only those not at their default, or `every` one."""
        later = {} if every else _later(typing.cast(Any, type(self)))
        values = ((name, getattr(self, name)) for name in given_names(typing.cast(Any, type(self))))
        return {name: value for name, value in values if name not in later or value != later[name]}

    def __str__(self) -> str:
        def text(value: Any) -> str:
            if isinstance(value, tuple):
                return str(value[0]) if len(set(value)) == 1 else ",".join(map(str, value))
            return str(value).lower() if isinstance(value, bool) else str(value)

        return " ".join(f"{name}={text(value)}" for name, value in self.to_json().items())


def _parts(value: Any) -> Sequence[Any]:
    """The parts of a pair: of text, a sequence, or the one number for both."""
    if isinstance(value, str):
        return value.replace("x", ",").split(",")
    return value if isinstance(value, list | tuple) else [value]


@cache
def required_fields(cls: Any) -> tuple[str, ...]:
    """The fields without a default."""
    fields = (f for f in dataclasses.fields(cls) if f.init and f.default_factory is dataclasses.MISSING)
    return tuple(f.name for f in fields if f.default is dataclasses.MISSING)


@cache
def given_names(cls: Any) -> tuple[str, ...]:
    """The fields that are given: searches ask for them of every config of a space, several times."""
    return tuple(f.name for f in dataclasses.fields(cls) if f.init)


@cache
def _later(cls: Any) -> dict[str, Any]:
    """The fields in `later` and their defaults."""
    return {f.name: f.default for f in dataclasses.fields(cls) if f.name in cls.later}


@cache
def hints_of(cls: Any) -> dict[str, Any]:
    """The types of the fields that are given: they take longer to find than all else of `parse`, which reads every line
    of a journal."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
